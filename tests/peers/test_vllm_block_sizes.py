"""Real engines whose own blocks have other sizes than ours, and than each other's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from daemons import holds, settled
from tiny_models import CACHED, WINDOW, hybrid, prompt, tiny
from vllm_engine import WAYS, Engine, by_tier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtcd.lab.daemon import Daemon

    Way = Callable[..., dict[str, Any]]

pytestmark = [
    pytest.mark.peers("vllm"),
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__),
]
SIZES = (32, 64, 128)
"""Tokens of an engine's block: on a CPU multiples of 32, of which 128 is what vLLM takes by itself."""
CHUNK = 128
CHUNKS = CACHED // CHUNK


def test_blocks_of_another_size_are_another_cache(way: Way, folder: Path, daemon: Daemon) -> None:
    """Each finds what the same size has stored, exactly, after a restart of both; of other sizes nothing."""
    model, words = tiny(folder / "model", 1), prompt(9)
    transfer = way(daemon.socket, chunk=CHUNK)
    wanted: dict[int, list[int]] = {}
    with daemon:
        for count, size in enumerate(SIZES, 1):
            with Engine(model, folder / f"{size}.log", transfer, block_size=size) as engine:
                fresh = engine.read(words)
                assert fresh["cached"] == 0, size
                wanted[size] = fresh["tokens"]
                holds(daemon, count * CHUNKS)
        settled(daemon)
    with daemon, daemon.client() as client:
        assert len(client.namespaces()) == len(SIZES)
        for size in SIZES:
            with Engine(model, folder / f"{size}.log", transfer, block_size=size) as engine:
                again = engine.read(words)
                assert (again["cached"], again["tokens"]) == (CACHED, wanted[size])
                assert engine.chunks() == {"hit": CHUNKS, "loaded": CHUNKS}


def test_layers_that_look_back_over_a_window_beside_others(way: Way, folder: Path, daemon: Daemon) -> None:
    """The tier keeps a namespace for each kind, the connector one for all; in the next life all is loaded."""
    model, words = hybrid(folder / "model", 1), prompt(12)
    transfer = way(daemon.socket, chunk=WINDOW)
    settings = {"hf_overrides": {"architectures": ["Gemma3ForCausalLM"]}}
    with daemon:
        with Engine(model, folder / "one.log", transfer, **settings) as engine:
            fresh = engine.read(words, logprobs=5)
            assert fresh["cached"] == 0
            engine.finds_again(words, fresh["tokens"])
        settled(daemon)
        with daemon.client() as client:
            assert len(client.namespaces()) == (2 if way is by_tier else 1)
    with daemon, Engine(model, folder / "two.log", transfer, **settings) as engine:
        again = engine.read(words, logprobs=5)
        assert (again["cached"], again["tokens"]) == (CACHED, fresh["tokens"])
        for step, wanted in zip(again["logprobs"], fresh["logprobs"], strict=True):
            assert step == pytest.approx(wanted, abs=1e-3)


def test_a_chunk_that_is_no_whole_number_of_blocks_ends_the_start(
    way: Way, folder: Path, daemon: Daemon
) -> None:
    model = tiny(folder / "model", 1)
    with daemon, pytest.raises(AssertionError, match="multiple of"):
        Engine(model, folder / "e.log", way(daemon.socket, chunk=96), block_size=64).__enter__()
