"""Columns of many envelopes say what `core.record` says of each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core import record
from kvtcd.core.errors import Corrupt
from kvtcd.core.events import Found
from kvtcd.core.keys import EngineKey, RecordKey, TenantKeys
from kvtcd.core.record import Envelope
from kvtcd.engine import envelopes

TENANT = TenantKeys.derive(bytes(range(32)), "uid:1000")
KEY, PARENT = RecordKey(b"k" * 31 + b"\0"), RecordKey(b"p" * 31 + b"\0")
NOW = 1_700_000_000_000
OURS = SimpleNamespace(number=3, generation=7)
DIGEST = b"d" * 31 + b"\0"
FIRST = Envelope(
    key=KEY, tenant_tag=TENANT.tag, key_id=TENANT.key_id, namespace=DIGEST, generation=7,
    engine_key=EngineKey(b"e"), salt=b"", parent=PARENT, first_token=512, tokens=256, raw_bytes=1 << 20,
    blob_bytes=1000, created=NOW - 5, expires=None, blob_mac=bytes(32),
)  # fmt: skip
numbers = st.integers(0, record.MAX_NUMBER)
sealed = st.builds(
    lambda **fields: record.seal(TENANT, replace(FIRST, **fields)),
    namespace=st.sampled_from([DIGEST, DIGEST, b"other".ljust(32)]),
    generation=st.sampled_from([7, 7, 8]),
    engine_key=st.binary(min_size=1, max_size=64),
    salt=st.binary(max_size=255),
    parent=st.sampled_from([None, PARENT]),
    first_token=st.none() | numbers,
    expires=st.none() | st.integers(NOW - 2000, NOW + 5000),
    created=numbers | st.integers(NOW - 5000, NOW + 5000),
    nonce=st.sampled_from([b"", b"", b"n" * 12]),
    blob_bytes=st.sampled_from([1000, 17, 16]),
)


def taken(values: list[bytes]) -> dict[int, Found]:
    keys = [bytes([number]) * 32 for number in range(len(values))]
    footprints = np.arange(len(values), dtype=np.int64)
    rows, mask = envelopes.read(keys, values, footprints, {DIGEST: OURS}, NOW)
    return dict(zip(np.flatnonzero(mask).tolist(), envelopes.found(rows[mask]), strict=True))


def expected(number: int, value: bytes) -> Found | None:
    try:
        envelope = record.parse(value)
    except Corrupt:
        return None
    left = None if envelope.expires is None else (envelope.expires - NOW) // 1000
    whole = None if envelope.expires is None else (envelope.expires - envelope.created) // 1000
    if left is not None and whole is not None and 0 < whole < left:
        left = whole  # the clock was set back since
    if (envelope.namespace, envelope.generation) != (DIGEST, 7) or (left is not None and left <= 0):
        return None
    return Found(
        RecordKey(bytes([number]) * 32), 3, envelope.tokens, envelope.raw_bytes, number, envelope.parent,
        envelope.first_token or 0, left,
    )  # fmt: skip


@given(st.lists(sealed, max_size=5))
def test_what_was_sealed_is_taken_in(values) -> None:
    wanted = {n: found for n, value in enumerate(values) if (found := expected(n, value))}

    assert taken(values) == wanted


@given(sealed, st.integers(0, 2**32), st.integers(0, 255), st.integers(0, 600))
def test_nothing_is_taken_in_that_is_not_well_formed(value, at, byte, cut) -> None:
    damaged = bytearray(value)
    damaged[at % len(damaged)] = byte
    values = [bytes(damaged), value[:cut], value + bytes(cut % 3), bytes(damaged[:cut])]

    assert taken(values) == {n: found for n, v in enumerate(values) if (found := expected(n, v))}


def test_every_byte_of_the_fixed_fields_is_judged_alike() -> None:
    value = record.seal(TENANT, FIRST)
    for at in range(record.FIXED_BYTES):
        for byte in (0, 1, 4, 65, 128, 255):
            damaged = value[:at] + bytes([byte]) + value[at + 1 :]
            found = expected(0, damaged)

            assert taken([damaged]) == ({0: found} if found else {}), f"byte {at} is {byte}"
