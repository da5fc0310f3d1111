"""What a caller of a store hands on, however often it has to ask."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.fake_store import FakeStore

from kvtcd.core.errors import RemoteFailed
from kvtcd.core.remote.breaker import Breaker
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.remote.caller import ATTEMPTS, Caller
from kvtcd.engine.remote.figures import Figures

pytestmark = pytest.mark.asyncio


class Breaking(FakeStore):
    """Hands out some values, and then fails, a few times."""

    failures = 1

    async def get(self, names, most, came):
        if not self.failures:
            return await super().get(names, most, came)
        self.failures -= 1
        await super().get(names[: len(names) // 2], most, came)
        raise ConnectionError("the connection was lost")


def caller(store: FakeStore) -> Caller:
    return Caller(
        store, Breaker(time.monotonic, lambda: 0.0), Figures(Metrics()), timeout=60, luck=lambda: 0.0
    )


async def test_each_value_is_handed_out_once_although_the_store_was_asked_twice() -> None:
    store, told = Breaking({name: name.encode() for name in "abcd"}), []
    there = await caller(store).get([*"abcdx"], 9, lambda *value: told.append(value))

    assert there == [True] * 4 + [False]
    assert sorted(told) == [(name, name.encode()) for name in "abcd"]
    assert told[0] == ("a", b"a"), "as soon as it was here"


async def test_what_came_before_a_store_failed_for_good_was_handed_out() -> None:
    store, told = Breaking(dict.fromkeys("abcd", b"1")), []
    store.failures = ATTEMPTS
    with pytest.raises(RemoteFailed, match="the connection was lost"):
        await caller(store).get([*"abcd"], 9, lambda name, _: told.append(name))

    assert told == ["a", "b"]


async def test_one_value_is_there_or_not_or_cannot_be_asked_for() -> None:
    store = FakeStore({"a": b"1"})
    asked = caller(store)
    assert [await asked.value(name, 9) for name in "ab"] == [b"1", None]
    store.down = True
    with pytest.raises(RemoteFailed):
        await asked.value("a", 9)


class Slow(FakeStore):
    """Its link has room for one value within the time of a call."""

    under_way = 0

    async def get(self, names, most, came):
        self.under_way += len(names)
        try:
            if self.under_way > 1:
                await asyncio.Event().wait()  # without end
            await asyncio.sleep(0)
            return await super().get(names, most, came)
        finally:
            self.under_way -= len(names)


async def test_values_that_are_late_together_come_one_after_the_other() -> None:
    store, told = Slow({name: name.encode() for name in "abcdefgh"}), []
    asked = Caller(
        store, Breaker(time.monotonic, lambda: 0.0), Figures(Metrics()), timeout=0.5, luck=lambda: 0.0
    )
    batches = [asked.get(names, 9, lambda name, _: told.append(name)) for names in ("abc", "defx")]
    first = await asyncio.gather(*batches)
    later = await asked.get("gh", 9, lambda name, _: told.append(name))

    assert first == [[True] * 3, [True] * 3 + [False]]
    assert later == [True] * 2
    assert sorted(told) == [*"abcdefgh"]
    assert asked.breaker.opened == 0
