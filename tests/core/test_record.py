"""Envelopes: golden bytes, every flipped bit, records under another key or tenant."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from support.mutations import damaged

from kvtcd.core import cipher, record
from kvtcd.core.errors import BadChecksum, BadMagic, BadVersion, Corrupt, Truncated, WrongRecord
from kvtcd.core.keys import EngineKey, RecordKey, TenantKeys
from kvtcd.core.record import Envelope

HERE = Path(__file__).parent / "golden"
SEALED = (HERE / "envelope-v1.bin").read_bytes()
SECRET = (HERE / "envelope-v1-aes.bin").read_bytes()
BLOB = (HERE / "blob-v1.bin").read_bytes()
TENANT = TenantKeys.derive(bytes(range(32)), "uid:1000")
GOLDEN = record.parse(SEALED)


def test_golden_envelope() -> None:
    envelope = record.open_envelope(TENANT, GOLDEN.key, SEALED)
    record.check_blob(TENANT, envelope, BLOB)

    assert envelope == GOLDEN
    assert (envelope.generation, envelope.salt, envelope.first_token, envelope.tokens) == (
        7,
        b"salt",
        512,
        200,
    )
    assert (envelope.created, envelope.expires) == (1_790_000_000_000, None)
    assert record.seal(TENANT, envelope) == SEALED
    assert SEALED[-32:] == blake3(SEALED[:-32], key=TENANT.mac).digest()
    assert envelope.blob_mac == blake3(BLOB, key=TENANT.mac).digest()


def test_golden_envelope_of_an_encrypted_blob() -> None:
    stored = (HERE / "blob-v1-aes.bin").read_bytes()
    envelope = record.open_envelope(TENANT, GOLDEN.key, SECRET)
    record.check_blob(TENANT, envelope, stored)
    out = bytearray(len(stored) - cipher.TAG_BYTES)
    cipher.decrypt(TENANT, envelope.key, envelope.nonce, memoryview(stored), memoryview(out))

    assert out == BLOB
    assert envelope.nonce == bytes(range(100, 112))
    assert record.seal(TENANT, envelope) == SECRET


@pytest.mark.parametrize("sealed", [SEALED, SECRET], ids=["plain", "encrypted"])
def test_every_flipped_bit_is_found(sealed) -> None:
    for bit in range(8 * len(sealed)):
        damaged = bytearray(sealed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            record.open_envelope(TENANT, GOLDEN.key, bytes(damaged))


def test_every_cut_is_found() -> None:
    for length in range(len(SEALED)):
        with pytest.raises(Corrupt):
            record.open_envelope(TENANT, GOLDEN.key, SEALED[:length])


@given(damaged([SEALED, SECRET]))
def test_a_changed_envelope_under_a_right_mac_is_refused_or_means_what_it_says(data) -> None:
    body = data[: -record.MAC_BYTES]
    sealed = body + blake3(body, key=TENANT.mac).digest()
    try:
        envelope = record.parse(sealed)
        with suppress(WrongRecord):
            record.open_envelope(TENANT, envelope.key, sealed)
    except Corrupt:
        return

    again = record.seal(TENANT, envelope)
    assert record.parse(again) == envelope
    assert len(again) == len(sealed)


@given(
    key=st.binary(min_size=1, max_size=64),
    salt=st.binary(max_size=255),
    parent=st.none() | st.binary(min_size=32, max_size=32),
    first=st.none() | st.integers(0, record.MAX_NUMBER),
    expires=st.none() | st.integers(1, record.MAX_NUMBER),
    tokens=st.integers(1, 2**31),
)
def test_what_is_sealed_is_opened(key, salt, parent, first, expires, tokens) -> None:
    engine_key = EngineKey(key)
    envelope = replace(
        GOLDEN,
        key=TENANT.record_key(GOLDEN.namespace, salt, engine_key),
        engine_key=engine_key,
        salt=salt,
        parent=RecordKey(parent) if parent else None,
        first_token=first,
        expires=expires,
        tokens=tokens,
        raw_bytes=2**40,
    )
    sealed = record.seal(TENANT, envelope)

    assert record.open_envelope(TENANT, envelope.key, sealed) == envelope
    assert len(sealed) <= record.MAX_ENVELOPE_BYTES


def test_an_intact_record_under_another_key_is_refused() -> None:
    with pytest.raises(WrongRecord):
        record.open_envelope(TENANT, RecordKey(bytes(32)), SEALED)


def test_an_envelope_that_names_a_key_it_does_not_derive_is_refused() -> None:
    forged = record.seal(TENANT, replace(GOLDEN, engine_key=EngineKey(b"other")))

    with pytest.raises(WrongRecord):
        record.open_envelope(TENANT, GOLDEN.key, forged)


def test_another_tenant_cannot_open_it() -> None:
    with pytest.raises(BadChecksum):
        record.open_envelope(TenantKeys.derive(bytes(range(32)), "uid:1001"), GOLDEN.key, SEALED)


@pytest.mark.parametrize(
    ("at", "data", "error"),
    [
        (0, b"KVTX", BadMagic),
        (4, b"\x02", BadVersion),
        (6, b"\x01", Corrupt),
        (6, b"\x02", Corrupt),
        (7, b"\x04", Corrupt),
        (10, b"\x00", Corrupt),
    ],
)
def test_form_is_checked_before_the_mac(at, data, error) -> None:
    damaged = bytearray(SEALED)
    damaged[at : at + len(data)] = data

    with pytest.raises(error):
        record.parse(bytes(damaged))


def test_a_blob_of_another_length_or_content_is_refused() -> None:
    with pytest.raises(Truncated):
        record.check_blob(TENANT, GOLDEN, BLOB[:-1])
    with pytest.raises(BadChecksum):
        record.check_blob(TENANT, GOLDEN, bytes(len(BLOB)))


def test_an_envelope_says_nothing_of_its_keys() -> None:
    assert TENANT.mac not in SEALED
    assert isinstance(GOLDEN, Envelope)
