"""Blobs that nobody reads without the master key: AES-256-GCM (NIST SP 800-38D), one nonce a blob.

The record key is authenticated with it. The tag follows the ciphertext, and the record's own MAC covers both,
so nothing is deciphered that was not stored here. Nonces are 96 random bits: with one key, 2^32 blobs may be
written (section 8.3), which at 10,000 a second takes five days and at one a second a hundred years.
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtcd.core.errors import BadChecksum
from kvtcd.core.keys import RecordKey, TenantKeys

NONCE_BYTES = 12
TAG_BYTES = 16


def new_nonce() -> bytes:
    """Return a nonce that no blob had before."""
    return secrets.token_bytes(NONCE_BYTES)


def encrypt(keys: TenantKeys, key: RecordKey, nonce: bytes, blob: bytearray | memoryview) -> bytearray:
    """Return a blob as it is stored: `TAG_BYTES` longer."""
    out = bytearray(len(blob) + TAG_BYTES)
    AESGCM(keys.cipher).encrypt_into(nonce, blob, key, out)
    return out


def decrypt(keys: TenantKeys, key: RecordKey, nonce: bytes, stored: memoryview, out: memoryview) -> None:
    """Write a blob into `out`, which is `TAG_BYTES` shorter than what is stored.

    Raises:
        BadChecksum: it was encrypted under another key or name, or changed since.
    """
    try:
        AESGCM(keys.cipher).decrypt_into(nonce, stored, key, out)
    except InvalidTag:
        raise BadChecksum("record", "the blob does not match its tag") from None
