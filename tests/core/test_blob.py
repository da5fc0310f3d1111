"""The blob format: golden bytes, any content, every flipped bit, every cut."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mutations import damaged
from support.resealed import resealed

from kvtcd.core import blob
from kvtcd.core.blob import BasisId, Chunk, CodecId, Header, Kind, Run
from kvtcd.core.errors import BadField, BadMagic, BadVersion, Corrupt, Truncated
from kvtcd.core.layout import Dtype

GOLDEN = (Path(__file__).parent / "golden" / "blob-v1.bin").read_bytes()


def test_golden_blob() -> None:
    parsed = blob.parse(memoryview(GOLDEN))

    header = parsed.header
    assert (header.codec, header.codec_version, header.dtype) == (CodecId.KVTC, 1, Dtype.BF16)
    assert (header.basis, header.plan, header.step, header.profile) == (BasisId.PLAIN, 16, 0.0, b"p" * 32)
    assert (header.first_token, header.tokens, header.raw_bytes) == (512, 200, 38_400)
    codes, raw = parsed.sections
    assert (codes.kind, codes.stream, codes.part, codes.token_start, codes.token_count) == (
        Kind.CODES,
        0,
        4,
        0,
        72,
    )
    (deflated, _), (stored, is_stored) = codes.chunks
    payload = parsed.payload(codes)
    plane = zlib.decompressobj(-15).decompress(payload[:deflated])
    assert plane + bytes(payload[-(-deflated // 16) * 16 :][:stored]) == bytes(range(256)) * 75
    assert is_stored
    assert bytes(parsed.payload(raw)[:100]) == b"r" * 100


runs = st.lists(
    st.one_of(
        st.builds(
            lambda body, stream: Run(Kind.RAW, stream, 0, 0, 1, len(body), data=body),
            st.binary(max_size=100),
            st.integers(0, 255),
        ),
        st.builds(
            lambda body, stream, part: Run(
                Kind.PLANE, stream, part, 0, 1, len(body), [Chunk(body, stored=True)] if body else []
            ),
            st.binary(max_size=100),
            st.integers(0, 255),
            st.integers(0, 3),
        ),
    ),
    max_size=6,
)
headers = st.builds(
    Header,
    codec=st.sampled_from(list(CodecId)),
    codec_version=st.integers(0, 255),
    dtype=st.sampled_from(list(Dtype)),
    layout=st.binary(min_size=32, max_size=32),
    tokens=st.integers(1, 1 << 16),
    raw_bytes=st.just(1 << 20),
    first_token=st.none() | st.integers(0, 2**63),
    basis=st.sampled_from(list(BasisId)),
    plan=st.integers(0, 2**32 - 1),
    step=st.floats(width=32, allow_nan=False),
    token_classes=st.integers(0, 255),
    profile=st.binary(min_size=32, max_size=32),
)


@given(headers, runs)
def test_what_is_assembled_is_parsed(header: Header, content: list[Run]) -> None:
    content = [run for run in content if run.kind is Kind.RAW or run.chunks]
    parsed = blob.parse(memoryview(blob.assemble(header, content)))

    assert parsed.header == header
    assert len(parsed.sections) == len(content)
    for run, section in zip(content, parsed.sections, strict=True):
        assert (section.kind, section.stream, section.part) == (run.kind, run.stream, run.part)
        body = run.data if run.kind is Kind.RAW else run.chunks[0].data
        assert bytes(parsed.payload(section)[: run.raw_bytes]) == body
        assert section.offset % 16 == 0


def test_every_flipped_bit_is_found() -> None:
    harmless = 0
    for bit in range(8 * len(GOLDEN)):
        damaged = bytearray(GOLDEN)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            parsed = blob.parse(memoryview(damaged))
            for section in parsed.sections:
                parsed.payload(section)
            harmless += 1
        except Corrupt:
            pass
    assert harmless == 0


def test_every_cut_is_found() -> None:
    for length in range(len(GOLDEN)):
        with pytest.raises((Truncated, BadField)):
            blob.parse(memoryview(GOLDEN)[:length])
    with pytest.raises(Truncated):
        blob.parse(memoryview(GOLDEN + b"\0"))


def _resealed(changes: dict[int, bytes]) -> bytes:
    """Change bytes and repair the checksums."""
    damaged = bytearray(GOLDEN)
    for offset, data in changes.items():
        damaged[offset : offset + len(data)] = data
    return resealed(bytes(damaged))


SECTION = 160


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({0: b"KVTX"}, BadMagic),
        ({4: b"\x02\x00"}, BadVersion),
        ({6: b"\xff"}, BadField),
        ({8: b"\x02"}, BadField),
        ({9: b"\x07"}, BadField),
        ({10: b"\x09"}, BadField),
        ({20: struct.pack("<I", 0)}, BadField),
        ({20: struct.pack("<I", 1 << 31)}, BadField),
        ({24: struct.pack("<I", 1)}, BadField),
        ({24: struct.pack("<I", 2**32 - 1)}, BadField),
        ({36: struct.pack("<Q", 2**63)}, BadField),
        ({116: b"\x01"}, BadField),
        ({SECTION: b"\x09"}, BadField),
        ({SECTION + 3: b"\x01"}, BadField),
        ({SECTION + 4: struct.pack("<I", 199)}, BadField),
        ({SECTION + 8: struct.pack("<I", 0)}, BadField),
        ({SECTION + 8: struct.pack("<I", 2**32 - 1)}, BadField),
        ({SECTION + 12: struct.pack("<I", 4096)}, BadField),
        ({SECTION + 16: struct.pack("<Q", 2**64 - 1)}, BadField),
        ({SECTION + 24: struct.pack("<Q", 16)}, BadField),
        ({SECTION + 32: struct.pack("<Q", 2**40)}, BadField),
        ({SECTION + 40: struct.pack("<I", 2**31)}, BadField),
        ({160 + 112: struct.pack("<I", 0)}, BadField),
        ({160 + 112: struct.pack("<I", 1 << 20)}, BadField),
        ({160 + 116: struct.pack("<I", 5 | 1 << 31)}, BadField),
    ],
)
def test_a_field_out_of_range_is_refused_even_with_a_valid_checksum(changes, error) -> None:
    with pytest.raises(error):
        blob.parse(memoryview(_resealed(changes)))


def test_the_reseal_of_these_tests_is_right() -> None:
    assert _resealed({}) == GOLDEN


@given(damaged([GOLDEN]), st.booleans())
def test_a_damaged_blob_is_refused_or_its_sections_lie_where_it_says(data: bytes, sealed: bool) -> None:
    data = resealed(data) if sealed else data
    try:
        parsed = blob.parse(memoryview(data))
        sizes = [len(parsed.payload(section)) for section in parsed.sections]
    except Corrupt:
        return

    assert sealed or data == GOLDEN
    assert sizes == [section.nbytes for section in parsed.sections]
    assert all(section.raw_bytes <= 2 * parsed.header.raw_bytes + 16 for section in parsed.sections)
    assert all(
        section.token_start + section.token_count <= parsed.header.tokens for section in parsed.sections
    )


@settings(max_examples=300)
@given(st.binary(max_size=400), st.booleans())
def test_random_bytes_are_refused(data: bytes, keep_magic: bool) -> None:
    with pytest.raises(Corrupt):
        blob.parse(memoryview(GOLDEN[:8] + data if keep_magic else data))
