"""A real vLLM engine, on a CPU, whose cache outlives it."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from vllm_engine import Engine

from kvtcd.core.errors import Unavailable
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.peers("vllm"), pytest.mark.slow, pytest.mark.timeout(900)]

LOSSLESS = """
[match]
[codec]
name = "lossless"
"""
PROMPT = 300
CACHED = 256
"""Tokens of a prompt in whole chunks."""


def prompt(seed: int, vocabulary: int = 40_000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, vocabulary) for _ in range(PROMPT)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name:
        yield Path(name)


@pytest.fixture
def daemon(folder: Path) -> Daemon:
    (folder / "lossless.toml").write_text(LOSSLESS)
    return Daemon(
        folder, host=128 << 20, disk=1 << 30, profiles=folder / "profiles", policy=folder / "lossless.toml"
    )


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from kvtcd.lab.models import resolve  # noqa: PLC0415 - needs gguf

    try:
        return resolve("smollm2")
    except Unavailable as error:
        pytest.skip(str(error))


def settled(daemon: Daemon) -> None:
    """Wait until everything is on disk."""
    with daemon.client() as client:
        for namespace in client.namespaces():
            client.flush(namespace.name)


def test_a_prefix_outlives_engine_and_daemon(folder: Path, daemon: Daemon, smollm2: Path) -> None:
    """Stored in one life of both, loaded in the next, and right while the daemon dies and comes back."""
    first, second = prompt(1), prompt(2)
    with daemon:
        with Engine(smollm2, daemon.socket, folder / "one.log") as engine:
            wanted = engine.read(first)
            assert wanted["cached"] == 0
            expected = engine.read(second)["tokens"]
            salted = engine.read(first, salt="a")
            assert salted["cached"] == 0  # another salt: nobody's tokens are its own
            engine.forget()
            assert engine.read(first, salt="b")["cached"] == 0
            assert engine.read(first, salt="a")["cached"] == CACHED
            assert engine.read(first, salt="a")["tokens"] == wanted["tokens"]
        settled(daemon)
        with daemon.client() as client:
            (info,) = client.namespaces()
            assert info.codec == "lossless"

    with daemon, Engine(smollm2, daemon.socket, folder / "two.log") as engine:
        again = engine.read(first)
        assert again["cached"] == CACHED
        assert again["tokens"] == wanted["tokens"]
        assert engine.chunks() == {"hit": 4, "loaded": 4}

        daemon.kill()
        engine.forget()
        without = engine.read(first)
        assert without["cached"] == 0
        assert without["tokens"] == wanted["tokens"]
        assert engine.read(second)["tokens"] == expected
        counts = engine.chunks()
        assert counts["away"] > 0

        daemon.start()
        deadline = time.monotonic() + 30
        while True:  # the tier finds it by itself
            engine.forget()
            back = engine.read(first)
            assert back["tokens"] == wanted["tokens"]
            if back["cached"] == CACHED:
                break
            assert time.monotonic() < deadline, engine.chunks()
            time.sleep(0.5)
