"""What the part of each engine makes of a daemon that changes under it: purged, emptied, told otherwise."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.kept import COUNT, WORLD, Kept, llamacpp, lmcache, sglang, transformers, vllm_tier
from support.patience import PATIENCE_S

from kvtcd.codec.profile import store
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtcd.client import NamespaceInfo

pytestmark = pytest.mark.slow
LOSSLESS = '[codec]\nname = "lossless"\n'
REFUSING = LOSSLESS + "[admit]\non_sight = 15\n"
PACKED = '[codec]\nname = "kvtc2"\nratio = 8\n'
EXACT = [0.0] * COUNT
CLOSE = 0.3
"""Energy that a block may lose: what is decoded with another profile has none left in common."""
PARTS = (
    vllm_tier,
    lmcache,
    sglang,
    transformers,
    pytest.param(
        llamacpp,
        marks=pytest.mark.skipif(
            find_spec("xllamacpp") is None, reason="xllamacpp has no wheel for this machine"
        ),
    ),
)


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name:
        folder = Path(name)
        (folder / "policy.toml").write_text(LOSSLESS)
        with Daemon(
            folder, host=64 << 20, disk=256 << 20, profiles=folder / "profiles", policy=folder / "policy.toml"
        ) as daemon:
            yield daemon


@pytest.fixture
def daemon(running: Daemon) -> Daemon:
    """A daemon that keeps every bit, whatever the last test has told it."""
    told(running, LOSSLESS)
    return running


@pytest.fixture(params=PARTS, ids=lambda part: part.__name__)
def kept(daemon: Daemon, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    with request.param(daemon, tmp_path) as kept:
        yield kept


def told(daemon: Daemon, policy: str) -> None:
    """Have the daemon read another policy, and its profiles anew."""
    (daemon.socket.parent / "policy.toml").write_text(policy)
    with daemon.client() as client:
        client.reload_policies()


def namespace(daemon: Daemon, kept: Kept) -> NamespaceInfo:
    with daemon.client() as client:
        (found,) = [info for info in client.namespaces() if info.identity.weights == kept.weights]
    return found


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def kept_again(kept: Kept, prompt: int) -> bool:
    """Offer a prompt, and say whether all of it comes back; what does is right each time."""
    kept.offer(prompt)
    back = kept.back(prompt)
    assert set(back) <= {0.0}
    return back == EXACT


def test_a_namespace_that_was_purged_begins_anew_at_once(
    daemon: Daemon, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    assert kept.back(1) == []
    assert kept_again(kept, 1)
    for ask in (kept.back, kept.offer):  # whichever comes first after the purge
        with daemon.client() as client:
            client.purge(namespace(daemon, kept).name)
        ask(1)
        assert kept_again(kept, 1)
    assert "can be used again" not in caplog.text, "it is no outage"


def test_a_daemon_that_lost_its_state_is_used_again(daemon: Daemon, kept: Kept) -> None:
    """Another daemon on the same socket, with nothing in it and other keys."""
    assert kept_again(kept, 1)
    daemon.stop()
    shutil.rmtree(daemon.socket.parent / "state")
    daemon.start()
    assert kept.back(1) == []
    until(lambda: kept_again(kept, 1))


def test_what_a_policy_refuses_is_missing_and_nothing_else(
    daemon: Daemon, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    assert kept_again(kept, 1)
    told(daemon, REFUSING)
    for _ in range(2):
        kept.offer(2)
        assert kept.back(2) == []
        assert kept.back(1) == EXACT, "what was there before stays"
    told(daemon, LOSSLESS)
    assert kept_again(kept, 2)
    assert "can be used again" not in caplog.text, "it is no outage"


def add_profile(daemon: Daemon, kept: Kept, seed: int) -> str:
    """Put a profile of this part's model into the daemon's folder; return its name there."""
    folder = daemon.socket.parent / "profiles"
    folder.mkdir(exist_ok=True)
    path = store(replace(WORLD, of=namespace(daemon, kept).identity, seed=seed).profile()[1], folder)
    os.utime(path, (seed, seed))  # the newest counts
    return path.stem


def only_on_disk(daemon: Daemon, kept: Kept) -> None:
    """Have the daemon lose all that it has not packed."""
    with daemon.client() as client:
        client.flush(namespace(daemon, kept).name, deadline=PATIENCE_S)
    daemon.kill()
    daemon.start()


def test_a_profile_that_is_replaced_leaves_what_is_there_readable(daemon: Daemon, kept: Kept) -> None:
    """Packed by one profile and by the next; opaque blocks by none, and exact."""
    assert kept_again(kept, 1)
    opaque = namespace(daemon, kept).identity.rope is None
    for prompt in (2, 3):
        profile = add_profile(daemon, kept, seed=prompt)
        told(daemon, PACKED)
        assert namespace(daemon, kept).profile == (None if opaque else profile)
        kept.offer(prompt)
        only_on_disk(daemon, kept)
        for known in range(2, prompt + 1):
            until(partial(kept_close, kept, known))
            assert any(kept.back(known)) is not opaque, "it was packed"


def kept_close(kept: Kept, prompt: int) -> bool:
    """Say whether all of a prompt comes back; what does is close to what was offered each time."""
    back = kept.back(prompt)
    assert max(back, default=0.0) < CLOSE
    return len(back) == COUNT
