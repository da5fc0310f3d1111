"""LMCache's objects on a daemon that is a real process; the adapter itself is tested where LMCache is."""

from __future__ import annotations

import hashlib
import logging
import random
import re
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.patience import PATIENCE_S

from kvtcd.client import Notice, What
from kvtcd.core.errors import DeadlineExceeded
from kvtcd.core.keys import EngineKey
from kvtcd.integrations.lmcache_daemon import Daemon as Objects
from kvtcd.integrations.lmcache_daemon import Name, Object
from kvtcd.integrations.lmcache_identity import Facts, Place, Shape
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG = logging.getLogger("kvtcd.test")
SHAPE = Shape.of([[2, 8, 16]], ["torch.bfloat16"], [2])
PLACE = Place("model", 0x01000100, 0)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    with Daemon(folder, host=64 << 20, disk=256 << 20, profiles=folder / "profiles") as daemon:
        yield daemon


def objects_of(daemon: Daemon, weights: str) -> Objects:
    facts = Facts("m", hashlib.sha256(weights.encode()).hexdigest(), "s")
    return Objects(
        daemon.client(), lambda model: facts if model == PLACE.model else None,
        version="1", lookup_seconds=PATIENCE_S, seconds=PATIENCE_S, log=LOG,
    )  # fmt: skip


@pytest.fixture
def objects(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Objects]:
    made = objects_of(daemon, request.node.name)  # each test has a model of its own
    yield made
    made.link.close()


def names(count: int, first: int = 1, place: Place = PLACE, salt: bytes = b"") -> list[Name]:
    return [Name(EngineKey(bytes([first + i]) * 32), place, salt) for i in range(count)]


def filled(given: list[Name], seed: int = 0) -> list[Object]:
    draw = random.Random(seed)
    return [Object(name, SHAPE, memoryview(bytearray(draw.randbytes(SHAPE.nbytes)))) for name in given]


def empty(given: list[Name]) -> list[Object]:
    return [Object(name, SHAPE, memoryview(bytearray(SHAPE.nbytes))) for name in given]


def test_objects_are_found_loaded_and_deleted(objects: Objects) -> None:
    given = names(12)
    wanted = filled(given)
    assert objects.find(given, {0: SHAPE}) == [False] * 12
    assert set(objects.store(wanted).values()) == {"stored"}
    assert set(objects.store(wanted).values()) == {"duplicate"}
    assert objects.find([*given, *names(1, 50)], {0: SHAPE}) == [True] * 12 + [False]
    into = empty(given)
    assert objects.load(into) == [True] * 12
    assert [one.memory for one in into] == [one.memory for one in wanted]
    objects.release(given)
    assert objects.delete(given[3:4]) == [(given[3], SHAPE.nbytes)]
    assert objects.delete(given[3:4]) == [], "what is gone was there no more"
    assert objects.find(given, {}) == [True] * 3 + [False] + [True] * 8
    counts = objects.counts()
    assert (counts["stored"], counts["duplicate"], counts["loaded"]) == (12, 12, 12)


def test_what_was_found_stays_until_it_is_released(daemon: Daemon, objects: Objects) -> None:
    """A lookup that hits keeps its objects for the load (LMCache calls it a lock), and no longer."""
    given = names(2, first=200)
    objects.store(filled(given))
    objects.find(given, {0: SHAPE})
    with daemon.client() as client:
        (space,) = [one.name for one in client.namespaces() if client.match(one.name, [given[0].key]).prefix]
        with pytest.raises(DeadlineExceeded):
            client.delete(space, given[0].key, deadline=0.2)
        objects.release(given)
        assert client.delete(space, given[1].key, deadline=PATIENCE_S)


@pytest.mark.parametrize("before", ["match", "put_many", "get_many", "delete"])
def test_a_purge_at_any_moment_is_no_outage(
    daemon: Daemon, objects: Objects, before: str, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator purges the namespace just before a call, the one behind another call included."""
    given = names(3, first=150)
    wanted = filled(given)
    assert set(objects.store(wanted).values()) == {"stored"}
    client, purged = objects.link.client, []
    original = getattr(client, before)

    def purging(name: str, *arguments: object, **options: object) -> object:
        if not purged:
            purged.append(name)
            with daemon.client() as operator:
                operator.purge(name)
        return original(name, *arguments, **options)

    more = filled(names(2, first=160))
    with monkeypatch.context() as patch:
        patch.setattr(client, before, purging)
        if before == "get_many":
            assert objects.load(empty(given)) == [False] * 3
        elif before == "delete":
            assert objects.delete(given) == []
        else:
            assert set(objects.store(more).values()) == {"stored"}
    assert purged
    assert objects.link.up
    assert "can be used again" not in caplog.text
    assert set(objects.store(wanted).values()) == {"stored"}
    assert objects.find(given, {0: SHAPE}) == [True] * 3
    assert objects.counts().get("failed", 0) == 0


def test_places_salts_and_strangers_are_apart(objects: Objects) -> None:
    objects.store(filled(names(1)))
    asked = names(1, place=Place("model", 0x02000200, 0)) + names(1, salt=b"a")
    assert objects.find(asked, {0: SHAPE}) == [False, False]
    stranger = names(1, place=Place("stranger", PLACE.rank, 0))
    assert objects.find(stranger, {0: SHAPE}) == [False]
    assert objects.store(filled(stranger)) == {}
    assert objects.find(names(1), {0: SHAPE}) == [True]


def listeners(daemon: Daemon) -> float:
    """Return how many listen to the notices of a daemon, as it tells those who watch it."""
    with socket.socket(socket.AF_UNIX) as watcher:
        watcher.connect(str(daemon.socket))
        watcher.sendall(b"GET /metrics HTTP/1.1\r\nHost: kvtcd\r\nConnection: close\r\n\r\n")
        told = b"".join(iter(lambda: watcher.recv(1 << 16), b""))
    return float(re.search(rb"^kvtcd_listeners (.*)$", told, re.MULTILINE)[1])


def test_a_lookup_tells_positions_and_nothing_else_does(folder: Path) -> None:
    given, told = names(4, 100), []
    with Daemon(folder / "p", host=64 << 20, disk=64 << 20, profiles=folder / "profiles") as other:

        def listen() -> None:
            with other.client() as client:
                told.extend(notice for notice in client.events() if notice.what is What.STORED)

        listener = threading.Thread(target=listen)
        listener.start()
        while listeners(other) < 1:
            time.sleep(0.01)
        ours = objects_of(other, "positions")
        ours.find(given[:3], {0: SHAPE})
        ours.store(list(reversed(filled(given))))
        with other.client() as client:
            client.flush(client.namespaces()[0].name)
        ours.link.close()
    listener.join()
    stored: dict[bytes, Notice] = {notice.key: notice for notice in told}
    assert [stored[name.key].first_token for name in given] == [0, 8, 16, None]
    assert [stored[name.key].parent for name in given] == [None, given[0].key, given[1].key, None]
