"""Columns of many headers say what is said of each."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kvtcd.core.errors import Corrupt
from kvtcd.tiers.disk import CHUNK_BYTES, MAX_ENVELOPE, Put, footprint
from kvtcd.tiers.disk.records import Page, lengths, pack_header

KEY = bytes(32)
whole = st.builds(
    lambda envelope, blob: pack_header(Put(KEY, bytes(envelope), bytes(blob))),
    st.integers(0, MAX_ENVELOPE), st.integers(0, 3 * CHUNK_BYTES),
)  # fmt: skip
damaged = st.builds(lambda value, at, byte: value[:at] + bytes([byte]) + value[at + 1 :], whole,
                    st.integers(0, 11), st.integers(0, 255))  # fmt: skip
values = st.lists(whole | damaged | st.binary(max_size=20) | st.just(bytes(MAX_ENVELOPE + 13)), max_size=5)
keys = st.sampled_from([KEY, KEY, KEY, KEY[1:]])


@given(values.flatmap(lambda v: st.tuples(st.just(v), st.lists(keys, min_size=len(v), max_size=len(v)))))
def test_a_page_has_the_records_whose_headers_can_be_read(rows) -> None:
    page = Page.of(list(zip(rows[1], rows[0], strict=True)))

    expected = []
    for value, key in zip(*rows, strict=True):
        try:
            expected.append((key, value[12:], footprint(*lengths(key, value))))
        except Corrupt:
            continue
    assert list(zip(page.keys, page.envelopes, page.footprints.tolist(), strict=True)) == expected


@given(st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 1 << 40)), min_size=1))
@example([(envelope, 0) for envelope in range(1980, 2010)])
@example([(1, length) for length in range(CHUNK_BYTES - 1, CHUNK_BYTES + 2300)])
def test_footprints_of_many_are_those_of_each(sizes) -> None:
    envelopes, blobs = np.array(sizes, np.int64).T

    assert footprint(envelopes, blobs).tolist() == [footprint(*size) for size in sizes]
