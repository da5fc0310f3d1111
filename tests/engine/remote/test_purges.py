"""What is purged or deleted on one host is gone on all; a store that was away is told until it has heard."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_store import FakeStore
from support.patience import PATIENCE_S
from support.shared import TENANT, fetch, filled, host, key, stats, store, tiers, until, written
from support.toy import IDENTITY, block, soon, toy_service

from kvtcd.admin import rekey
from kvtcd.core.errors import NotFound
from kvtcd.core.keys import TenantKeys
from kvtcd.core.place import Tier
from kvtcd.core.remote import names
from kvtcd.engine.remote import generations, purges

pytestmark = pytest.mark.asyncio
KEYS = TenantKeys.derive(bytes(range(32)), TENANT)
SPACE = names.prefix(KEYS, IDENTITY.digest)


class Full(FakeStore):
    """Takes so many values, as a Redis that may not evict."""

    most = 1 << 30

    async def put(self, items):
        if len(self.values) >= self.most:
            return [MemoryError("OOM command not allowed")] * len(items)
        return await super().put(items)


@pytest.fixture
def fresh(monkeypatch):
    """Have generations read again at every look."""
    monkeypatch.setattr(generations, "FRESH_S", 0.2)
    monkeypatch.setattr(generations, "_LOOK_S", 0.05)
    monkeypatch.setattr(purges, "FRESH_S", 0.2)


@pytest.mark.usefixtures("fresh")
async def test_a_purge_empties_the_store_and_every_other_host(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path / "one", shared) as (one, ns), host(tmp_path / "two", shared) as (two, other):
        await store(one, ns, range(4))
        await written(one, 4)
        assert (await fetch(two, other, 1))[1] is Tier.REMOTE
        await store(two, other, [10])
        await written(two, 1)
        removed = await one.service.purge(TENANT, "n")
        left = [name for name in shared.values if name.startswith(SPACE)]
        await until(lambda: not two.catalog.blocks(other.number) and not two.service._registry.closing)
        with pytest.raises(NotFound):
            await fetch(two, other, 1)
        await store(two, other, [1])  # it is served and taken again
        assert (await fetch(two, other, 1))[0] == block(1)
        again = await one.service.register(TENANT, "n", IDENTITY)
        await until(lambda: len(shared.records()) == 1)
        assert (await fetch(one, again, 1)) == (block(1), Tier.REMOTE), "what comes later is shared as before"

    assert (removed.removed, removed.remote, removed.others_s) == (4, "done", 30.0)
    assert left == [names.generation_name(KEYS, IDENTITY.digest)]


async def test_a_host_that_was_away_during_a_purge_drops_its_blocks_when_it_is_back(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path / "two", shared) as (two, ns):
        await store(two, ns, range(3))
        await written(two, 3)
    async with host(tmp_path / "one", shared) as (one, _):
        assert (await one.service.purge(TENANT, "n")).remote == "done"
    async with host(tmp_path / "two", shared) as (two, ns):
        await until(lambda: not two.catalog.blocks(ns.number) and not two.service._registry.closing)
        assert await tiers(two, ns, range(3)) == [None] * 3
    async with toy_service(tmp_path / "two") as two:
        assert not two.catalog.blocks(two.service.namespace(TENANT, "n").number), "also after a restart"


async def test_a_purge_while_the_store_is_away_says_so_and_outlives_the_daemon(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kvtcd.engine.remote.tier.PURGE_S", 0.05)
    shared = FakeStore()
    async with host(tmp_path / "one", shared) as (one, ns):
        await store(one, ns, range(3))
        await written(one, 3)
        shared.down = True
        removed = await one.service.purge(TENANT, "n")
        assert (removed.removed, removed.remote) == (3, "pending")
        again = await one.service.register(TENANT, "n", IDENTITY)
        shared.down = False  # a read that gets through before the purge does must not find what was purged
        assert await tiers(one, again, range(3)) == [None] * 3
        shared.down = True
    assert len(shared.records()) == 3
    shared.down = False
    async with host(tmp_path / "one", shared) as (one, ns):
        await until(lambda: not shared.records())
        assert await tiers(one, ns, range(3)) == [None] * 3
        assert stats(one).pending == 1, (
            "it is swept once more, when nobody can write under the old number any more"
        )


@pytest.mark.usefixtures("fresh")
async def test_what_late_writers_leave_is_swept(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path, shared) as (toy, ns):
        await store(toy, ns, [1])
        await written(toy, 1)
        (old,) = shared.records()
        value = shared.values[old]
        await toy.service.purge(TENANT, "n")
        shared.values[old] = value  # by a host that has not read the new number
        await until(lambda: stats(toy).pending == 0)
        assert old not in shared.values


async def test_a_node_that_is_away_keeps_a_purge_pending(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kvtcd.engine.remote.tier.PURGE_S", 0.05)
    shared = FakeStore()
    async with host(tmp_path, shared) as (toy, ns):
        await store(toy, ns, range(3))
        await written(toy, 3)
        shared.lost = {shared.records()[0]}
        assert (await toy.service.purge(TENANT, "n")).remote == "pending"
        shared.lost = set()
        await until(lambda: not shared.records())


async def test_a_deleted_block_leaves_the_store_and_does_not_come_back(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path / "one", shared) as (one, ns):
        await store(one, ns, range(3))
        await written(one, 3)
        assert await one.service.blocks.delete(ns, [key(1)], b"") == 1
        assert await tiers(one, ns, range(3)) == [Tier.HOST, None, Tier.HOST]
        with pytest.raises(NotFound):
            await fetch(one, ns, 1)
    assert len(shared.records()) == 2


async def test_a_block_that_only_the_store_has_can_be_deleted(tmp_path) -> None:
    shared = FakeStore()
    await filled(tmp_path / "one", shared, [1])
    async with host(tmp_path / "two", shared) as (two, ns):
        assert await tiers(two, ns, [1]) == [Tier.REMOTE]
        assert await two.service.blocks.delete(ns, [key(1)], b"") == 1
        assert await two.service.blocks.delete(ns, [key(1)], b"") == 0
    assert not shared.records()


async def test_a_delete_while_the_store_is_away_is_done_later_even_after_a_restart(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path / "one", shared) as (one, ns):
        await store(one, ns, range(2))
        await written(one, 2)
        shared.down = True
        assert await one.service.blocks.delete(ns, [key(1)], b"") == 1
        shared.lost, shared.down = set(shared.records()), False
        with pytest.raises(NotFound):
            await fetch(one, ns, 1)
    shared.lost = set()
    async with host(tmp_path / "one", shared) as (one, ns):
        await until(lambda: len(shared.records()) == 1)
        kept, gone = await tiers(one, ns, range(2))
        assert (kept is not None, gone) == (True, None)


async def test_a_block_that_is_deleted_while_it_is_sent_is_gone_in_the_end(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path, shared) as (toy, ns):
        await tiers(toy, ns, [5])  # the generation is known
        shared.gate.clear()
        await store(toy, ns, [1])
        await until(lambda: shared.calls["exists"] == 2)
        deleting = asyncio.create_task(toy.service.blocks.delete(ns, [key(1)], b""))
        await asyncio.sleep(0)
        shared.gate.set()
        assert await deleting == 1
        await until(lambda: stats(toy).queue_blocks == 0)
        await asyncio.sleep(0.1)
        assert not shared.records()


@pytest.mark.parametrize("planted", ["forged", "of another namespace", "none at all"])
@pytest.mark.usefixtures("fresh")
async def test_a_generation_that_is_not_ours_is_as_good_as_lost(tmp_path, planted: str, caplog) -> None:
    """Who can write to the store can do no more by planting one than by removing it."""
    shared = FakeStore()
    await filled(tmp_path / "one", shared, range(2))
    before = dict(shared.values)
    value = {
        "forged": names.state_generation(TenantKeys.derive(bytes(32), TENANT), IDENTITY.digest, 9),
        "of another namespace": names.state_generation(KEYS, bytes(32), 9),
        "none at all": b"9",
    }[planted]
    name = names.generation_name(KEYS, IDENTITY.digest)
    async with host(tmp_path / "one", shared) as (one, _):
        assert (await one.service.purge(TENANT, "n")).remote == "done"
        ns = await one.service.register(TENANT, "n", IDENTITY)
        await store(one, ns, [5])
        await written(one, 1)
        said = shared.values[name]
        async with asyncio.timeout(PATIENCE_S):
            while not stats(one).refused:  # a look from before the purge writes over it unseen
                shared.values[name] = value
                await until(lambda: shared.values[name] == said)
        assert stats(one).refused == 1
        assert (await fetch(one, ns, 5))[0] == block(5), "nothing of its own is purged"
        shared.values |= {name: value for name, value in before.items() if name not in shared.values}
    async with host(tmp_path / "two", shared) as (two, ns):
        assert [await tiers(two, ns, [n]) for n in (0, 1, 5)] == [[None], [None], [Tier.REMOTE]]

    assert "is refused, and replaced by the one that is known here" in caplog.text


async def test_a_store_that_is_full_can_be_purged(tmp_path) -> None:
    shared = Full()
    async with host(tmp_path, shared) as (toy, ns):
        await store(toy, ns, range(3))
        await written(toy, 3)
        shared.most = 3
        assert (await toy.service.purge(TENANT, "n")).remote == "done"

    assert [*shared.values] == [names.generation_name(KEYS, IDENTITY.digest)]


async def test_a_store_that_has_lost_the_generation_is_told_it_again(tmp_path) -> None:
    shared = FakeStore()
    name = names.generation_name(KEYS, IDENTITY.digest)
    async with host(tmp_path, shared) as (toy, _):
        await toy.service.purge(TENANT, "n")
        said = shared.values[name]
    shared.values.clear()
    async with host(tmp_path, shared) as (toy, _):
        await until(lambda: shared.values.get(name) == said)


async def test_flush_and_restart_go_on_without_the_store(tmp_path) -> None:
    shared = FakeStore(down=True)
    async with host(tmp_path, shared) as (toy, ns):
        await store(toy, ns, range(3))
        await toy.service.blocks.flush(ns, None, b"", soon())
    async with host(tmp_path, shared) as (toy, ns):
        assert [(await fetch(toy, ns, n))[0] for n in range(3)] == [block(n) for n in range(3)]


@pytest.mark.usefixtures("fresh")
async def test_a_purge_that_is_pending_reaches_the_store_under_the_old_names_after_a_rekey(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("kvtcd.engine.remote.tier.PURGE_S", 0.05)
    shared = FakeStore()
    async with host(tmp_path / "one", shared) as (one, ns):
        await store(one, ns, range(3))
        await written(one, 3)
        shared.down = True
        assert (await one.service.purge(TENANT, "n")).remote == "pending"
    shared.down = False
    before = (tmp_path / "one" / "master.key").read_bytes()
    await asyncio.to_thread(rekey.command, tmp_path / "one", old=None, new=None)
    assert (tmp_path / "one" / "master.key").read_bytes() != before
    async with host(tmp_path / "one", shared) as (one, ns):
        await until(lambda: not [name for name in shared.records() if name.startswith(SPACE)])
        said = shared.values[names.generation_name(KEYS, IDENTITY.digest)]
        await until(lambda: stats(one).pending == 0)
        await store(one, ns, [1])
        await until(lambda: len(shared.records()) == 1)
    async with host(tmp_path / "two", shared) as (two, other):  # under the old key still
        assert await tiers(two, other, range(3)) == [None] * 3
        assert two.service._remote._generations.ledger.of(TENANT, IDENTITY.digest).generation == (
            names.stated_generation(KEYS, IDENTITY.digest, said)
        )
