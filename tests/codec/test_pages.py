"""Every element of a page is where the format says, by brute force over all indices."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest
import torch
from support.codec_world import World, centred_error, kv

from kvtcd.codec.choose import codec_for
from kvtcd.codec.pages import page_map
from kvtcd.codec.profile import store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.scratch import HeapScratch
from kvtcd.core.blob import CodecId, parse
from kvtcd.core.errors import BlockMismatch
from kvtcd.core.layout import Dtype, Layout, Stream
from kvtcd.core.policy import CodecChoice
from kvtcd.integrations.vllm_identity import FLASH, VEC

WORLD = World(kv())


def in_pages(layout: Layout, page: int, tokens: int, elements: np.ndarray, name: str = VEC) -> np.ndarray:
    """Canonical elements as vLLM's kernels lay them out, one at a time."""
    keys, values = layout.streams
    layers, heads = layout.layers, keys.heads
    split = layers * tokens * heads * keys.head_dim
    k = elements[:split].reshape(layers, tokens, heads, keys.head_dim)
    v = elements[split:].reshape(layers, tokens, heads, values.head_dim)
    out = np.zeros_like(elements)
    size = page * (keys.head_dim + values.head_dim)
    for layer, block, head in product(range(layers), range(tokens // page), range(heads)):
        start = ((layer * (tokens // page) + block) * heads + head) * size
        for n in range(page):
            of_token = start + n * (keys.head_dim + values.head_dim)
            for d in range(keys.head_dim):
                at = start + d * page + n if name == VEC else of_token + d
                out[at] = k[layer, block * page + n, head, d]
            for d in range(values.head_dim):
                behind = start + page * keys.head_dim + n * values.head_dim + d
                at = behind if name == VEC else of_token + keys.head_dim + d
                out[at] = v[layer, block * page + n, head, d]
    return out


def identity(layout: Layout, page: int = 4, name: str = VEC):
    return dataclasses.replace(WORLD.identity, layout=layout, page_format=f"{name}:{page}")


@pytest.mark.parametrize("name", [VEC, FLASH])
@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize(("head_dims", "blocks"), [((4, 4), 1), ((6, 6), 3), ((4, 8), 2)])
def test_every_element_is_where_the_format_says(name: str, dtype: Dtype, head_dims, blocks: int) -> None:
    page, tokens = 4, 4 * blocks
    layout = Layout(
        (Stream("k", 2, head_dims[0], rope=False), Stream("v", 2, head_dims[1], rope=False)), 3, dtype
    )
    kind = np.int32 if dtype is Dtype.F32 else np.int16
    canonical = np.arange(layout.token_elements * tokens, dtype=kind)
    pages = in_pages(layout, page, tokens, canonical, name)
    found = page_map(identity(layout, page, name))
    assert found is not None

    got = found.to_canonical(torch.from_numpy(pages.view(np.uint8).copy()), tokens)
    assert np.array_equal(got.numpy().view(kind), canonical)
    out = torch.zeros(got.numel(), dtype=torch.uint8)
    found.to_pages(got, tokens, out)
    assert np.array_equal(out.numpy().view(kind), pages)


def test_a_block_that_is_no_whole_pages_is_refused() -> None:
    found = page_map(identity(WORLD.identity.layout))
    assert found is not None
    with pytest.raises(BlockMismatch):
        found.to_canonical(torch.zeros(WORLD.identity.layout.nbytes(6), dtype=torch.uint8), 6)
    with pytest.raises(BlockMismatch):
        found.to_canonical(torch.zeros(8, dtype=torch.uint8), 4)


@pytest.mark.parametrize(
    "name", ["canonical", VEC, f"{VEC}:0", f"{VEC}:x", f"{VEC}-amx:32", "vllm-0.32-cuda"]
)
def test_what_has_no_map_has_none(name: str) -> None:
    assert page_map(dataclasses.replace(WORLD.identity, page_format=name)) is None


def test_pages_are_coded_as_the_same_block_in_order_is(tmp_path) -> None:
    """The blob of a block does not depend on how its engine lays out pages."""
    store(WORLD.profile()[1], tmp_path)
    folder, choice = ProfileFolder(tmp_path), CodecChoice("kvtc", 4, window=0)
    layout = WORLD.identity.layout
    raw = WORLD.block(32, seed=1, first_token=64)
    kind = np.int32 if layout.dtype is Dtype.F32 else np.int16
    pages = in_pages(layout, 8, 32, raw.numpy().view(kind)).view(np.uint8)
    place = {"tokens": 32, "first_token": 64, "after": 0}
    plain, paged = (
        codec_for(each, choice, folder)
        for each in (WORLD.identity, dataclasses.replace(WORLD.identity, page_format=f"{VEC}:8"))
    )
    assert paged.name == plain.name == "kvtc 4"

    blob = paged.analyze(pages, **place, scratch=HeapScratch()).deflate()
    assert blob.codec is CodecId.KVTC
    assert blob.blob == plain.analyze(raw.numpy(), **place, scratch=HeapScratch()).deflate().blob
    out = np.zeros(raw.numel(), np.uint8)
    paged.inflate(parse(memoryview(blob.blob)), HeapScratch()).synthesize(out)
    canonical = page_map(identity(layout, 8)).to_canonical(torch.from_numpy(out), 32)
    got, want = WORLD.values(canonical, 32), WORLD.values(raw, 32)
    assert centred_error(got["v"], want["v"]) < 0.15


@pytest.mark.parametrize("choice", [CodecChoice("lossless", None), CodecChoice("kvtc", 4)])
def test_lossless_blobs_hold_pages_as_they_came(tmp_path, choice: CodecChoice) -> None:
    """Whoever has no map for a format, or none yet, reads what was stored losslessly by one who has."""
    store(WORLD.profile()[1], tmp_path)
    folder, named = ProfileFolder(tmp_path), identity(WORLD.identity.layout, 8)
    codec = codec_for(named, choice, folder)
    unmapped = codec_for(dataclasses.replace(named, page_format="some-other"), choice, folder)
    raw = np.random.default_rng(0).integers(0, 256, WORLD.identity.layout.nbytes(16), dtype=np.uint8)
    place = {"tokens": 16, "first_token": None, "after": 0}  # without a position kvtc can do nothing else
    blob = codec.analyze(raw, **place, scratch=HeapScratch()).deflate()

    assert blob.codec is CodecId.LOSSLESS
    for reader in (codec, unmapped):
        out = np.zeros_like(raw)
        reader.inflate(parse(memoryview(blob.blob)), HeapScratch()).synthesize(out)
        assert np.array_equal(out, raw)
