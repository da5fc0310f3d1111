"""Every job ends once; every chunk knows where it begins and what it continues."""

from __future__ import annotations

import threading
import time

import pytest

from kvtcd.core.keys import EngineKey
from kvtcd.integrations.vllm_jobs import Chains, Chunk, Ended, Job, Jobs, group_of, is_ours, runs


def key(number: int, group: int = 0) -> EngineKey:
    return EngineKey(bytes([number]) * 32 + group.to_bytes(4, "big"))


def test_a_key_is_a_whole_hash_and_a_group() -> None:
    assert group_of(key(1, 7)) == 7
    assert is_ours(key(1, 7), {7})
    assert not is_ours(key(1, 7), {0})
    assert not is_ours(b"\x01" * 16 + bytes(4), {0})  # xxhash: 128 bits that anybody can make collide
    assert not is_ours(b"\x01" * 8 + bytes(4), {0})


def test_first_token_and_parent_follow_from_the_position() -> None:
    chains = Chains({0: 64})
    for number, end in ((1, 64), (2, 128), (3, 192)):
        chains.seen("r", key(number), end)

    assert chains.chunk("r", key(1), 64, 5) == Chunk(key(1), 5, 64, 0, None)
    assert chains.chunk("r", key(3), 192, 6) == Chunk(key(3), 6, 64, 128, key(2))
    assert chains.chunk("s", key(3), 192, 6).parent is None  # another request has seen nothing
    assert chains.chunk("r", key(4), None, 7) == Chunk(key(4), 7, 64, None, None)


def test_a_chunk_that_ends_early_begins_where_a_full_one_does() -> None:
    chains = Chains({0: 64})
    chains.seen("r", key(1), 64)

    assert chains.chunk("r", key(2), 96, 0) == Chunk(key(2), 0, 64, 64, key(1))


def test_groups_have_chains_of_their_own() -> None:
    chains = Chains({0: 64, 1: 128})
    chains.seen("r", key(1, 0), 128)
    chains.seen("r", key(2, 1), 128)

    assert chains.chunk("r", key(3, 1), 256, 0).parent == key(2, 1)
    assert chains.chunk("r", key(3, 0), 192, 0).parent == key(1, 0)
    chains.finished("r")
    assert len(chains) == 0


def chunk(number: int, parent: int | None, group: int = 0) -> Chunk:
    return Chunk(key(number, group), number, 64, None, None if parent is None else key(parent, group))


@pytest.mark.parametrize(
    ("chunks", "lengths"),
    [
        ([], []),
        ([chunk(1, None), chunk(2, 1), chunk(3, 2)], [3]),
        ([chunk(5, 4), chunk(6, 5)], [2]),
        ([chunk(1, None), chunk(9, None), chunk(10, 9)], [1, 2]),
        ([chunk(1, None), chunk(2, 1, group=1)], [1, 1]),
    ],
)
def test_a_daemon_never_takes_order_for_descent(chunks: list[Chunk], lengths: list[int]) -> None:
    split = list(runs(chunks))

    assert [len(run) for run in split] == lengths
    assert [c for run in split for c in run] == chunks


def test_a_parent_comes_before_its_child() -> None:
    """The second chunk of a prompt was seen to be offered first."""
    first, second = Chunk(key(1), 0, 64, 0, None), Chunk(key(2), 1, 64, 64, key(1))

    assert list(runs([second, first])) == [[first, second]]


def test_a_job_ends_once() -> None:
    jobs = Jobs()
    job = Job(1, (), is_load=True)
    jobs.begin(job)
    assert jobs.take() == []

    jobs.end(Ended(job, (), complete=True))
    jobs.end(Ended(job, (), complete=False))
    assert [(ended.job.number, ended.complete) for ended in jobs.take()] == [(1, True)]
    assert jobs.take() == []
    assert jobs.running == 0


def test_draining_waits_for_what_runs() -> None:
    jobs = Jobs()
    job = Job(1, (), is_load=False)
    jobs.begin(job)
    timer = threading.Timer(0.05, lambda: jobs.end(Ended(job, (), complete=True)))
    started = time.monotonic()
    timer.start()

    jobs.drain()
    assert time.monotonic() - started >= 0.05
    assert len(jobs.take()) == 1
    timer.join()


def test_what_nobody_will_work_on_has_failed() -> None:
    jobs = Jobs()
    for number in range(3):
        jobs.begin(Job(number, (), is_load=True))
    jobs.abandon()

    assert [(e.job.number, e.complete) for e in jobs.take()] == [(0, False), (1, False), (2, False)]


def test_one_result_is_waited_for_and_no_longer_than_was_said() -> None:
    jobs = Jobs()
    one, two = Job(1, (), is_load=True), Job(2, (), is_load=False)
    jobs.begin(one)
    jobs.begin(two)
    assert jobs.loading
    assert jobs.result(1, 0.01) is None
    timer = threading.Timer(0.05, lambda: jobs.end(Ended(one, (), complete=True)))
    timer.start()
    assert jobs.result(1, 60.0) == Ended(one, (), complete=True)
    timer.join()
    assert not jobs.loading
    jobs.end(Ended(two, (), complete=True))
    assert jobs.result(1, 0.0) is None  # it has been taken
    assert [ended.job.number for ended in jobs.take()] == [2]
