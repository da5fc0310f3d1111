"""What the tier makes of every answer of a daemon, and of none; the daemon is scripted."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvtcd.core.errors import (
    BadIdentity,
    Busy,
    DeadlineExceeded,
    KvtcdError,
    ServerError,
    Stopping,
    StoreFull,
    Unavailable,
    UnknownNamespace,
)
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey
from kvtcd.core.layout import Dtype, Layout, Stream
from kvtcd.core.matches import BlockMatch, Matches
from kvtcd.core.messages import BlockResult
from kvtcd.core.place import Tier
from kvtcd.integrations.link import PAUSES_S, REFUSED_S, State
from kvtcd.integrations.vllm_daemon import Daemon
from kvtcd.integrations.vllm_jobs import Chunk

BYTES = 8
IDENTITY = Identity(
    engine="vllm", hash_scheme="h", model="m", weights="ab" * 32, rope=None,
    layout=Layout((Stream("pages", 1, 2, rope=False),), 1, Dtype.F16), block_tokens=2,
)  # fmt: skip


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number]) * 32 + bytes(4))


def chunk(number: int, parent: int | None = None) -> Chunk:
    return Chunk(key(number), number, 2, 2 * number, None if parent is None else key(parent))


@dataclass
class Scripted:
    """A client; `fail` is raised by the call it names."""

    blocks: dict[bytes, bytes] = field(default_factory=dict)
    boot: str = "one"
    fail: dict[str, KvtcdError] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)
    address: str = "socket"
    breaks_at: int = -1
    on_disk: set[bytes] = field(default_factory=set)
    waits: int = 2

    def _called(self, name: str, what: Any = None) -> None:
        self.calls.append((name, what))
        if name in self.fail:
            raise self.fail[name]

    def info(self):
        self._called("info")
        return SimpleNamespace(boot_id=self.boot)

    def register(self, name, identity, deadline=None):  # noqa: ARG002 - as the client's
        self._called("register", name)
        return SimpleNamespace(name=name)

    def match(self, name, keys, salt, deadline):  # noqa: ARG002 - as the client's
        self._called("match")
        tiers = {k: Tier.DISK if k in self.on_disk else Tier.HOST for k in self.blocks}
        return Matches.of(BlockMatch(k, 2, tiers.get(k)) for k in keys)

    def prefetch(self, name, keys, *, wait, salt, deadline):  # noqa: ARG002 - as the client's
        self._called("prefetch", list(keys))
        return SimpleNamespace(id="1", state="running")

    def operation(self, operation_id):
        self._called("operation", operation_id)
        self.waits -= 1
        return SimpleNamespace(id=operation_id, state="running" if self.waits else "done")

    def get_many(self, name, keys, out, salt, deadline):  # noqa: ARG002 - as the client's
        for number, (wanted, into) in enumerate(zip(keys, out, strict=True)):
            if number == self.breaks_at:
                self.fail["get"] = Unavailable("broke off")
            self._called("get", wanted)
            data = self.blocks.get(wanted)
            if data is not None:
                into[: len(data)] = data
            yield wanted, None if data is None else into[: len(data)]

    def put_many(self, name, blocks, salt, deadline):  # noqa: ARG002 - as the client's
        blocks = [(head, bytes(data)) for head, data in blocks]
        self._called("put", [head for head, _ in blocks])
        self.blocks |= {head.key: data for head, data in blocks}
        return tuple(BlockResult(head.key, "stored") for head, _ in blocks)

    def close(self):
        self._called("close")


@dataclass
class Scene:
    client: Scripted
    daemon: Daemon
    memory: bytearray
    lost: list[float]
    wrong: list[str]

    def row(self, number: int) -> memoryview:
        return memoryview(self.memory)[number * BYTES : (number + 1) * BYTES]


@pytest.fixture
def scene() -> Scene:
    return new_scene()


def new_scene(lift: float = 0.0) -> Scene:
    client, lost, wrong = Scripted(), [], []
    daemon = Daemon(
        client, {0: IDENTITY}, salt=b"", seconds=1.0, valid=lambda: wrong[0] if wrong else "",
        on_lost=lambda: lost.append(time.monotonic()), lift=lift,
    )  # fmt: skip
    assert not daemon.link.up
    assert not daemon.link.away  # nobody knows yet
    assert daemon.link.pause() == 0.0
    assert not daemon.link.connect()  # the first one is no other one
    assert daemon.link.up
    assert daemon.link.pause() is None
    return Scene(client, daemon, bytearray(range(80)), lost, wrong)


def test_another_daemon_is_noticed_by_its_boot_id(scene: Scene) -> None:
    assert not scene.daemon.link.connect()
    scene.client.boot = "two"
    assert scene.daemon.link.connect()
    assert not scene.daemon.link.connect()


@pytest.mark.parametrize(
    "error", [Unavailable("gone"), DeadlineExceeded("answer", 1), Stopping(), UnknownNamespace("m")]
)
def test_a_daemon_that_is_away_is_not_asked_again_for_a_while(scene: Scene, error: KvtcdError) -> None:
    """It was restarted, its namespace was purged, or it hangs: a new connection is needed in each case."""
    scene.client.fail["match"] = error
    assert scene.daemon.find([key(1)]) == {}
    assert not scene.daemon.link.up
    assert scene.daemon.link.away
    assert len(scene.lost) == 1

    asked = len(scene.client.calls)
    assert scene.daemon.find([key(1)]) == {}
    assert scene.daemon.load([chunk(1)], scene.row) == []
    assert scene.daemon.store([chunk(1)], scene.row) == {}
    assert len(scene.client.calls) == asked
    assert len(scene.lost) == 1
    assert 0 < scene.daemon.link.pause() <= PAUSES_S[0]
    assert not scene.daemon.link.connect()
    assert scene.daemon.link.up


@pytest.mark.parametrize("error", [Busy("host"), StoreFull("put", "ENOSPC"), ServerError(500, "x", "y")])
def test_a_daemon_that_cannot_now_is_still_there_and_the_log_says_why(
    scene: Scene, error: KvtcdError, caplog
) -> None:
    scene.client.fail["put"] = error
    for _ in range(3):
        assert scene.daemon.store([chunk(1)], scene.row) == {}
    assert scene.daemon.link.up
    assert not scene.lost
    (said,) = [line for line in caplog.messages if "did not do" in line]  # once, not three times
    assert str(error) in said


def test_pauses_grow_and_end(scene: Scene) -> None:
    link = State(names={IDENTITY: "m"}, there=True, boot="one")
    for wanted in (*PAUSES_S, PAUSES_S[-1]):
        link = link.lost(100.0, refused=False)
        assert link.pause(100.0) == pytest.approx(wanted)
        assert link.pause(1000.0) == 0.0
    assert link.lost(100.0, refused=True).pause(100.0) == REFUSED_S
    assert link.found({IDENTITY: "m"}, "two").lost(0.0, refused=False).pause(0.0) == PAUSES_S[0]
    scene.client.fail["register"] = BadIdentity("layout", "is not known to this daemon")
    scene.daemon.link.connect()
    assert scene.daemon.link.pause() > PAUSES_S[-1]


def test_what_does_not_hold_any_more_is_never_asked_for(scene: Scene) -> None:
    scene.client.blocks[key(1)] = bytes(BYTES)
    scene.wrong.append("files of an adapter have changed")
    asked = len(scene.client.calls)

    assert scene.daemon.find([key(1)]) == {}
    assert scene.daemon.load([chunk(1)], scene.row) == []
    scene.wrong.clear()  # even if they changed back
    assert not scene.daemon.link.connect()
    assert not scene.daemon.link.up
    assert scene.daemon.link.away
    assert scene.daemon.link.pause() is None
    assert len(scene.client.calls) == asked


def test_a_load_ends_with_the_daemon_and_skips_what_is_missing_or_short(scene: Scene) -> None:
    scene.client.blocks = {key(1): b"a" * BYTES, key(3): b"c" * (BYTES - 1), key(4): b"d" * BYTES}
    chunks = [chunk(number) for number in (1, 2, 3, 4)]

    assert scene.daemon.load(chunks, scene.row) == [key(1), key(4)]
    assert scene.row(1) == b"a" * BYTES
    assert scene.row(2) == bytes(range(16, 24))  # missing: not touched
    assert scene.daemon.link.up

    scene.client.breaks_at = 3
    many = [chunk(1)] * 8 + chunks
    assert scene.daemon.load(many, scene.row) == []
    assert not scene.daemon.link.up
    assert sum(name == "get" for name, _ in scene.client.calls) == 8  # four more, and none after that


def test_what_was_loaded_before_the_daemon_went_away_is_kept(scene: Scene) -> None:
    scene.client.blocks = {key(n): bytes([n]) * BYTES for n in range(10)}
    chunks = [chunk(number) for number in range(10)]

    def row(number: int) -> memoryview:
        if number == 9:
            scene.client.fail["get"] = Unavailable("gone")
        return scene.row(number)

    assert scene.daemon.load(chunks, row) == [key(n) for n in range(8)]
    assert not scene.daemon.link.up


def test_only_what_is_missing_is_sent_and_nothing_is_taken_for_descent(scene: Scene) -> None:
    scene.client.blocks[key(1)] = bytes(BYTES)
    chunks = [chunk(1), chunk(2, 1), chunk(3, 2), chunk(7), chunk(8, 7)]

    outcomes = scene.daemon.store(chunks, scene.row)
    assert outcomes == {key(1): "duplicate"} | {key(n): "stored" for n in (2, 3, 7, 8)}
    puts = [heads for name, heads in scene.client.calls if name == "put"]
    assert [[head.key for head in heads] for heads in puts] == [[key(2), key(3)], [key(7), key(8)]]
    assert [head.parent for head in puts[0]] == [key(1), key(2)]
    assert [head.first_token for head in puts[0]] == [4, 6]
    assert scene.client.blocks[key(8)] == bytes(range(64, 72))


def test_what_is_found_on_disk_is_brought_up_first() -> None:
    scene = new_scene(lift=60.0)
    scene.client.blocks = {key(n): bytes(BYTES) for n in (1, 2, 3)}
    scene.client.on_disk = {key(2), key(3)}

    assert scene.daemon.find([key(n) for n in (1, 2, 3, 4)]) == {key(n): n < 4 for n in (1, 2, 3, 4)}
    assert scene.client.calls[-3:] == [("prefetch", [key(2), key(3)]), ("operation", "1"), ("operation", "1")]
    scene.client.on_disk.clear()
    scene.daemon.find([key(1)])
    assert scene.client.calls[-1] == ("match", None)


def test_what_is_purged_while_it_is_brought_up_is_no_outage() -> None:
    scene = new_scene(lift=1.0)
    scene.client.blocks, scene.client.on_disk = {key(1): bytes(BYTES)}, {key(1)}
    scene.client.fail = {"prefetch": UnknownNamespace("gone")}
    assert scene.daemon.find([key(1)]) == {key(1): True}
    assert scene.daemon.link.up
    assert not scene.lost


def test_what_takes_too_long_to_bring_up_is_there_all_the_same() -> None:
    scene = new_scene(lift=0.05)
    scene.client.blocks, scene.client.on_disk, scene.client.waits = {key(1): b""}, {key(1)}, -1
    assert scene.daemon.find([key(1)]) == {key(1): True}
    scene.client.fail["prefetch"] = Busy("host")
    assert scene.daemon.find([key(1)]) == {key(1): True}
    assert scene.daemon.link.up


def test_a_tier_that_copies_behind_the_engine_brings_nothing_up(scene: Scene) -> None:
    scene.client.blocks, scene.client.on_disk = {key(1): b""}, {key(1)}
    assert scene.daemon.find([key(1)]) == {key(1): True}
    assert "prefetch" not in [name for name, _ in scene.client.calls]
