"""The stopwatch notes what is marked, and only while it runs."""

import pytest
import torch
from support.codec_world import World, kv

from kvtcd.codec.choose import Decoder
from kvtcd.codec.kvtc import Kvtc
from kvtcd.codec.kvtc2 import Kvtc2
from kvtcd.codec.stages import Stopwatch, stage
from kvtcd.core.blob import parse

WORLD = World(kv())
TOKENS = 40
ENCODED = {
    "kvtc": ["rotate", "product", "quantise", "pack", "deflate"],
    "kvtc2": ["rotate", "product", "classify", "quantise", "pack", "deflate"],
}
DECODED = ["inflate", "unpack", "dequantise", "product", "rotate"]


@pytest.fixture(scope="module")
def profile():
    return WORLD.profile()[0]


def ticking():
    """A clock that goes on by one whenever it is read."""
    ticks = iter(range(1000))
    return lambda: next(ticks)


def test_stages_are_noted_in_order_while_the_watch_runs():
    watch = Stopwatch(ticking())
    with watch.running():
        for name in ("first", "second", "first"):
            with stage(name):
                pass
    with stage("first"):
        pass

    assert watch.spans == [("first", 0, 1), ("second", 2, 3), ("first", 4, 5)]


def test_a_stage_that_fails_is_noted_and_the_watch_stops():
    watch = Stopwatch(ticking())
    with pytest.raises(ValueError, match="no"), watch.running(), stage("broken"):
        raise ValueError("no")
    with stage("after"):
        pass

    assert watch.spans == [("broken", 0, 1)]


@pytest.mark.parametrize("codec", ["kvtc", "kvtc2"])
def test_codecs_mark_their_stages_and_none_contains_another(profile, codec):
    encoder = {
        "kvtc": lambda: Kvtc(WORLD.layout, WORLD.rope, profile, 4, sinks=0, window=0),
        "kvtc2": lambda: Kvtc2(WORLD.layout, WORLD.rope, profile, 0.3, sinks=0, window=0),
    }[codec]()
    raw = WORLD.block(TOKENS, seed=3)
    down, up = Stopwatch(ticking()), Stopwatch(ticking())
    with down.running():
        blob = encoder.encode(raw, tokens=TOKENS, first_token=0, after=0).blob
    with up.running():
        Decoder(WORLD.layout, WORLD.rope, lambda _: profile).decode(
            parse(memoryview(blob)), torch.empty_like(raw)
        )

    for watch, names in ((down, ENCODED[codec]), (up, DECODED)):
        assert list(dict.fromkeys(name for name, _, _ in watch.spans)) == names
        moments = [moment for _, begin, end in watch.spans for moment in (begin, end)]
        assert moments == list(range(len(moments)))
