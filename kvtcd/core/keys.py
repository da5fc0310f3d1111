"""Names of blocks: engine keys, our own chain over tokens, and the record keys of a tenant.

An engine key says which tokens a block stands for. A record key says whose block it is: it is an HMAC under
the tenant's key over namespace, salt and engine key, so equal tokens of two tenants never meet.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

from kvtcd.core.errors import BadKey, BadRequest

EngineKey = NewType("EngineKey", bytes)
"""1 to 64 opaque bytes; lower-case hex on the wire."""
RecordKey = NewType("RecordKey", bytes)
"""32 bytes."""

_SHOWN = 6
_PADS = tuple(bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))
MAX_SALT = 255
MAX_KEY = 64
_MAX_TOKEN = 2**32 - 1


def log_name(key: RecordKey) -> str:
    """Return a record's name in logs: the start of a keyed hash, which tells of neither tokens nor keys."""
    return key[:_SHOWN].hex()


def parse_key(text: str) -> EngineKey:
    """Read an engine key from the wire.

    Raises:
        BadKey: not 2 to 128 lower-case hex digits, or an odd number of them.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise BadKey(text) from None
    # Seven times faster than a regular expression; the comparison refuses blanks and upper case.
    if not 1 <= len(key) <= MAX_KEY or key.hex() != text:
        raise BadKey(text)
    return EngineKey(key)


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """One block of a sequence: its key, its parent's key, and the tokens ``[first, first + tokens)``."""

    key: EngineKey
    parent: EngineKey | None
    first: int
    tokens: int


def token_array(tokens: Sequence[int]) -> array[int]:
    """Return token ids as unsigned 32-bit integers.

    Raises:
        BadRequest: an id outside 0..2**32-1.
    """
    try:
        out = array("I", tokens)
    except (OverflowError, TypeError):
        raise BadRequest("tokens", f"token ids must be integers within 0..{_MAX_TOKEN}") from None
    if out.itemsize != 4:  # pragma: no cover - no such platform runs torch
        raise BadRequest("tokens", "this platform has no 32-bit array type")
    return out


def tokens_to_bytes(tokens: array[int]) -> bytes:
    """Write token ids as little-endian u32, as they are hashed and sent."""
    if sys.byteorder == "big":  # pragma: no cover - exercised on no machine of ours
        tokens = array("I", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def tokens_from_bytes(data: bytes | bytearray) -> array[int]:
    """Read what `tokens_to_bytes` wrote.

    Raises:
        BadRequest: not a whole number of ids.
    """
    tokens = array("I")
    if len(data) % tokens.itemsize:
        raise BadRequest("body", "is not a whole number of token ids of 4 bytes each")
    tokens.frombytes(data)
    if sys.byteorder == "big":  # pragma: no cover - exercised on no machine of ours
        tokens.byteswap()
    return tokens


def chain_root(namespace: bytes) -> EngineKey:
    """Return ``k_0``, the parent of every first block: BLAKE2b-256("kvtcd-chain-v1" ‖ namespace digest)."""
    return EngineKey(hashlib.blake2b(b"kvtcd-chain-v1" + namespace, digest_size=32).digest())


def chain_key(parent: EngineKey, tokens: array[int]) -> EngineKey:
    """Return ``k_i`` = BLAKE2b-256(k_{i-1} ‖ tokens as little-endian u32)."""
    return EngineKey(hashlib.blake2b(parent + tokens_to_bytes(tokens), digest_size=32).digest())


def chain(namespace: bytes, tokens: Sequence[int], block_tokens: int) -> Iterator[ChainBlock]:
    """Yield the blocks of a sequence in order; the last one may be partial.

    Args:
        namespace: digest of the namespace, 32 bytes.
        tokens: token ids of the whole sequence.
        block_tokens: tokens of a full block.
    """
    ids = token_array(tokens)
    key = chain_root(namespace)
    for first in range(0, len(ids), block_tokens):
        piece = ids[first : first + block_tokens]
        parent, key = key, chain_key(key, piece)
        yield ChainBlock(key, parent if first else None, first, len(piece))


@dataclass(frozen=True, slots=True, repr=False)
class TenantKeys:
    """What a tenant's records are named and authenticated with. Never logged: it has no repr.

    Attributes:
        tenant: the tenant's name, e.g. ``uid:1000``.
        key_id: names the master key.
        record: key of the record-key HMAC.
        mac: key of the record MAC.
        cipher: key of blobs that are encrypted.
        tag: 16 bytes that stand for the tenant in names and envelopes.
    """

    tenant: str
    key_id: bytes
    record: bytes
    mac: bytes
    cipher: bytes
    tag: bytes

    @classmethod
    def derive(cls, master: bytes, tenant: str) -> TenantKeys:
        """Derive a tenant's keys from the master key by HKDF-SHA256 (RFC 5869, no salt)."""
        name = tenant.encode()
        return cls(
            tenant=tenant,
            key_id=key_id(master),
            record=hkdf(master, b"kvtcd-tenant-v1" + name),
            mac=hkdf(master, b"kvtcd-mac-v1" + name),
            cipher=hkdf(master, b"kvtcd-aes-v1" + name),
            tag=hkdf(master, b"kvtcd-tag-v1" + name)[:16],
        )

    def record_key(self, namespace: bytes, salt: bytes, key: bytes) -> RecordKey:
        """Return HMAC-SHA256("kvtcd-rec-v1" ‖ namespace ‖ u16 length of salt ‖ salt ‖ key).

        Raises:
            BadRequest: the salt is over 255 bytes.
        """
        return self.record_keys(namespace, salt)(key)

    def record_keys(self, namespace: bytes, salt: bytes) -> Callable[[bytes], RecordKey]:
        """Return what makes record keys of engine keys of one namespace and salt; see `record_key`.

        What all of them have in common is hashed once (RFC 2104): a third of the time for each.

        Raises:
            BadRequest: the salt is over 255 bytes.
        """
        if len(salt) > MAX_SALT:
            raise BadRequest("salt", f"{len(salt)} bytes; at most {MAX_SALT}")
        inner, outer = (hashlib.sha256(self.record.ljust(64, b"\0").translate(pad)) for pad in _PADS)
        inner.update(b"kvtcd-rec-v1" + namespace + struct.pack("<H", len(salt)) + salt)

        def record_key(key: bytes) -> RecordKey:
            message, code = inner.copy(), outer.copy()
            message.update(key)
            code.update(message.digest())
            return RecordKey(code.digest())

        return record_key


def key_id(master: bytes) -> bytes:
    """Return 8 bytes that name a master key, and do not tell it."""
    return hkdf(master, b"kvtcd-id-v1")[:8]


def hkdf(secret: bytes, info: bytes, salt: bytes = bytes(32)) -> bytes:
    """Return one 32-byte block of HKDF-SHA256 (RFC 5869); its default salt is zeros."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")
