"""Names, frames and the generation object: what is written is read, and nothing else is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.errors import Corrupt, Truncated
from kvtcd.core.keys import RecordKey, TenantKeys
from kvtcd.core.record import MAX_ENVELOPE_BYTES
from kvtcd.core.remote import names

KEYS, OTHERS = TenantKeys.derive(bytes(32), "a"), TenantKeys.derive(bytes(32), "b")
SPACE = bytes(range(32))


def test_golden_names() -> None:
    tag = KEYS.tag.hex()

    assert names.record_name(KEYS, SPACE, 7, RecordKey(b"\xff" * 32)) == f"{tag}/{SPACE.hex()}/7/{'ff' * 32}"
    assert names.generation_name(KEYS, SPACE) == f"{tag}/{SPACE.hex()}/generation"
    assert names.profile_name(b"\x01" * 32) == f"profiles/{'01' * 32}"


def test_golden_generation() -> None:
    data = names.state_generation(KEYS, SPACE, 1_700_000_000_000)

    assert data[:16].hex() == "4b56544700000000" + (1_700_000_000_000).to_bytes(8, "little").hex()
    assert len(data) == 48


@given(st.integers(1, (1 << 64) - 1))
def test_a_generation_is_read_back(generation: int) -> None:
    assert names.stated_generation(KEYS, SPACE, names.state_generation(KEYS, SPACE, generation)) == generation


@given(st.data())
def test_another_generation_object_is_refused(data) -> None:
    good = names.state_generation(KEYS, SPACE, 5)
    at = data.draw(st.integers(0, len(good) * 8 - 1))
    flipped = bytearray(good)
    flipped[at // 8] ^= 1 << at % 8
    cut = good[: data.draw(st.integers(0, len(good) - 1))]
    strange = [
        names.state_generation(OTHERS, SPACE, 5),
        names.state_generation(KEYS, bytes(32), 5),
        names.state_generation(KEYS, SPACE, 0),
    ]
    for wrong in (bytes(flipped), cut, good + b"\0", *strange):
        with pytest.raises(Corrupt):
            names.stated_generation(KEYS, SPACE, wrong)


@given(st.binary(max_size=MAX_ENVELOPE_BYTES), st.binary(max_size=200))
def test_a_record_is_split_where_its_parts_meet(envelope: bytes, blob: bytes) -> None:
    front, back = names.split(b"".join(names.parts(envelope, blob)))

    assert (front, bytes(back)) == (envelope, blob)


@given(st.binary(max_size=64))
def test_bytes_of_any_kind_are_split_or_refused(data: bytes) -> None:
    try:
        front, back = names.split(data)
    except Truncated:
        return
    assert len(front) + len(back) + 2 == len(data)


def test_a_length_that_no_envelope_has_is_refused() -> None:
    with pytest.raises(Truncated):
        names.split(b"".join(names.parts(bytes(MAX_ENVELOPE_BYTES + 1), b"")))
