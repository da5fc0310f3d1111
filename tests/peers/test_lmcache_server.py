"""A real LMCache server between a real vLLM engine, on a CPU, and the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from daemons import holds, new_daemon, settled, until
from lmcache_server import LMCacheServer
from tiny_models import CACHED, prompt, tiny
from vllm_engine import CHUNK, Engine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.peers("vllm", "lmcache"), pytest.mark.slow, pytest.mark.timeout(1500)]
CHUNKS = CACHED // CHUNK


def test_a_prefix_outlives_engine_server_and_daemon(folder: Path) -> None:
    """Stored in one life of all three, loaded in the next, and right while the daemon dies and comes back."""
    daemon = new_daemon(folder)
    model, words = tiny(folder / "model", 1), prompt(6)

    def server() -> LMCacheServer:
        return LMCacheServer(daemon.socket, folder / "server.log", chunk=CHUNK)

    def engine(lmcache: LMCacheServer, life: str) -> Engine:
        # numba, which LMCache loads, must not be there before vLLM's workers start: a process of their own
        return Engine(model, folder / f"{life}.log", lmcache.transfer, dtype="bfloat16", processes="1")

    with daemon:
        with server() as lmcache, engine(lmcache, "one") as vllm:
            wanted = vllm.read(words)
            assert wanted["cached"] == 0
            holds(daemon, CHUNKS)
            salted = vllm.read(words, salt="a")
            assert (salted["cached"], salted["tokens"]) == (0, wanted["tokens"])
            holds(daemon, 2 * CHUNKS)
        settled(daemon)
        with daemon.client() as client:
            (info,) = client.namespaces()
            assert info.codec == "lossless"

    with daemon, server() as lmcache, engine(lmcache, "two") as vllm:
        again = vllm.read(words)
        assert (again["cached"], again["tokens"]) == (CACHED, wanted["tokens"])
        assert lmcache.objects()["loaded"] == CHUNKS

        daemon.kill()

        def computes() -> bool:
            vllm.forget()  # the server's memory too, but for what a transfer holds at this moment
            without = vllm.read(words)
            assert without["tokens"] == wanted["tokens"]
            return without["cached"] == 0

        def loads() -> bool:
            vllm.finds_again(words, wanted["tokens"])
            return lmcache.objects()["loaded"] > CHUNKS

        until(computes, lmcache.objects)
        daemon.start()
        until(loads, lmcache.objects)
