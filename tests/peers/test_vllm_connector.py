"""What the connector alone can do wrong: half of a load, a daemon that hangs, pages in its own order."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from daemons import holds
from tiny_models import CACHED, prompt, tiny
from vllm_engine import CHUNK, WAYS, Engine, by_connector, by_tier

if TYPE_CHECKING:
    from pathlib import Path

    from kvtcd.lab.daemon import Daemon

pytestmark = [pytest.mark.peers("vllm"), pytest.mark.slow, pytest.mark.timeout(1500)]
CHUNKS = CACHED // CHUNK


def test_tier_and_connector_read_what_the_other_wrote(folder: Path, daemon: Daemon) -> None:
    model = tiny(folder / "model", 1)
    prompts = {way: prompt(seed) for seed, way in enumerate(WAYS)}
    with daemon:
        wanted = {}
        for way, words in prompts.items():
            with Engine(model, folder / "engine.log", way(daemon.socket)) as engine:
                for other, tokens in wanted.items():
                    again = engine.read(prompts[other])
                    assert (again["cached"], again["tokens"]) == (CACHED, tokens)
                wanted[way] = engine.read(words)["tokens"]
                holds(daemon, CHUNKS * len(wanted))
        with Engine(model, folder / "engine.log", by_tier(daemon.socket)) as engine:
            again = engine.read(prompts[by_connector])
            assert (again["cached"], again["tokens"]) == (CACHED, wanted[by_connector])


def test_a_chunk_that_goes_just_when_it_is_loaded_is_computed(folder: Path, daemon: Daemon) -> None:
    """The rest of the step is computed anew too; the answer is the same, and the chunk is stored again."""
    model, words = tiny(folder / "model", 1), prompt(6)
    evicting = {"kv_connector": "EvictingConnector", "kv_connector_module_path": "vllm_evicting"}
    with daemon, Engine(model, folder / "engine.log", by_connector(daemon.socket) | evicting) as engine:
        wanted = engine.read(words)["tokens"]
        holds(daemon, CHUNKS)
        engine.forget()
        assert engine.read(words)["tokens"] == wanted
        counts = engine.chunks()
        assert (counts["loaded"], counts["lost"]) == (3, 1)
        assert engine.read(words)["tokens"] == wanted  # what the engine has kept of it is right
        holds(daemon, CHUNKS)
        engine.forget()
        again = engine.read(words)
        assert (again["cached"], again["tokens"]) == (CACHED, wanted)
        counts = engine.chunks()
        assert (counts["loaded"], counts["lost"]) == (7, 1)


def test_a_prompt_that_the_engine_has_cached_is_not_sent_again(folder: Path, daemon: Daemon) -> None:
    """Asked again at once, behind its own store, and by an engine that has loaded it: no byte goes twice."""
    model, words = tiny(folder / "model", 1), prompt(8)
    transfer = by_connector(daemon.socket)
    with daemon:
        with Engine(model, folder / "engine.log", transfer) as engine:
            wanted = engine.read(words)["tokens"]
            for tokens in (1, 8, 1, 8):  # the shortest ends before anything is known of its chunks
                assert engine.read(words, max_tokens=tokens)["tokens"] == wanted[:tokens]
            holds(daemon, CHUNKS)
            engine.read(words)  # the engine counts what ended in a step before
            counts = engine.chunks()
            assert (counts["stored"], counts.get("duplicate", 0), counts.get("dropped", 0)) == (CHUNKS, 0, 0)
            engine.forget()  # no block is kept for what was never to be sent
        with Engine(model, folder / "engine.log", transfer) as engine:
            for _ in range(4):
                assert engine.read(words)["tokens"] == wanted
            counts = engine.chunks()
            assert counts["loaded"] == CHUNKS
            assert not {"stored", "duplicate", "dropped"} & {what for what, count in counts.items() if count}


def test_a_daemon_that_hangs_holds_no_step_up_for_long(folder: Path, daemon: Daemon) -> None:
    model, words = tiny(folder / "model", 1), prompt(7)
    impatient = by_connector(daemon.socket, retry_seconds=2.0, timeout_seconds=2.0)
    with daemon, Engine(model, folder / "engine.log", impatient) as engine:
        wanted = engine.read(words)["tokens"]
        engine.finds_again(words, wanted)  # it is stored, however often that took too long
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            for _ in range(3):
                engine.forget()
                assert engine.read(words)["tokens"] == wanted
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        counts = engine.chunks()
        assert counts.get("late", 0) + counts.get("away", 0) >= CHUNKS
        engine.finds_again(words, wanted)
