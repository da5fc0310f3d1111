"""Every bit pattern of every dtype comes back, and nothing that is not a lossless blob is read."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.codec_blobs import reassembled
from support.codec_world import World, kv, mla

from kvtcd.codec.lossless import Lossless
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.sections import inflated
from kvtcd.core.blob import CodecId, Kind, parse
from kvtcd.core.errors import BadField, BlockMismatch
from kvtcd.core.layout import Dtype


def round_trip(layout, raw, tokens):
    codec = Lossless(layout)
    encoded = codec.encode(raw, tokens=tokens, first_token=3, after=0)
    out = torch.empty_like(raw)
    codec.decode(parse(memoryview(encoded.blob)), out)
    return encoded, out


@given(
    dtype=st.sampled_from(Dtype),
    shape=st.sampled_from([kv, mla]),
    tokens=st.integers(1, 20),
    seed=st.integers(0, 999),
)
def test_random_bytes_survive_whatever_they_mean(dtype, shape, tokens, seed):
    layout = shape(dtype)
    draw = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (layout.nbytes(tokens),), dtype=torch.uint8, generator=draw)
    encoded, out = round_trip(layout, raw, tokens)
    assert torch.equal(out, raw)
    assert encoded.codec is CodecId.LOSSLESS
    assert encoded.reason is None


@pytest.mark.parametrize("dtype", Dtype)
def test_nan_infinity_zero_signs_and_subnormals_survive(dtype):
    layout = kv(dtype)
    raw = World(layout).block(8, seed=1)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40])
    raw[: 5 * dtype.itemsize] = odd.to(getattr(torch, dtype.value)).view(torch.uint8)
    assert torch.equal(round_trip(layout, raw, 8)[1], raw)


def test_planes_are_component_major_and_lowest_byte_first():
    """The format, spelled out: section n holds byte n % 2 of stream n // 2 in the order L H D T."""
    layout = kv(Dtype.BF16)
    raw = torch.randint(0, 4, (layout.nbytes(5),), dtype=torch.uint8)
    blob = parse(memoryview(round_trip(layout, raw, 5)[0].blob))
    halves = raw.view(2, 3, 5, 2, 16, 2)  # S L T H D byte
    for n, section in enumerate(inflated(blob, HeapScratch())):
        assert section.part == (Kind.PLANE, n // 2, n % 2)
        want = halves[n // 2, ..., n % 2].permute(0, 2, 3, 1).flatten()
        assert torch.equal(section.data, want)


def test_a_real_looking_block_shrinks():
    layout = kv(Dtype.BF16, layers=8)
    raw = World(layout).block(64, seed=2)
    encoded, _ = round_trip(layout, raw, 64)
    assert len(encoded.blob) < 0.85 * raw.numel()


def test_a_raw_block_of_another_length_is_refused():
    layout = kv()
    with pytest.raises(BlockMismatch, match="bytes"):
        Lossless(layout).encode(torch.zeros(10, dtype=torch.uint8), tokens=1, first_token=0, after=0)
    encoded = Lossless(layout).encode(World(layout).block(4, 0), tokens=4, first_token=0, after=0)
    with pytest.raises(BlockMismatch, match="bytes"):
        Lossless(layout).decode(parse(memoryview(encoded.blob)), torch.zeros(10, dtype=torch.uint8))


def test_a_blob_of_another_layout_is_refused():
    encoded = Lossless(kv()).encode(World(kv()).block(4, 0), tokens=4, first_token=0, after=0)
    with pytest.raises(BlockMismatch, match="layout"):
        Lossless(kv(layers=4)).decode(
            parse(memoryview(encoded.blob)), torch.empty(kv(layers=4).nbytes(4), dtype=torch.uint8)
        )


@pytest.mark.parametrize(
    ("header", "sections"),
    [
        ({"codec": CodecId.KVTC}, None),
        ({"codec_version": 2}, None),
        ({"tokens": 3}, lambda runs: [dataclasses.replace(r, token_count=3) for r in runs]),
        (None, lambda runs: runs[:-1]),
        (None, lambda runs: [*runs, runs[-1]]),
        (None, lambda runs: [*runs[:-1], dataclasses.replace(runs[-1], part=2)]),
        (None, lambda runs: [*runs[:-1], dataclasses.replace(runs[-1], kind=Kind.CODES)]),
        (None, lambda runs: [dataclasses.replace(r, token_count=2) for r in runs]),
        (None, lambda runs: [dataclasses.replace(r, token_start=1, token_count=3) for r in runs]),
    ],
    ids=["codec", "version", "tokens", "missing", "twice", "part", "kind", "short", "late"],
)
def test_a_blob_whose_sections_do_not_fit_is_refused(header, sections):
    layout = kv()
    raw = World(layout).block(4, 0)
    encoded = Lossless(layout).encode(raw, tokens=4, first_token=0, after=0)
    with pytest.raises(BadField):
        Lossless(layout).decode(reassembled(encoded.blob, header, sections), torch.empty_like(raw))


def test_the_helper_changes_nothing_by_itself():
    encoded = Lossless(kv()).encode(World(kv()).block(4, 0), tokens=4, first_token=0, after=0)
    assert bytes(reassembled(encoded.blob).data) == bytes(encoded.blob)
