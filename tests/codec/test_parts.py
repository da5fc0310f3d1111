"""A block that is decoded a few layers at a time: the same bytes, each done when it is said to be."""

from __future__ import annotations

import pytest
import torch
from support.codec_world import World, kv, mla

from kvtcd.codec.choose import codec_for
from kvtcd.codec.profile import store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.scratch import HeapScratch
from kvtcd.core.blob import parse
from kvtcd.core.policy import CodecChoice

TOKENS = 160
BY_LAYER = [CodecChoice("kvtc", 4, window=20), CodecChoice("kvtc2", 12, window=20)]
AS_A_WHOLE = [CodecChoice("lossless"), CodecChoice("tq", None, window=20, bits=3)]
FIRST = [0, 64]
"""Position of the block's first token: with exact tokens at both ends, or at one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles")
    for layout in (kv(), mla()):
        store(World(layout).profile()[1], path)
    return ProfileFolder(path)


def packed(folder, layout, choice, first):
    """Return a decoder, symbols for it, and the block that they stand for."""
    world = World(layout)
    codec = codec_for(world.identity, choice, folder)
    raw = world.block(TOKENS, seed=1, first_token=first)
    scratch = HeapScratch()
    blob = codec.encoder.encode(raw, tokens=TOKENS, first_token=first, after=0).blob
    symbols = codec.decoder.inflate(parse(memoryview(blob)), scratch)
    whole = torch.full_like(raw, 0xEE)
    codec.decoder.synthesize(symbols, whole)
    return codec.decoder, symbols, whole


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("layout", [kv(), mla()])
@pytest.mark.parametrize("choice", BY_LAYER, ids=str)
def test_what_is_said_to_be_done_is_done_and_never_touched_again(folder, layout, choice, at_once, first):
    decoder, symbols, want = packed(folder, layout, choice, first)
    out, said = torch.full_like(want, 0xEE), torch.zeros(want.numel(), dtype=torch.bool)
    layers: list[int] = []
    nbytes = want.numel() * at_once // layout.layers
    for ranges in decoder.parts(symbols, out, nbytes):
        for each in ranges:
            assert not said[each].any(), "each byte once"
            said[each] = True
        assert torch.equal(out[said], want[said])
        keys = next(iter(layout.spans(TOKENS)))
        layers.append(int(said[: keys[2]].sum()) * layout.layers // keys[2])

    assert said.all()
    assert torch.equal(out, want)
    assert layers == [*range(at_once, layout.layers, at_once), layout.layers], "in order, so many at a time"


@pytest.mark.parametrize("choice", AS_A_WHOLE, ids=str)
def test_what_does_not_go_by_layers_is_done_as_a_whole(folder, choice):
    decoder, symbols, want = packed(folder, kv(), choice, 0)
    out = torch.full_like(want, 0xEE)
    said = list(decoder.parts(symbols, out, 1))

    assert torch.equal(out, want)
    covered = sorted((each.start, each.stop) for ranges in said for each in ranges)
    assert len(said) == 1
    assert covered[0][0] == 0
    assert covered[-1][1] == want.numel()
    assert sum(stop - start for start, stop in covered) == want.numel()


def test_less_than_a_layer_is_a_layer(folder):
    decoder, symbols, want = packed(folder, kv(), BY_LAYER[0], 0)
    assert len(list(decoder.parts(symbols, torch.empty_like(want), 0))) == kv().layers
