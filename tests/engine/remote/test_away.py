"""A store that is away, full, or refuses: what waits for it, what it is told again, what is said of it."""

from __future__ import annotations

import pytest
from support.fake_store import FakeStore
from support.shared import TENANT, fetch, host, key, stats, store, tiers, until, written
from support.toy import BLOCK_BYTES, IDENTITY, block, patient, soon

from kvtcd.core.errors import NotFound
from kvtcd.core.keys import TenantKeys
from kvtcd.core.place import Tier
from kvtcd.engine.remote import reminders, writing

pytestmark = pytest.mark.asyncio


class OutOfMemoryError(Exception):
    """As a Redis says it that is full."""


FULL = OutOfMemoryError("OOM command not allowed when used memory > 'maxmemory'.\nand more")


@pytest.fixture(autouse=True)
def brisk(monkeypatch) -> None:
    """Have what failed tried again soon."""
    monkeypatch.setattr(writing, "RESUME_S", 0.01)
    monkeypatch.setattr("kvtcd.core.remote.breaker.LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr("kvtcd.core.remote.breaker.FIRST_PAUSE_S", 0.05)


def record(number: int) -> str:
    """Return how the name of a record ends."""
    keys = TenantKeys.derive(bytes(range(32)), TENANT)
    return "/" + keys.record_key(IDENTITY.digest, b"", key(number)).hex()


async def test_what_waits_outlasts_a_store_that_is_away(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path, shared) as (toy, ns):
        await store(toy, ns, [0])
        await written(toy, 1)
        shared.down = True
        await store(toy, ns, range(1, 41))
        calls = shared.calls["exists"] + shared.calls["get"]
        await until(lambda: shared.calls["exists"] + shared.calls["get"] > calls + 12)
        assert stats(toy).queue_blocks == 40
        shared.down = False
        await written(toy, 41)
        assert (stats(toy).dropped, stats(toy).queue_blocks) == (0, 0)


async def test_blocks_of_a_node_that_is_away_wait_while_all_others_are_written(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path, shared) as (toy, ns):
        await store(toy, ns, range(9))
        await written(toy, 9)
        shared.lost = set(sorted(shared.records())[:4])
        shared.values.clear()
        toy.service._remote._presence.forget("")
        for number in range(9):
            await toy.service.blocks.demote(ns, [key(number)], b"", soon())
            await fetch(toy, ns, number)
        await until(lambda: len(shared.records()) == 5)
        seen = shared.calls["exists"]
        await until(lambda: shared.calls["exists"] > seen + 20)
        assert (stats(toy).dropped, stats(toy).queue_blocks) == (0, 4)
        shared.lost = set()
        await until(lambda: len(shared.records()) == 9)


async def test_a_block_that_no_call_survives_is_given_up_and_costs_no_other(tmp_path) -> None:
    shared = FakeStore(poison=record(3))
    async with host(tmp_path, shared) as (toy, ns):
        await store(toy, ns, range(40))
        await written(toy, 39)
        for number in range(100, 200):
            await store(toy, ns, [number])
            await written(toy, 39 + number - 99)
            if stats(toy).dropped:
                break
        assert (stats(toy).dropped, stats(toy).queue_blocks) == (1, 0)


async def test_what_is_refused_while_nothing_is_taken_is_not_given_up(tmp_path) -> None:
    shared = FakeStore(poison=record(1))
    async with host(tmp_path, shared, close_s=0.1) as (toy, ns):
        await store(toy, ns, [1])
        await until(lambda: shared.calls["put"] > 20)
        assert (stats(toy).dropped, stats(toy).queue_blocks) == (0, 1)


@pytest.mark.parametrize("kind", ["put", "exists"])
async def test_a_store_that_answers_with_errors_is_left_alone_and_said_to_refuse(
    tmp_path, kind: str, caplog
) -> None:
    shared = FakeStore()
    async with host(tmp_path, shared, close_s=0.1) as (toy, ns):
        await store(toy, ns, [0])
        await written(toy, 1)
        shared.refuses = {kind: FULL}
        await store(toy, ns, range(1, 100))
        fault = {"put": "remote-refuses", "exists": "remote-away"}[kind]
        await until(lambda: fault in toy.service.overview.degraded)
        assert stats(toy).queue_blocks == 99
        if kind == "put":
            assert (stats(toy).breaker, stats(toy).refusing > 4) == ("closed", True)
            assert await tiers(toy, ns, [0]) == [Tier.HOST], "reading goes on"
        told = [line.message for line in caplog.records if "OOM command not allowed" in line.message]
        text = toy.service.metrics_text().decode()
        shared.refuses = {}
        await written(toy, 100)
        await until(lambda: not toy.service.overview.degraded)
        assert stats(toy).refusing == 0

    assert f'kvtcd_remote_failures_total{{call="{kind}",cause="OutOfMemoryError"}}' in text
    assert [line for line in told if "failed: OutOfMemoryError" in line] == [
        f"the remote store: {kind} failed: OutOfMemoryError: {str(FULL).splitlines()[0]}"
    ], "once, in its own words, the first line of them"


async def test_a_block_in_use_is_offered_again_when_the_store_has_lost_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reminders, "AGAIN_S", 0.0)
    shared = FakeStore()
    async with host(tmp_path, shared, settings=patient(present_s=0.0, absent_s=0.0)) as (toy, ns):
        await store(toy, ns, range(3))
        await written(toy, 3)
        shared.values.clear()
        await fetch(toy, ns, 0)
        await until(lambda: len(shared.records()) == 1)
        await store(toy, ns, [1])  # a duplicate
        await until(lambda: len(shared.records()) == 2)
        with pytest.raises(NotFound):
            await fetch(toy, ns, 7)


async def test_what_found_the_queue_full_is_offered_again_when_it_is_used(tmp_path) -> None:
    shared = FakeStore()
    shared.gate.clear()
    small = patient(queue=4 * BLOCK_BYTES, absent_s=0.0)
    async with host(tmp_path, shared, settings=small) as (toy, ns):
        await store(toy, ns, range(50))
        assert stats(toy).dropped
        shared.gate.set()
        await until(lambda: stats(toy).queue_blocks == 0)
        assert len(shared.records()) < 50
        for number in range(50):
            assert (await fetch(toy, ns, number))[0] == block(number)
            # One after the other: all at once would find the queue full again.
            name = record(number)
            await until(lambda name=name: any(there.endswith(name) for there in shared.values))
        assert len(shared.records()) == 50
