"""Group commit: how many transactions, in which order, and what failures do."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtcd.core.errors import StoreFailed, StoreFull
from kvtcd.core.keys import RecordKey
from kvtcd.engine.lanes import Lane
from kvtcd.engine.writer import DROP_ATTEMPTS, MAX_BYTES, MAX_RECORDS, Writer

pytestmark = pytest.mark.asyncio


class FakeEnvironment:
    """Notes every transaction; fails those that `broken` says."""

    quarantined = False

    def __init__(self, broken=lambda _puts, _drops: None) -> None:
        self.transactions: list[tuple[list, list]] = []
        self.threads: set[str] = set()
        self.broken, self.closed = broken, False

    def write(self, puts, drops) -> None:
        self.threads.add(threading.current_thread().name)
        error = self.broken(puts, drops)
        if error:
            raise error
        self.transactions.append((list(puts), list(drops)))

    def close(self) -> None:
        self.closed = True


def key(number: int) -> RecordKey:
    return RecordKey(bytes([number]) * 32)


async def test_writes_that_wait_share_a_transaction() -> None:
    environment = FakeEnvironment()
    writer = Writer(environment, Lane("disk"))
    await asyncio.gather(*(writer.put(n, 100) for n in range(20)), writer.drop(key(1)))
    await writer.close()

    assert [n for puts, _ in environment.transactions for n in puts] == list(range(20))
    assert max(len(puts) + len(drops) for puts, drops in environment.transactions) == MAX_RECORDS
    assert len(environment.transactions) == 3
    assert len(environment.threads) == 1
    assert environment.closed


async def test_a_transaction_is_bounded_in_bytes() -> None:
    environment = FakeEnvironment()
    writer = Writer(environment, Lane("disk"))
    await asyncio.gather(*(writer.put(n, MAX_BYTES // 2) for n in range(6)))
    await writer.close()

    assert [len(puts) for puts, _ in environment.transactions] == [2, 2, 2]


async def test_a_record_larger_than_a_transaction_goes_alone() -> None:
    environment = FakeEnvironment()
    writer = Writer(environment, Lane("disk"))
    sizes = [1, MAX_BYTES * 3, 1, 1]
    await asyncio.gather(*(writer.put(n, size) for n, size in enumerate(sizes)))
    await writer.close()

    assert [puts for puts, _ in environment.transactions] == [[0], [1], [2, 3]]


async def test_a_full_disk_fails_the_puts_and_still_drops(caplog) -> None:
    full = StoreFull("write", "ENOSPC", "/state/tenants/ab")
    environment = FakeEnvironment(lambda puts, _: full if puts else None)
    writer = Writer(environment, Lane("disk"))
    put, drop = await asyncio.gather(writer.put(1, 1), writer.drop(key(1)), return_exceptions=True)
    await writer.close()

    assert isinstance(put, StoreFull)
    (said,) = caplog.messages
    assert said.startswith("disk: disk write failed: ENOSPC: /state/tenants/ab: 1 records were not written ")
    assert said.endswith("1 removals are tried again; the disk tier holds less until there is room")
    assert drop is None
    assert environment.transactions == [([], [key(1)])]


async def test_a_failure_that_nobody_expects_is_told_and_the_next_write_goes_on() -> None:
    failures = iter([ZeroDivisionError("bug")] * (1 + DROP_ATTEMPTS))
    environment = FakeEnvironment(lambda _puts, _drops: next(failures, None))
    writer = Writer(environment, Lane("disk"))
    results = await asyncio.gather(writer.put(1, 1), writer.drop(key(1)), return_exceptions=True)
    await writer.put(2, 1)
    await writer.close()

    assert [type(result) for result in results] == [StoreFailed, StoreFailed]
    assert environment.transactions == [([2], [])]


async def test_a_drop_gets_a_second_chance() -> None:
    failures = iter([StoreFailed("write", "EIO"), StoreFailed("write", "EIO")])
    environment = FakeEnvironment(lambda _puts, _drops: next(failures, None))
    writer = Writer(environment, Lane("disk"))
    await writer.drop(key(1))
    await writer.close()

    assert environment.transactions == [([], [key(1)])]


async def test_a_drop_that_never_works_says_so() -> None:
    writer = Writer(FakeEnvironment(lambda _puts, _drops: StoreFailed("write", "EIO")), Lane("disk"))
    with pytest.raises(StoreFailed):
        await writer.drop(key(1))
    await writer.close()


async def test_what_waits_when_it_is_closed_is_written() -> None:
    environment = FakeEnvironment()
    writer = Writer(environment, Lane("disk"))
    waiting = [asyncio.create_task(writer.put(n, 1)) for n in range(3)]
    await asyncio.sleep(0)
    await writer.close()

    assert [task.done() for task in waiting] == [True] * 3
    assert environment.transactions == [([0, 1, 2], [])]
