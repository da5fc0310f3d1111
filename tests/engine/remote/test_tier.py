"""Hosts that share a store: a model of it in a dict, and what they believe of it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from support.fake_store import FakeStore
from support.invariants import check
from support.patience import PATIENCE_S
from support.shared import TENANT, fetch, filled, host, key, stats, store, tiers, until, written
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, patient, soon, toy_service

from kvtcd.core import record as records
from kvtcd.core.errors import NotFound
from kvtcd.core.keys import TenantKeys, chain
from kvtcd.core.messages import BlockHead
from kvtcd.core.notices import What
from kvtcd.core.place import Tier
from kvtcd.core.policy import DiskTier, Policy, Remote
from kvtcd.core.remote import names
from kvtcd.tiers.disk import Put

pytestmark = pytest.mark.asyncio


async def test_what_one_host_has_stored_another_finds_and_keeps(tmp_path) -> None:
    shared = FakeStore()
    await filled(tmp_path / "one", shared, range(5))
    async with host(tmp_path / "two", shared) as (two, ns):
        before = await tiers(two, ns, range(6))
        found = [await fetch(two, ns, number) for number in range(5)]
        after = await tiers(two, ns, range(6))
        await two.service.blocks.flush(ns, None, b"", soon())
        check(two.catalog)
    async with toy_service(tmp_path / "two") as alone:  # it has them on its own disk, and no store any more
        ns = alone.service.namespace(TENANT, "n")
        kept = [await fetch(alone, ns, number) for number in range(5)]

    assert before == [Tier.REMOTE] * 5 + [None]
    assert found == [(block(number), Tier.REMOTE) for number in range(5)]
    assert after == [Tier.HOST] * 5 + [None]
    assert [data for data, _ in kept] == [block(number) for number in range(5)]


@pytest.mark.parametrize("way", ["read", "prefetched"])
async def test_what_lay_on_disk_before_there_was_a_store_goes_there_when_it_is_needed(tmp_path, way) -> None:
    shared = FakeStore()
    async with toy_service(tmp_path / "one") as alone:
        ns = await alone.service.register(TENANT, "n", IDENTITY)
        await store(alone, ns, range(4))
        # so that nothing is hot, and the next start warms nothing
        await alone.service.blocks.demote(ns, [key(number) for number in range(4)], b"", soon())
    async with host(tmp_path / "one", shared) as (one, ns):
        writer = one.service._registry.tenants[TENANT].writer
        damaged = TenantKeys.derive(bytes(range(32)), TENANT).record_key(IDENTITY.digest, b"", key(3))
        envelope, blob = writer.environment.read(damaged)
        await writer.exclusive(lambda env: env.write([Put(damaged, envelope, bytes(blob)[:-1] + b"?")], []))
        if way == "read":
            found = [await fetch(one, ns, number) for number in (0, 1)]
            with pytest.raises(NotFound):
                await fetch(one, ns, 3)
        else:
            keys = [key(number) for number in (0, 1, 3)]
            await one.service.blocks.prefetch(ns, keys, b"", soon(), tier=Tier.HOST)
            found = []
        await written(one, 2)
        calls = shared.calls.copy()
        await one.service.blocks.demote(ns, [key(0), key(1)], b"", soon())
        found += [await fetch(one, ns, number) for number in (0, 1)]
        assert shared.calls == calls, "it is known to be there"
    async with host(tmp_path / "two", shared) as (two, ns):
        there = [(await tiers(two, ns, [number]))[0] for number in range(4)]

    assert [data for data, _ in found] == [block(number) for number in (0, 1)] * (len(found) // 2)
    assert there == [Tier.REMOTE, Tier.REMOTE, None, None]


async def test_a_read_is_counted_where_its_block_was(tmp_path) -> None:
    shared = FakeStore()
    await filled(tmp_path / "one", shared, [1, 2])
    async with host(tmp_path / "two", shared) as (two, ns):
        await fetch(two, ns, 1)
        await fetch(two, ns, 1)
        await two.service.blocks.prefetch(ns, [key(2)], b"", soon(), tier=Tier.HOST)
        await fetch(two, ns, 2)
        with pytest.raises(NotFound):
            await fetch(two, ns, 3)
        found = two.service.overview.stats(TENANT)
        text = two.service.metrics_text().decode()

    for counted, tiers_of in ((found, found.tiers), (found.own["n"], found.own["n"].tiers)):
        forms = [getattr(one, "forms", one) for one in tiers_of.values()]
        hits = sum(form.hits for one in forms for form in (one.raw, one.packed) if form)
        assert (counted.fetched, counted.misses, hits) == (1, 1, 2)
    assert 'kvtcd_gets_total{found="remote"} 1.0' in text


async def test_records_have_the_names_and_the_time_to_live_that_they_are_meant_to_have(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path, shared, settings=patient(ttl=77)) as (toy, ns):
        await store(toy, ns, [1])
        await written(toy, 1)
    keys = TenantKeys.derive(bytes(range(32)), TENANT)
    name = f"{keys.tag.hex()}/{IDENTITY.digest.hex()}/0/{keys.record_key(IDENTITY.digest, b'', key(1)).hex()}"

    assert shared.ttls == {name: 77}


async def test_a_match_by_tokens_goes_on_in_the_store(tmp_path) -> None:
    shared, tokens = FakeStore(), list(range(4 * BLOCK_TOKENS + 3))
    links = [*chain(IDENTITY.digest, tokens, BLOCK_TOKENS)]
    async with host(tmp_path / "one", shared) as (one, ns):
        async with one.service.blocks.batch(ns, b"", soon(), durable=True) as batch:
            for link in links:
                data = block(link.first, link.tokens)
                slot = await batch.reserve(
                    BlockHead(link.key, link.tokens, first_token=link.first), len(data)
                )
                slot.write(memoryview(data))
            await batch.commit()
        await written(one, 4)
        assert len(shared.records()) == 4, "only full blocks travel"
    async with host(tmp_path / "two", shared) as (two, ns):
        await two.service.prefixes.look(ns, b"", tokens=tokens)
        found = two.service.prefixes.match_tokens(ns, tokens, b"")
        async with two.service.blocks.read(ns, links[0].key, b"", soon()):
            pass
        await two.service.prefixes.look(ns, b"", tokens=tokens)
        later = two.service.prefixes.match_tokens(ns, tokens, b"")

    assert (found.prefix_tokens, set(found.tiers)) == (4 * BLOCK_TOKENS, {Tier.REMOTE})
    assert later.tiers == (Tier.HOST, *[Tier.REMOTE] * 3)
    assert len(later.here) == 1


async def test_a_thousand_readers_of_one_block_ask_the_store_once(tmp_path) -> None:
    shared = FakeStore()
    await filled(tmp_path / "one", shared, [1])
    async with host(tmp_path / "two", shared) as (two, ns):
        await tiers(two, ns, [1])
        shared.calls.clear()
        found = await asyncio.gather(*(fetch(two, ns, 1) for _ in range(1000)))

    assert {data for data, _ in found} == {block(1)}
    assert shared.calls["get"] == 1


async def test_a_block_that_came_is_checked_while_others_of_its_call_are_under_way(tmp_path) -> None:
    class Slow(FakeStore):
        async def get(self, names, most, came):
            there = [await super(Slow, self).get([name], most, came) for name in names[:-1]]
            if there:
                await self.last.wait()
            return [one for (one,) in there] + await super().get(names[-1:], most, came)

    shared = Slow()
    shared.last = asyncio.Event()
    await filled(tmp_path / "one", shared, range(3))
    keys = TenantKeys.derive(bytes(range(32)), TENANT)
    async with host(tmp_path / "two", shared) as (two, ns):
        fetching = asyncio.gather(*(fetch(two, ns, number) for number in range(3)))
        one, last = (keys.record_key(IDENTITY.digest, b"", key(number)) for number in (0, 2))
        await until(lambda: two.catalog.places(one))
        assert not two.catalog.places(last)
        shared.last.set()
        assert await fetching == [(block(number), Tier.REMOTE) for number in range(3)]


async def test_what_is_missing_is_asked_for_once_until_that_is_forgotten(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path, shared) as (toy, ns):
        for _ in range(3):
            assert await tiers(toy, ns, range(8)) == [None] * 8
            with pytest.raises(NotFound):
                await fetch(toy, ns, 1)
        assert shared.calls["exists"] == 1, "one call for all, and none after it"
        assert [name for name in shared.asked["get"] if not name.endswith(names.GENERATION)] == []


async def test_a_long_prefix_of_which_nothing_is_there_costs_a_few_names(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path, shared) as (toy, ns):
        await tiers(toy, ns, range(1000))

    assert len(shared.asked["exists"]) == 16


async def test_a_put_never_waits_for_the_store(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path, shared, close_s=0.1) as (toy, ns):
        shared.gate.clear()  # no call of it ever ends
        await store(toy, ns, range(10))
        assert [(await fetch(toy, ns, n))[0] for n in range(10)] == [block(n) for n in range(10)]
        assert stats(toy).queue_blocks == 10
        shared.gate.set()


async def test_a_queue_that_is_full_drops_and_counts(tmp_path) -> None:
    shared = FakeStore()
    shared.gate.clear()
    small = {"settings": patient(queue=4 * BLOCK_BYTES), "host": 200 * BLOCK_BYTES}
    async with host(tmp_path, shared, **small) as (toy, ns):
        await store(toy, ns, range(50))
        figures = stats(toy)
        shared.gate.set()
        await until(lambda: stats(toy).queue_blocks == 0)
        end = stats(toy)

    assert 0 < figures.queue_bytes <= 4 * BLOCK_BYTES
    assert figures.dropped == 50 - figures.queue_blocks > 0
    assert end.written == figures.queue_blocks


async def test_a_store_that_is_away_costs_nobody_anything_and_is_used_when_it_is_back(tmp_path) -> None:
    shared = FakeStore(down=True)
    async with host(tmp_path / "one", shared) as (one, ns):
        await store(one, ns, range(3))
        await until(lambda: stats(one).breaker != "closed")
        assert await tiers(one, ns, range(5)) == [Tier.HOST] * 3 + [None] * 2
        with pytest.raises(NotFound):
            await fetch(one, ns, 4)
        assert await tiers(one, ns, range(100, 105)) == [None] * 5
        shared.down = False
        await until(lambda: stats(one).breaker == "closed")
        await store(one, ns, range(10, 13))
        await until(lambda: len(shared.records()) >= 3)
    async with host(tmp_path / "two", shared) as (two, ns):
        assert (await fetch(two, ns, 10)) == (block(10), Tier.REMOTE)


async def test_a_node_that_is_away_costs_its_own_blocks_alone(tmp_path) -> None:
    shared = FakeStore()
    await filled(tmp_path / "one", shared, range(9))
    shared.lost = set(sorted(shared.records())[:3])
    async with host(tmp_path / "two", shared) as (two, ns):
        found = []
        for number in range(9):
            try:
                found.append((await fetch(two, ns, number))[0] == block(number))
            except NotFound:
                found.append(None)
        figures = stats(two)
        shared.lost = set()
        again = [(await fetch(two, ns, number))[0] == block(number) for number in range(9)]

    assert (found.count(True), found.count(None)) == (6, 3)
    assert (figures.hits, figures.failed) == (6, 3)
    assert again == [True] * 9, "what could not be asked for is not taken to be missing"


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("corrupted", "BadChecksum"),
        ("corrupted envelope", "BadChecksum"),
        ("truncated", "Truncated"),
        ("empty", "Truncated"),
        ("swapped", "WrongRecord"),
        ("foreign", "BadChecksum"),
        ("forged", "BadChecksum"),
        ("of a generation that was purged", "WrongRecord"),
        ("lengthened", "Truncated"),
        ("no record", "BadMagic"),
    ],
)
async def test_planted_objects_are_refused_counted_and_removed(tmp_path, what: str, error: str) -> None:
    shared = FakeStore()
    await filled(tmp_path / "one", shared, [1, 2])
    keys = TenantKeys.derive(bytes(range(32)), TENANT)
    mine, other = (
        names.record_name(keys, IDENTITY.digest, 0, keys.record_key(IDENTITY.digest, b"", key(n)))
        for n in (1, 2)
    )
    good = shared.values[mine]
    shared.values[mine] = planted(what, good, shared.values[other], keys)
    async with host(tmp_path / "two", shared) as (two, ns):
        with pytest.raises(NotFound):
            await fetch(two, ns, 1)
        text = two.service.metrics_text().decode()
        assert (await fetch(two, ns, 2)) == (block(2), Tier.REMOTE)
        await until(lambda: mine not in shared.values)
        await store(two, ns, [1])  # and a sound one takes its place
        await until(lambda: mine in shared.values)
        assert stats(two).refused == 1

    assert f'kvtcd_remote_refused_total{{error="{error}"}} 1.0' in text


def planted(what: str, good: bytes, other: bytes, keys: TenantKeys) -> bytes:
    sealed, blob = names.split(good)
    match what:
        case "corrupted":
            return good[:-7] + bytes([good[-7] ^ 1]) + good[-6:]
        case "corrupted envelope":
            return good[:60] + bytes([good[60] ^ 1]) + good[61:]
        case "truncated":
            return good[:-1]
        case "empty":
            return b"\0"
        case "lengthened":
            return good + b"\0"
        case "swapped":
            return other
        case "foreign":
            theirs = TenantKeys.derive(bytes(32), TENANT)
            return b"".join(names.parts(records.seal(theirs, records.parse(sealed)), blob))
        case "forged":
            return b"".join(names.parts(sealed[:-32] + bytes(32), blob))
        case "of a generation that was purged":
            envelope = records.parse(sealed)
            return b"".join(names.parts(records.seal(keys, replace(envelope, generation=7)), blob))
        case _:
            return b"".join(names.parts(b"x" * len(sealed), blob))


async def test_a_record_is_encrypted_before_it_leaves(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path / "one", shared, settings=patient(encrypt=True)) as (one, ns):
        await store(one, ns, [1])
        await written(one, 1)
    (value,) = (shared.values[name] for name in shared.records())
    sealed, blob = names.split(value)
    async with host(tmp_path / "two", shared) as (two, ns):
        found = await fetch(two, ns, 1)

    assert records.parse(sealed).nonce
    assert b"KVTB" not in bytes(blob), "no blob begins in it"
    assert found == (block(1), Tier.REMOTE)


async def test_a_policy_may_keep_blocks_out_and_not_look(tmp_path) -> None:
    shared = FakeStore()
    policy = Policy("mine", disk=DiskTier(), remote=Remote(write="none", read=False))
    await filled(tmp_path / "one", shared, [1])
    async with host(tmp_path / "two", shared, policy=policy) as (two, ns):
        assert await tiers(two, ns, [1]) == [None]
        with pytest.raises(NotFound):
            await fetch(two, ns, 1)
        await store(two, ns, [2])
    assert len(shared.records()) == 1


async def test_a_block_that_came_is_not_sent_back(tmp_path) -> None:
    shared = FakeStore()
    await filled(tmp_path / "one", shared, [1])
    async with host(tmp_path / "two", shared) as (two, ns):
        await fetch(two, ns, 1)
        await two.service.blocks.demote(ns, [key(1)], b"", soon())
        assert (await fetch(two, ns, 1))[1] is Tier.DISK
        figures = stats(two)

    assert (figures.written, figures.there, figures.queue_blocks) == (0, 0, 0)
    assert shared.calls["put"] == 1


async def test_two_hosts_that_store_the_same_send_it_once(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path / "one", shared) as (one, ns), host(tmp_path / "two", shared) as (two, other):
        await store(one, ns, range(4))
        await written(one, 4)
        await store(two, other, range(4))
        await written(two, 4)
        assert (stats(two).there, stats(two).written) == (4, 0)


async def test_what_continues_a_missing_block_is_sent_without_a_question(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path, shared) as (toy, ns):
        shared.gate.clear()
        await store(toy, ns, range(40), chained=True)
        shared.gate.set()
        await written(toy, 40)
    assert len(shared.records()) == 40
    assert len(shared.asked["exists"]) < 9


async def test_what_continues_a_block_that_is_there_is_sent_only_if_it_is_missing(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path / "one", shared) as (one, ns):
        await store(one, ns, range(5), chained=True)
        await written(one, 5)
    async with host(tmp_path / "two", shared) as (two, ns):
        shared.gate.clear()
        await store(two, ns, range(9), chained=True)
        shared.gate.set()
        await written(two, 9)
        assert (stats(two).there, stats(two).written) == (5, 4)


async def test_what_a_match_has_missed_is_sent_without_a_question(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path, shared) as (toy, ns):
        assert await tiers(toy, ns, range(9)) == [None] * 9
        await store(toy, ns, range(9))
        await written(toy, 9)
    assert (len(shared.records()), shared.calls["exists"]) == (9, 1)


async def test_a_prefetch_brings_blocks_from_the_store(tmp_path) -> None:
    shared = FakeStore()
    await filled(tmp_path / "one", shared, range(12))
    async with host(tmp_path / "two", shared) as (two, ns):
        results = await two.service.blocks.prefetch(ns, [key(n) for n in range(13)], b"", soon())
        assert [result.outcome for result in results] == ["stored"] * 12 + ["dropped"]
        assert await tiers(two, ns, range(12)) == [Tier.HOST] * 12


async def test_a_host_without_room_says_busy_or_miss_and_never_holds_half(tmp_path) -> None:
    shared = FakeStore()
    await filled(tmp_path / "one", shared, range(30))
    async with host(tmp_path / "two", shared, host=3 * BLOCK_BYTES) as (two, ns):
        for number in range(30):
            assert (await fetch(two, ns, number)) == (block(number), Tier.REMOTE)
            check(two.catalog)


async def test_listeners_are_told_of_what_the_store_has_and_of_what_came_from_it(tmp_path) -> None:
    shared = FakeStore()
    async with host(tmp_path / "one", shared) as (one, ns):
        with one.service.feeds.listen(TENANT, None, None) as listener:
            await store(one, ns, [1])
            await written(one, 1)
            notices = []
            while len(notices) < 3:
                notices += await listener.take(PATIENCE_S) or []
    moved = {notice.tier: notice for notice in notices if notice.what is What.MOVED}
    remote = moved[Tier.REMOTE]

    assert (notices[0].what, set(moved)) == (What.STORED, {Tier.DISK, Tier.REMOTE})
    assert (remote.key, remote.namespace, remote.tokens) == (key(1), "n", BLOCK_TOKENS)


async def test_listeners_are_told_that_a_deleted_block_is_in_the_store_no_more(tmp_path) -> None:
    shared = FakeStore()
    await filled(tmp_path / "one", shared, [1, 2])
    async with host(tmp_path / "two", shared) as (two, ns):
        await tiers(two, ns, [1, 2])
        with two.service.feeds.listen(TENANT, None, None) as listener:
            assert await two.service.blocks.delete(ns, [key(1), key(1), key(7)], b"") == 1
            (dropped,) = await listener.take(PATIENCE_S) or []

    assert (dropped.what, dropped.key, dropped.namespace) == (What.DROPPED, key(1), "n")
    assert (dropped.tier, dropped.reason, dropped.left) == (Tier.REMOTE, "deleted", ())


async def test_a_block_that_is_deleted_while_it_is_packed_does_not_come_back_from_the_store(tmp_path) -> None:
    shared, packing = FakeStore(), threading.Event()
    async with host(tmp_path, shared) as (toy, ns):
        codec = toy.codecs[0]
        analyze = codec.analyze

        def noted(*block, **options):
            packing.set()
            return analyze(*block, **options)

        codec.analyze = noted
        codec.gate.clear()
        async with toy.service.blocks.batch(ns, b"", soon()) as batch:
            slot = await batch.reserve(BlockHead(key(1), BLOCK_TOKENS, first_token=0), BLOCK_BYTES)
            slot.write(memoryview(block(1)))
            await batch.commit()
        await until(packing.is_set)
        deleting = asyncio.create_task(toy.service.blocks.delete(ns, [key(1)], b""))
        await until(lambda: shared.calls["delete"] > 0)
        codec.gate.set()
        await deleting
        await store(toy, ns, [2])
        await written(toy, 1)
        assert await tiers(toy, ns, [1]) == [None]

    assert len(shared.records()) == 1, "the other one alone, also once all that waited was written"


async def test_a_cancellation_that_a_library_swallows_does_not_keep_a_daemon_from_ending(tmp_path) -> None:
    class Deaf(FakeStore):
        deaf = True

        async def put(self, items):
            if not self.deaf:
                return await super().put(items)
            self.deaf, self.doomed = False, {name for name, _, _ in items}
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ConnectionError("its call has failed at the same moment") from None

    shared = Deaf()
    async with asyncio.timeout(PATIENCE_S), host(tmp_path, shared, close_s=0.1) as (toy, ns):
        await store(toy, ns, range(3))
        await until(lambda: not shared.deaf)

    assert shared.calls["close"] == 1
    assert not shared.doomed & {*shared.records()}, "nothing more was asked of the store"
