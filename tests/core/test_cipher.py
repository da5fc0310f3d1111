"""Encrypted blobs, against a vector of the authors of GCM and every change that could be made to one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtcd.core import cipher
from kvtcd.core.errors import BadChecksum
from kvtcd.core.keys import RecordKey, TenantKeys

TENANT = TenantKeys.derive(bytes(range(32)), "uid:1000")
NAME, NONCE = RecordKey(b"k" * 32), b"n" * 12


def decrypted(keys: TenantKeys, stored: bytes, *, name: bytes = NAME, nonce: bytes = NONCE) -> bytes:
    out = bytearray(len(stored) - cipher.TAG_BYTES)
    cipher.decrypt(keys, RecordKey(name), nonce, memoryview(stored), memoryview(out))
    return bytes(out)


def test_it_is_aes_256_gcm() -> None:
    """Test case 16 of McGrew and Viega, "The Galois/Counter Mode of Operation"."""
    keys = replace(TENANT, cipher=bytes.fromhex(2 * "feffe9928665731c6d6a8f9467308308"))
    name = RecordKey(bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2"))
    nonce = bytes.fromhex("cafebabefacedbaddecaf888")
    plain = bytes.fromhex(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
    )
    stored = cipher.encrypt(keys, name, nonce, memoryview(plain))

    assert stored.hex() == (
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
        "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
        "76fc6ece0f4e1768cddf8853bb2d551b"
    )
    assert decrypted(keys, bytes(stored), name=name, nonce=nonce) == plain


def test_no_changed_bit_no_other_name_nonce_or_tenant_is_accepted() -> None:
    stored = bytes(cipher.encrypt(TENANT, NAME, NONCE, memoryview(b"a blob of no importance")))
    assert decrypted(TENANT, stored) == b"a blob of no importance"
    for bit in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadChecksum):
            decrypted(TENANT, bytes(damaged))
    for others in ({"name": bytes(32)}, {"nonce": bytes(12)}):
        with pytest.raises(BadChecksum):
            decrypted(TENANT, stored, **others)
    with pytest.raises(BadChecksum):
        decrypted(TenantKeys.derive(bytes(range(32)), "uid:1001"), stored)


def test_no_nonce_comes_twice() -> None:
    assert len({cipher.new_nonce() for _ in range(1000)}) == 1000
