"""A real LMCache server between a real vLLM engine, on a CPU, and the daemon."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lmcache_server import LMCacheServer
from test_vllm_engine import CACHED, VOCABULARY, prompt, settled, tiny
from vllm_engine import CHUNK, Engine

from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.peers("vllm", "lmcache"), pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name:
        yield Path(name)


def eventually(lmcache: LMCacheServer, **wanted: int) -> None:
    """Wait until so many objects had this fate: stores go on behind the engine's back."""
    deadline = time.monotonic() + 60
    while any(lmcache.objects().get(fate, 0) < count for fate, count in wanted.items()):
        assert time.monotonic() < deadline, lmcache.objects()
        time.sleep(0.2)


def test_a_prefix_outlives_engine_server_and_daemon(folder: Path) -> None:
    """Stored in one life of all three, loaded in the next, and right while the daemon dies and comes back."""
    daemon = Daemon(folder, host=128 << 20, disk=1 << 30, profiles=folder / "profiles")
    model, words = tiny(folder / "model", 1), prompt(6, VOCABULARY)
    chunks = CACHED // CHUNK

    def server() -> LMCacheServer:
        return LMCacheServer(daemon.socket, folder / "server.log", chunk=CHUNK)

    def engine(lmcache: LMCacheServer, life: str) -> Engine:
        # numba, which LMCache loads, must not be there before vLLM's workers start: a process of their own
        return Engine(
            model, daemon.socket, folder / f"{life}.log", dtype="bfloat16", transfer=lmcache.connector,
            processes="1",
        )  # fmt: skip

    with daemon:
        with server() as lmcache, engine(lmcache, "one") as vllm:
            wanted = vllm.read(words)
            assert wanted["cached"] == 0
            eventually(lmcache, stored=chunks)
            salted = vllm.read(words, salt="a")
            assert (salted["cached"], salted["tokens"]) == (0, wanted["tokens"])
            eventually(lmcache, stored=2 * chunks)
        settled(daemon)
        with daemon.client() as client:
            (info,) = client.namespaces()
            assert info.codec == "lossless"

    with daemon, server() as lmcache, engine(lmcache, "two") as vllm:
        again = vllm.read(words)
        assert (again["cached"], again["tokens"]) == (CACHED, wanted["tokens"])
        assert lmcache.objects()["loaded"] == chunks

        daemon.kill()
        vllm.forget()  # the server's memory too
        without = vllm.read(words)
        assert (without["cached"], without["tokens"]) == (0, wanted["tokens"])

        daemon.start()
        deadline = time.monotonic() + 60
        while True:  # the adapter finds it by itself
            vllm.forget()
            back = vllm.read(words)
            assert back["tokens"] == wanted["tokens"]
            if back["cached"] == CACHED:
                break
            assert time.monotonic() < deadline, lmcache.objects()
            time.sleep(0.5)
