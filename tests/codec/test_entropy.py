"""Interchange with zlib, and bytes that are not what they should be."""

import os
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.codec.entropy import deflate, inflate
from kvtcd.core.blob import CHUNK_BYTES, Chunk, CodecId, Header, Kind, Run, assemble, parse
from kvtcd.core.errors import BadChecksum, BadField
from kvtcd.core.layout import Dtype

contents = st.one_of(
    st.binary(min_size=1, max_size=3 * CHUNK_BYTES),
    st.builds(
        lambda unit, n: (unit * n)[: 3 * CHUNK_BYTES], st.binary(min_size=1, max_size=9), st.integers(1, 9999)
    ),
)


def blob_of(data: bytes, chunks: list[Chunk]):
    header = Header(CodecId.LOSSLESS, 1, Dtype.BF16, bytes(32), 1, max(len(data), 1))
    run = Run(Kind.PLANE, 0, 0, 0, 1, len(data), chunks)
    blob = parse(memoryview(assemble(header, [run])))
    return blob, blob.sections[0]


def inflated(data: bytes, chunks: list[Chunk]) -> bytes:
    out = bytearray(len(data))
    inflate(*blob_of(data, chunks), memoryview(out))
    return bytes(out)


def raw_deflate(data: bytes, level: int = 6, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    writer = zlib.compressobj(level, zlib.DEFLATED, -15, 9, strategy)
    return writer.compress(data) + writer.flush()


@given(contents)
def test_what_is_written_is_read_here_and_by_zlib(data):
    chunks = deflate(memoryview(data))
    pieces = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
    for chunk, piece in zip(chunks, pieces, strict=True):
        assert bytes(chunk.data) == piece if chunk.stored else zlib.decompress(chunk.data, -15) == piece
    assert inflated(data, chunks) == data


@given(contents, st.sampled_from([(1, 0), (6, 0), (9, 0), (6, zlib.Z_HUFFMAN_ONLY), (6, zlib.Z_FIXED)]))
def test_what_zlib_writes_is_read(data, how):
    chunks = []
    for i in range(0, len(data), CHUNK_BYTES):
        piece = data[i : i + CHUNK_BYTES]
        packed = raw_deflate(piece, *how)
        chunks.append(Chunk(packed, stored=False) if len(packed) < len(piece) else Chunk(piece, stored=True))
    assert inflated(data, chunks) == data


def test_noise_is_stored_as_it_is_and_skew_is_not():
    noise, skewed = os.urandom(CHUNK_BYTES), bytes(b & 3 for b in os.urandom(CHUNK_BYTES))
    chunks = deflate(memoryview(noise + skewed))
    assert [chunk.stored for chunk in chunks] == [True, False]
    assert len(chunks[1].data) < CHUNK_BYTES * 0.3


def test_constant_bytes_nearly_vanish():
    assert len(deflate(memoryview(bytes(CHUNK_BYTES)))[0].data) < 100


GOOD = bytes(range(50)) * 40
PACKED = raw_deflate(GOOD)


@pytest.mark.parametrize(
    "packed",
    [
        raw_deflate(bytes(10_000_000))[: len(GOOD) - 1],
        raw_deflate(GOOD + b"x"),
        raw_deflate(GOOD[:-1]),
        PACKED[:-1],
        PACKED + b"\0",
        b"\xff" * 40,
        b"\x06",
    ],
    ids=["bomb", "longer", "shorter", "cut", "tail", "noise", "reserved block type"],
)
def test_a_chunk_that_is_not_exactly_its_declared_bytes_is_refused(packed):
    with pytest.raises(BadField):
        inflated(GOOD, [Chunk(packed, stored=False)])


def test_a_bomb_costs_no_more_than_a_chunk():
    bomb = raw_deflate(bytes(CHUNK_BYTES - 1) + bytes(8_000_000))[:8000]
    blob, section = blob_of(bytes(CHUNK_BYTES), [Chunk(bomb, stored=False)])
    out = memoryview(bytearray(CHUNK_BYTES))
    tracemalloc.start()
    with pytest.raises(BadField):
        inflate(blob, section, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * CHUNK_BYTES


def test_a_flipped_bit_is_found_before_anything_is_inflated():
    blob, section = blob_of(GOOD, [Chunk(PACKED, stored=False)])
    damaged = bytearray(blob.data)
    damaged[section.offset + 5] ^= 1
    again = parse(memoryview(damaged))
    with pytest.raises(BadChecksum):
        inflate(again, again.sections[0], memoryview(bytearray(len(GOOD))))
