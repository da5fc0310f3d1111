"""The stopwatch adds up what is marked, and only while it runs."""

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
ENCODED = {"kvtc": ["rotate", "product", "quantise", "pack", "deflate"],
           "kvtc2": ["rotate", "product", "classify", "quantise", "pack", "deflate"]}  # fmt: skip
DECODED = ["inflate", "unpack", "dequantise", "product", "rotate"]


@pytest.fixture(scope="module")
def profile():
    return WORLD.profile()[0]


def ticking():
    """A clock that goes on by one whenever it is read."""
    ticks = iter(range(1000))
    return lambda: float(next(ticks))


def test_times_of_a_stage_add_up():
    watch = Stopwatch(ticking())
    with watch.running():
        for name in ("first", "second", "first"):
            with stage(name):
                pass
    with stage("first"):
        pass

    assert watch.seconds == {"first": 2.0, "second": 1.0}


def test_a_stage_that_fails_is_counted_and_the_watch_stops():
    watch = Stopwatch(ticking())
    with pytest.raises(ValueError, match="no"), watch.running(), stage("broken"):
        raise ValueError("no")
    with stage("after"):
        pass

    assert watch.seconds == {"broken": 1.0}


@pytest.mark.parametrize("codec", ["kvtc", "kvtc2"])
def test_codecs_mark_their_stages(profile, codec):
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

    assert list(down.seconds) == ENCODED[codec]
    assert list(up.seconds) == DECODED
