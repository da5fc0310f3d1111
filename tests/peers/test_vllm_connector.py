"""What the connector alone can do wrong: half of a load, a daemon that hangs, pages in its own order."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from test_vllm_engine import CACHED, VOCABULARY, daemon, folder, prompt, tiny
from vllm_engine import CHUNK, TRANSFERS, Engine

if TYPE_CHECKING:
    from pathlib import Path

    from kvtcd.lab.daemon import Daemon

__all__ = ["daemon", "folder"]  # fixtures
pytestmark = [pytest.mark.peers("vllm"), pytest.mark.slow, pytest.mark.timeout(3600)]
PATIENCE = {"retry_seconds": 60.0, "timeout_seconds": 60.0}


def holds(daemon: Daemon, blocks: int) -> None:
    """Wait until the daemon has so many blocks: an engine sends them behind its answer."""
    deadline = time.monotonic() + 300
    with daemon.client() as client:
        while client.stats()["blocks"] != blocks:
            assert time.monotonic() < deadline, client.stats()
            time.sleep(0.1)


def test_tier_and_connector_read_what_the_other_wrote(folder: Path, daemon: Daemon) -> None:
    model = tiny(folder / "model", 1)
    prompts = {way: prompt(seed, VOCABULARY) for seed, way in enumerate(TRANSFERS)}
    with daemon:
        wanted = {}
        for way, words in prompts.items():
            with Engine(model, daemon.socket, folder / f"{way}.log", way=way) as engine:
                for other, tokens in wanted.items():
                    again = engine.read(prompts[other])
                    assert (again["cached"], again["tokens"]) == (CACHED, tokens)
                wanted[way] = engine.read(words)["tokens"]
        with Engine(model, daemon.socket, folder / "again.log", way="tier") as engine:
            again = engine.read(prompts["connector"])
            assert (again["cached"], again["tokens"]) == (CACHED, wanted["connector"])


def test_a_chunk_that_goes_just_when_it_is_loaded_is_computed(folder: Path, daemon: Daemon) -> None:
    """The rest of the step is computed anew too; the answer is the same, and the chunk is stored again."""
    model, words = tiny(folder / "model", 1), prompt(6, VOCABULARY)
    transfer = TRANSFERS["connector"](PATIENCE | {"socket": str(daemon.socket)}, CHUNK, 64 << 20)
    transfer |= {"kv_connector": "EvictingConnector", "kv_connector_module_path": "vllm_evicting"}
    with daemon, Engine(model, daemon.socket, folder / "engine.log", transfer=transfer) as engine:
        wanted = engine.read(words)["tokens"]
        holds(daemon, CACHED // CHUNK)
        engine.forget()
        assert engine.read(words)["tokens"] == wanted
        counts = engine.chunks()
        assert (counts["loaded"], counts["lost"]) == (3, 1)
        assert engine.read(words)["tokens"] == wanted  # what the engine has kept of it is right
        holds(daemon, CACHED // CHUNK)
        engine.forget()
        again = engine.read(words)
        assert (again["cached"], again["tokens"]) == (CACHED, wanted)
        counts = engine.chunks()
        assert (counts["loaded"], counts["lost"]) == (7, 1)


def test_a_daemon_that_hangs_holds_no_step_up_for_long(folder: Path, daemon: Daemon) -> None:
    model, words = tiny(folder / "model", 1), prompt(7, VOCABULARY)
    impatient = {"retry_seconds": 2.0, "timeout_seconds": 2.0}
    with daemon:
        settings = {"way": "connector", "ours": impatient}
        with Engine(model, daemon.socket, folder / "engine.log", **settings) as engine:
            wanted = engine.read(words)["tokens"]
            holds(daemon, CACHED // CHUNK)
            os.kill(daemon.pid, signal.SIGSTOP)
            try:
                for _ in range(3):
                    engine.forget()
                    assert engine.read(words)["tokens"] == wanted
            finally:
                os.kill(daemon.pid, signal.SIGCONT)
            counts = engine.chunks()
            assert counts["late"] + counts.get("away", 0) >= 4
            deadline = time.monotonic() + 300
            while True:
                engine.forget()
                back = engine.read(words)
                assert back["tokens"] == wanted
                if back["cached"] == CACHED:
                    break
                assert time.monotonic() < deadline, engine.chunks()
                time.sleep(0.5)
