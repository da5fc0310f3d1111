"""A daemon that changes under a running engine: purged, told to refuse, emptied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from daemons import LOSSLESS, REFUSING, emptied, holds, purged, told
from tiny_models import CACHED, prompt, tiny
from vllm_engine import CHUNK, WAYS, Engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtcd.lab.daemon import Daemon

    Way = Callable[..., dict[str, Any]]

pytestmark = [pytest.mark.peers("vllm"), pytest.mark.slow, pytest.mark.timeout(1500)]
CHUNKS = CACHED // CHUNK


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_engine_goes_on_whatever_becomes_of_its_daemon(way: Way, folder: Path, daemon: Daemon) -> None:
    """What it says is right each time; what it stores is found again as soon as the daemon takes it."""
    model, first, second = tiny(folder / "model", 1), prompt(10), prompt(11)
    with daemon, Engine(model, folder / "engine.log", way(daemon.socket)) as engine:
        wanted = {seed: engine.read(words)["tokens"] for seed, words in ((1, first), (2, second))}
        holds(daemon, 2 * CHUNKS)
        engine.finds_again(first, wanted[1])

        purged(daemon)
        engine.forget()
        again = engine.read(first)
        assert (again["cached"], again["tokens"]) == (0, wanted[1])
        holds(daemon, CHUNKS)
        engine.finds_again(first, wanted[1])

        told(daemon, REFUSING)
        engine.forget()
        again = engine.read(second)
        assert (again["cached"], again["tokens"]) == (0, wanted[2])
        engine.finds_again(first, wanted[1])  # what was there before stays
        assert engine.chunks()["dropped"] == CHUNKS
        holds(daemon, CHUNKS)

        told(daemon, LOSSLESS)
        emptied(daemon)
        engine.forget()
        again = engine.read(first)
        assert (again["cached"], again["tokens"]) == (0, wanted[1])
        engine.finds_again(first, wanted[1])
        engine.finds_again(second, wanted[2])
