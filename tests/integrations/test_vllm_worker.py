"""Pages of an engine, filled and taken by steps; a dict stands for the daemon, and can be slow or gone."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.patience import PATIENCE_S

from kvtcd.core.errors import BadIdentity
from kvtcd.core.keys import EngineKey
from kvtcd.integrations.vllm_jobs import Chunk
from kvtcd.integrations.vllm_staging import Staging
from kvtcd.integrations.vllm_steps import Move, Sent, Step
from kvtcd.integrations.vllm_threads import Carriers
from kvtcd.integrations.vllm_worker import Worker

BLOCKS, PER_CHUNK, SLOTS = 32, 4, 8
LAYERS = ("a.0", "a.1", "a.2")
SHAPE = (BLOCKS, 1, 2, 3, 4)  # blocks, pages of each, heads, tokens, content


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number]) * 32 + bytes(4))


@dataclass
class Kept:
    """A daemon; while `gate` is closed it does not answer loads."""

    chunks: dict[bytes, bytes] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    heads: dict[bytes, Chunk] = field(default_factory=dict)

    def load(self, chunks: Any, row: Any) -> list[EngineKey]:
        self.gate.wait(PATIENCE_S)
        found = [chunk for chunk in chunks if chunk.key in self.chunks]
        for chunk in found:
            row(chunk.row)[:] = self.chunks[chunk.key]
        return [chunk.key for chunk in found]

    def store(self, chunks: Any, row: Any) -> dict[EngineKey, str]:
        for chunk in chunks:
            self.chunks[chunk.key], self.heads[chunk.key] = bytes(row(chunk.row)), chunk
        return {chunk.key: "stored" for chunk in chunks}


class Engine:
    """The thread that runs a model, with caches full of distinct numbers."""

    def __init__(self, seconds: float = PATIENCE_S, caches: dict[str, torch.Tensor] | None = None) -> None:
        self.daemon = Kept()
        self.daemon.gate.set()
        draw = torch.Generator().manual_seed(1)
        self.caches = caches or {name: torch.randn(SHAPE, generator=draw) for name in LAYERS}
        self.regions: list[SimpleNamespace] = []
        self.worker = Worker(
            self._staging, lambda row: Carriers(self.daemon, row), tokens=12, seconds=seconds
        )

    def _staging(self) -> Staging:
        nbytes = sum(c[0].numel() * c.element_size() for c in self.caches.values()) * PER_CHUNK
        self.regions.append(SimpleNamespace(memory=memoryview(bytearray(SLOTS * nbytes)), closed=False))
        return Staging(self.caches, PER_CHUNK, self.regions[-1])

    def run(self, *loads: Move, stores: tuple[Move, ...] = (), failures: int = 0) -> set[int]:
        """A step of all layers; return the blocks that are said not to be there."""
        self.worker.begin(Step(loads, stores, failures))
        for name in self.caches:
            self.worker.layer(name)
        self.worker.end()
        return self.worker.take_failed()

    def settled(self) -> None:
        """Wait until no transfer runs."""
        self.worker._carriers.jobs.drain()
        self.worker.begin(Step())

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: cache.clone() for name, cache in self.caches.items()}

    def chunk(self, *blocks: int) -> bytes:
        return b"".join(
            self.caches[name][list(blocks)].contiguous().numpy().tobytes() for name in self.caches
        )


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.worker.close()


def store(engine: Engine, number: int, *blocks: int, **rest: Any) -> None:
    engine.run(stores=(Move(key(number), 12 * number, None, blocks),), **rest)
    engine.settled()


def test_a_chunk_is_stored_as_the_pages_are(engine: Engine) -> None:
    store(engine, 1, 7, 3, 9, 4)
    assert engine.daemon.chunks == {key(1): engine.chunk(7, 3, 9, 4)}
    assert engine.daemon.heads[key(1)] == Chunk(key(1), engine.daemon.heads[key(1)].row, 12, 12, None)
    assert engine.worker.take_counts() == {"stored": 1}


def test_a_chunk_is_loaded_into_its_blocks_and_nowhere_else(engine: Engine) -> None:
    store(engine, 1, 7, 3, 9, 4)
    wanted = engine.snapshot()
    for cache in engine.caches.values():
        cache[[20, 21, 22, 23]] = 0
    assert engine.run(Move(key(1), 12, None, (22, 20, 21, 23))) == set()
    for name, cache in engine.caches.items():
        assert torch.equal(cache[[22, 20, 21, 23]], wanted[name][[7, 3, 9, 4]])
        assert torch.equal(cache[:20], wanted[name][:20])
        assert torch.equal(cache[24:], wanted[name][24:])
    assert engine.worker.take_counts()["loaded"] == 1


def test_a_part_of_a_chunk_is_loaded(engine: Engine) -> None:
    store(engine, 1, 7, 3, 9, 4)
    before = engine.snapshot()
    assert engine.run(Move(key(1), 12, None, (20, 21), skip=1)) == set()
    for name, cache in engine.caches.items():
        assert torch.equal(cache[[20, 21]], before[name][[3, 9]])
        assert torch.equal(cache[22:], before[name][22:])


def test_a_layer_is_filled_when_it_asks(engine: Engine) -> None:
    store(engine, 1, 0, 1, 2, 3)
    for cache in engine.caches.values():
        cache[10:14] = 0
    engine.worker.begin(Step((Move(key(1), 0, None, (10, 11, 12, 13)),)))
    for number, name in enumerate(LAYERS):
        assert [bool(engine.caches[one][10:14].any()) for one in LAYERS] == [i < number for i in range(3)]
        engine.worker.layer(name)
        engine.worker.layer(name)  # asked twice it changes nothing
    engine.worker.end()
    assert all(bool(engine.caches[one][10:14].all()) for one in LAYERS)


def test_a_chunk_that_is_gone_is_not_loaded_alone(engine: Engine) -> None:
    store(engine, 1, 0, 1, 2, 3)
    before = engine.snapshot()
    bad = engine.run(Move(key(1), 0, None, (10, 11, 12, 13)), Move(key(2), 12, key(1), (14, 15, 16, 17)))
    assert bad == {14, 15, 16, 17}
    for name, cache in engine.caches.items():
        assert torch.equal(cache[10:14], before[name][:4])
        assert torch.equal(cache[14:18], before[name][14:18])
    counts = engine.worker.take_counts()
    assert (counts["loaded"], counts["lost"]) == (1, 1)


def test_a_chunk_that_is_late_is_computed_and_does_no_harm_when_it_comes() -> None:
    engine = Engine(seconds=0.05)
    store(engine, 1, 0, 1, 2, 3)
    before = engine.snapshot()
    engine.daemon.gate.clear()
    assert engine.run(Move(key(1), 0, None, (10, 11, 12, 13))) == {10, 11, 12, 13}
    # the next ones do not wait behind it
    assert engine.run(Move(key(1), 0, None, (20, 21, 22, 23)), failures=1) == {20, 21, 22, 23}
    assert engine.worker.take_counts()["overdue"] == 2
    engine.daemon.gate.set()
    engine.settled()
    for name, cache in engine.caches.items():
        assert torch.equal(cache, before[name])
    engine.worker._seconds = PATIENCE_S  # on a busy machine this must not be late
    for _ in range(3 * SLOTS):  # and nothing of it is left: memory for chunks comes back
        assert engine.run(Move(key(1), 0, None, (10, 11, 12, 13)), failures=2) == set()
    assert torch.equal(engine.caches["a.0"][10:14], before["a.0"][:4])
    for number in (2, 3, 4):
        store(engine, number, *range(4 * number, 4 * number + 4), failures=2)
    wanted = engine.snapshot()
    many = [Move(key(n), 0, None, tuple(range(12 + 4 * n, 16 + 4 * n))) for n in (1, 2, 3, 4)]
    assert engine.run(*many, failures=2) == set()  # each has memory of its own
    for place, number in enumerate((0, 2, 3, 4)):
        loaded = engine.caches["a.1"][16 + 4 * place : 20 + 4 * place]
        assert torch.equal(loaded, wanted["a.1"][4 * number : 4 * number + 4])
    engine.worker.close()


def test_nothing_that_follows_from_a_block_that_was_not_loaded_is_stored(engine: Engine) -> None:
    """Not in its own step, nor in later ones that were planned before the scheduler knew."""
    chunk = Move(key(5), 12, key(9), (4, 5, 6, 7))
    assert engine.run(Move(key(9), 0, None, (0, 1, 2, 3)), stores=(chunk,)) == {0, 1, 2, 3}
    assert engine.run(stores=(chunk,)) == set()
    engine.settled()
    assert engine.daemon.chunks == {}
    assert engine.worker.take_counts()["dropped"] == 2
    assert engine.run(stores=(chunk,), failures=1) == set()
    engine.settled()
    assert list(engine.daemon.chunks) == [key(5)]


def test_more_than_there_is_memory_for_is_dropped(engine: Engine) -> None:
    engine.run(stores=tuple(Move(key(i), 0, None, (0, 1, 2, 3)) for i in range(SLOTS)))
    engine.settled()
    assert len(engine.daemon.chunks) == SLOTS // 2
    assert engine.worker.take_counts() == {"stored": SLOTS // 2, "dropped": SLOTS - SLOTS // 2}
    engine.run()  # takes back what has ended
    sent, every = engine.worker.take_sent(), frozenset(map(key, range(SLOTS)))
    assert sent.keys == every, "none of them is on its way any more"
    assert sent.there == every.intersection(engine.daemon.chunks)
    assert len(sent.there) == SLOTS // 2
    assert engine.worker.take_sent() == Sent()
    store(engine, 20, 0, 1, 2, 3)
    assert key(20) in engine.daemon.chunks


def test_a_model_that_never_asks_for_its_layers_is_not_believed(engine: Engine) -> None:
    store(engine, 1, 0, 1, 2, 3)
    engine.worker.begin(Step((Move(key(1), 0, None, (10, 11, 12, 13)),)))
    engine.worker.end()
    assert engine.worker.take_failed() == {10, 11, 12, 13}


def test_a_layer_that_did_not_run_is_filled_all_the_same(engine: Engine) -> None:
    store(engine, 1, 0, 1, 2, 3)
    engine.worker.begin(Step((Move(key(1), 0, None, (10, 11, 12, 13)),)))
    engine.worker.layer("a.0")
    engine.worker.layer("nobody's")
    engine.worker.end()
    assert engine.worker.take_failed() == set()
    for cache in engine.caches.values():
        assert torch.equal(cache[10:14], cache[:4])


@pytest.mark.parametrize("when", ["waiting", "arrived"])
def test_a_step_that_breaks_loads_nothing_and_keeps_no_memory(engine: Engine, when: str) -> None:
    store(engine, 1, 0, 1, 2, 3)
    for number in range(3 * SLOTS):
        engine.worker.begin(Step((Move(key(1), 0, None, (10, 11, 12, 13)),), failures=number))
        if when == "arrived":
            engine.worker.layer("a.0")
        engine.worker.give_up()
        engine.worker.end()
        assert engine.worker.take_failed() == {10, 11, 12, 13}
        engine.settled()


def test_a_step_that_breaks_at_once_names_its_blocks(engine: Engine, monkeypatch) -> None:
    def broken() -> None:
        raise RuntimeError

    monkeypatch.setattr(engine.worker, "_settle", broken)
    with pytest.raises(RuntimeError):
        engine.worker.begin(Step((Move(key(1), 0, None, (10, 11, 12, 13)),)))
    engine.worker.give_up()
    assert engine.worker.take_failed() == {10, 11, 12, 13}


def once(worker_part: Any, method: str, monkeypatch, at: int = 0) -> None:
    """Have one call of a method fail, the first or a later one."""
    whole, calls = getattr(worker_part, method), iter(range(10**6))

    def breaks(*arguments: Any) -> Any:
        if next(calls) == at:
            raise RuntimeError(method)
        return whole(*arguments)

    monkeypatch.setattr(worker_part, method, breaks)


@pytest.mark.parametrize("at", [0, 1])
def test_a_copy_that_fails_costs_neither_memory_nor_what_was_taken_before(engine, monkeypatch, at) -> None:
    stores = (Move(key(1), 0, None, (0, 1, 2, 3)), Move(key(2), 12, key(1), (4, 5, 6, 7)))
    free = len(engine.worker._staging.for_stores)
    once(engine.worker._staging, "take", monkeypatch, at)
    engine.worker.begin(Step(stores=stores))
    with pytest.raises(RuntimeError):
        engine.worker.end()
    engine.worker.give_up()
    engine.settled()

    sent = engine.worker.take_sent()
    assert sent.keys == {key(1), key(2)}, "none of them is on its way any more"
    assert sent.there == ({key(1)} if at else set())
    assert len(engine.worker._staging.for_stores) == free
    assert engine.worker.take_failed() == set()
    engine.run(stores=stores)
    engine.settled()
    assert set(engine.daemon.chunks) == {key(1), key(2)}


@pytest.mark.parametrize("broken", ["_settle", "_arrive"])
def test_a_step_that_breaks_before_its_stores_says_that_they_are_not_on_their_way(
    engine, monkeypatch, broken
) -> None:
    once(engine.worker, broken, monkeypatch)
    step, worker = Step(stores=(Move(key(1), 0, None, (0, 1, 2, 3)),)), engine.worker
    for act in (lambda: worker.begin(step), worker.end):
        try:
            act()
        except RuntimeError:
            worker.give_up()
    assert worker.take_sent().keys == {key(1)}
    assert worker.take_counts() == {"dropped": 1}


def test_memory_that_a_daemon_holds_on_to_is_used_no_more(engine: Engine) -> None:
    store(engine, 1, 0, 1, 2, 3)
    engine.regions[0].closed = True
    assert engine.run(Move(key(1), 0, None, (10, 11, 12, 13))) == set()
    assert len(engine.regions) == 2
    held = bytes(engine.regions[0].memory)
    store(engine, 2, 5, 6, 7, 8)
    assert bytes(engine.regions[0].memory) == held


def test_another_physical_order_gives_the_same_chunk() -> None:
    """Tokens before heads in memory, as on a GPU: pages are copied as their dimensions are named."""
    plain = Engine()
    turned = {name: c.transpose(2, 3).contiguous().transpose(2, 3) for name, c in plain.caches.items()}
    assert not turned["a.0"].is_contiguous()
    other = Engine(caches=turned)
    for engine in (plain, other):
        store(engine, 1, 7, 3, 9, 4)
    assert other.daemon.chunks == plain.daemon.chunks
    before = other.snapshot()
    assert other.run(Move(key(1), 12, None, (20, 21, 22, 23))) == set()
    assert torch.equal(turned["a.2"][20:24], before["a.2"][[7, 3, 9, 4]])
    for engine in (plain, other):
        engine.worker.close()


def test_layers_of_different_sizes() -> None:
    caches = {"a": torch.randn(BLOCKS, 1, 2, 3, 4).half(), "b": torch.randn(BLOCKS, 2, 1, 3, 8)}
    engine = Engine(caches=caches)
    store(engine, 1, 7, 3, 9, 4)
    assert engine.daemon.chunks[key(1)] == engine.chunk(7, 3, 9, 4)
    assert engine.run(Move(key(1), 12, None, (20, 21, 22, 23))) == set()
    for cache in caches.values():
        assert torch.equal(cache[20:24], cache[[7, 3, 9, 4]])
    engine.worker.close()


def test_caches_that_are_no_pages_are_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        from support import vllm_twin as twin  # noqa: PLC0415 - stands for vLLM from here on

        twin.install(patch)
        from kvtcd.integrations.vllm_paged import paged  # noqa: PLC0415 - imports vLLM

        plain = torch.zeros(8, 2, 4, 6)
        assert {n: c.shape for n, c in paged({"a": plain, "b": plain}, "ab", 4).items()} == {
            "a": (4, 2, 2, 4, 6)
        }
        for wrong in ([plain], plain[0], plain.transpose(2, 3), torch.zeros(7, 2, 4, 6)):
            with pytest.raises(BadIdentity, match="plain pages"):
                paged({"a": wrong}, "a", 4)
        with pytest.raises(BadIdentity, match="cache of b"):
            paged({"a": plain}, "ab", 4)
