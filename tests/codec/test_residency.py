"""Bases come and go within a budget, the least recently used first, and never one that is in use."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import fake_cuda
from support.patience import PATIENCE_S

from kvtcd.codec.residency import Residency
from kvtcd.codec.transform import Transform

CPU, OTHER = torch.device("cpu"), torch.device("meta")
LIMIT = 100


class Basis:
    """Stands for a transform; knows how often it was said to be in use."""

    def __init__(self) -> None:
        self.marks = 0

    def in_use(self) -> None:
        self.marks += 1


class Shelf:
    """A residency of one device with a limit, and what was made."""

    def __init__(self, limit: int | None = LIMIT) -> None:
        self.residency, self.made = Residency(), []
        if limit is not None:
            self.residency.limit(CPU, limit)

    def use(self, key, nbytes=40, device=CPU):
        def make():
            self.made.append(key)
            return [Basis()]

        return self.residency.hold(key, device, nbytes, make)

    def touch(self, *keys) -> None:
        for key in keys:
            with self.use(key):
                pass


def test_what_was_used_last_stays_and_is_made_once():
    shelf = Shelf()
    shelf.touch("a", "b", "a", "c", "a", "b")
    assert shelf.made == ["a", "b", "c", "b"]
    assert shelf.residency.used(CPU) == 80


def test_what_is_in_use_is_never_given_up():
    shelf = Shelf()
    with shelf.use("a"), shelf.use("b"):
        with (
            pytest.raises(torch.OutOfMemoryError, match=r"40 bytes of bases do not fit .*80 are in use"),
            shelf.use("c"),
        ):
            pass
        shelf.residency.drop_unused(CPU)
        assert shelf.residency.used(CPU) == 80
    shelf.touch("c")
    assert shelf.made == ["a", "b", "c"]


def test_more_than_the_budget_is_not_made():
    shelf = Shelf()
    shelf.touch("a")
    with pytest.raises(torch.OutOfMemoryError), shelf.use("b", LIMIT + 1):
        pass
    assert shelf.made == ["a"]


def test_for_what_others_take_bases_make_room():
    shelf = Shelf()
    shelf.touch("a", "b")
    shelf.residency.take(CPU, 30)
    assert shelf.residency.used(CPU) == 70
    shelf.touch("b")
    assert shelf.made == ["a", "b"]
    shelf.residency.give_back(CPU, 30)
    shelf.touch("a")
    assert shelf.residency.used(CPU) == 80


def test_devices_have_budgets_of_their_own():
    shelf = Shelf()
    shelf.touch("a", "b")
    for key in range(9):
        with shelf.use(key, device=OTHER):
            pass
    assert (shelf.residency.used(CPU), shelf.residency.used(OTHER)) == (80, 360)
    shelf.residency.drop_unused(OTHER)
    assert (shelf.residency.used(CPU), shelf.residency.used(OTHER)) == (80, 0)


def test_what_could_not_be_made_takes_nothing():
    shelf = Shelf()

    def fail():
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError), shelf.residency.hold("a", CPU, 40, fail):
        pass
    assert shelf.residency.used(CPU) == 0


def test_what_has_been_launched_is_marked_even_if_the_call_fails():
    shelf = Shelf()
    with shelf.use("a") as (basis,):
        pass
    with pytest.raises(ZeroDivisionError), shelf.use("a"):
        raise ZeroDivisionError
    assert basis.marks == 2


def test_two_threads_have_one_and_nobody_waits_for_another_basis():
    shelf, begun, go, got = Shelf(), threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        assert go.wait(PATIENCE_S)
        return [Basis()]

    def use():
        with shelf.residency.hold("slow", CPU, 40, slow) as (basis,):
            got.append(basis)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(PATIENCE_S)
    shelf.touch("quick")
    go.set()
    for thread in threads:
        thread.join()
    assert shelf.made == ["quick"]
    assert got[0] is got[1]


def test_what_is_collected_while_room_is_made_may_give_memory_back():
    """As by the garbage collector, which runs on whatever thread, whatever that holds."""
    shelf, ended = Shelf(), threading.Event()
    shelf.residency.take(CPU, 30)

    def collect():
        with shelf.residency.lock:
            shelf.residency.give_back(CPU, 30)
        ended.set()

    threading.Thread(target=collect, daemon=True).start()
    assert ended.wait(PATIENCE_S)
    assert shelf.residency.used(CPU) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.booleans()), max_size=30))
def test_the_budget_holds_whatever_is_used(uses):
    """Sizes belong to keys; some stay in use until the end."""
    shelf, sizes, held = Shelf(), {}, {}
    with ExitStack() as stack:
        for key, drawn, keep in uses:
            nbytes = sizes.setdefault(key, drawn)
            busy = sum(sizes[other] for other in held if other != key)
            try:
                value = stack.enter_context(shelf.use(key, nbytes)) if keep else None
                if not keep:
                    with shelf.use(key, nbytes) as value:
                        pass
            except torch.OutOfMemoryError:
                assert key not in held
                assert busy + nbytes > LIMIT
                continue
            assert key not in held or value is held[key], "the one in use is the one that is given"
            if keep:
                held[key] = value
            assert shelf.residency.used(CPU) <= LIMIT


def test_a_transform_is_as_large_as_it_says():
    for orthonormal in (True, False):
        mean, basis = torch.zeros(60), torch.eye(60)[:7]
        transform = Transform(mean, basis, basis if orthonormal else basis + 1, 3)
        tensors = {t.data_ptr(): t.nbytes for t in vars(transform).values() if isinstance(t, torch.Tensor)}
        assert Transform.nbytes(7, 60, orthonormal=orthonormal, device=CPU) == sum(tensors.values())


def test_bases_are_made_on_one_stream_of_their_device_and_are_there_when_they_are_given(monkeypatch):
    """Streams of whoever comes first end with him; and others read what is given without waiting for it."""
    fake_cuda.install(monkeypatch)
    residency, device, log, streams = Residency(), torch.device("cuda", 1), [], []
    caller, gate, begun = torch.cuda.Stream(device), threading.Event(), threading.Event()

    def make():
        streams.append(torch.cuda.current_stream(device))
        fake_cuda.launch(lambda: (gate.wait(PATIENCE_S), log.append("made")))
        begun.set()
        return [Basis()]

    def use():
        for key in ("a", "b"):
            with torch.cuda.stream(caller), residency.hold(key, device, 40, make):
                log.append("used")

    using = threading.Thread(target=use)
    using.start()
    assert begun.wait(PATIENCE_S)
    assert streams[0].awaited.wait(PATIENCE_S)
    gate.set()
    using.join(PATIENCE_S)

    assert log == ["made", "used"] * 2
    assert streams[0] is streams[1] is not caller
    assert streams[0].device == device


def test_what_is_in_use_is_reused_behind_the_stream_that_reads_it(monkeypatch):
    """Of the device where it lies, whichever is current; torch is told of each tensor."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    transform, told = Transform(torch.zeros(60), torch.eye(60)[:7], torch.eye(60)[:7] + 1, 3), []
    names = [name for name, value in vars(transform).items() if isinstance(value, torch.Tensor)]
    for name in names:
        told_of = partial(lambda name, stream: told.append((name, stream)), name)
        there = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), record_stream=told_of)
        monkeypatch.setattr(transform, name, there)
    transform.in_use()

    assert sorted(told) == sorted((name, "stream of cuda:1") for name in names)
    assert len(names) == 3
