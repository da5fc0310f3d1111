"""The service without HTTP, on a real disk tier and a toy codec."""

from __future__ import annotations

import asyncio
import os
import random
import re
from dataclasses import replace
from itertools import count

import pytest
from support.invariants import check
from support.patience import PATIENCE_S
from support.records import keys_in
from support.toy import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    IDENTITY,
    LAYOUT,
    ToyCodec,
    ToyPacked,
    block,
    soon,
    toy_service,
)

from kvtcd.core import blob as blobs
from kvtcd.core.errors import (
    BlockMismatch,
    Busy,
    DeadlineExceeded,
    IdentityConflict,
    NotFound,
    StoreFailed,
    StoreFull,
    UnknownNamespace,
    UnknownProfile,
)
from kvtcd.core.keys import EngineKey, chain
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import Tier
from kvtcd.core.policy import CodecChoice, DiskTier, Evict, HostTier, Policy
from kvtcd.engine import recovery
from kvtcd.tiers.disk import Put
from kvtcd.tiers.disk import environment as environments

pytestmark = pytest.mark.asyncio
TENANT = "uid:1"


def key(number: int) -> EngineKey:
    return EngineKey(number.to_bytes(32, "big"))


async def store(service, ns, items, *, salt=b"", durable=False, deadline=None):
    """Store {key: bytes} as independent blocks."""
    async with service.blocks.batch(ns, salt, deadline or soon(), durable=durable) as batch:
        for number, data in items.items():
            tokens = len(data) // LAYOUT.token_bytes
            slot = await batch.reserve(BlockHead(key(number), tokens, first_token=0), len(data))
            if slot is not None:
                slot.write(memoryview(data))
        return await batch.commit()


async def fetch(service, ns, number, *, salt=b"") -> bytes:
    async with service.blocks.read(ns, key(number), salt, soon()) as lease:
        return b"".join(bytes(p) for p in lease.pieces())


async def test_a_block_comes_back_from_host_and_from_disk(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        results = await store(toy.service, ns, {1: block(1)}, durable=True)
        from_host = await fetch(toy.service, ns, 1)
        await toy.service.blocks.demote(ns, [key(1)], b"", soon())
        on_disk = toy.service.prefixes.match(ns, [key(1)], b"").blocks
        from_disk = await fetch(toy.service, ns, 1)

    assert [(r.key, r.outcome) for r in results] == [(key(1), "stored")]
    assert from_host == from_disk == block(1)
    assert (on_disk[0].tier, on_disk[0].tokens) == (Tier.DISK, BLOCK_TOKENS)


async def test_blocks_and_namespaces_survive_a_restart(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, {i: block(i) for i in range(5)})
    async with toy_service(tmp_path) as toy:
        ns = toy.service.namespace(TENANT, "n")
        assert ns.identity == IDENTITY
        assert [await fetch(toy.service, ns, i) for i in range(5)] == [block(i) for i in range(5)]
        check(toy.catalog)


async def test_an_undurable_stop_loses_blocks_but_never_bytes(tmp_path) -> None:
    policy = Policy("none", disk=DiskTier(write="evict"), flush="none")
    async with toy_service(tmp_path, policy=policy) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, {1: block(1)})
        await store(toy.service, ns, {2: block(2)}, durable=True)
    async with toy_service(tmp_path, policy=policy) as toy:
        ns = toy.service.namespace(TENANT, "n")
        with pytest.raises(NotFound):
            await fetch(toy.service, ns, 1)
        assert await fetch(toy.service, ns, 2) == block(2)


async def test_a_host_that_is_too_small_moves_the_coldest_down(tmp_path) -> None:
    policy = Policy("evict", host=HostTier(high=1.0, low=0.8), disk=DiskTier(write="evict"))
    async with toy_service(tmp_path, host=5 * BLOCK_BYTES, policy=policy) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        for i in range(20):
            results = await store(toy.service, ns, {i: block(i)})
            assert results[0].outcome == "stored"
            check(toy.catalog)
        assert [await fetch(toy.service, ns, i) for i in range(20)] == [block(i) for i in range(20)]
        check(toy.catalog)


async def test_a_batch_larger_than_the_host_is_stored_all_the_same(tmp_path) -> None:
    async with toy_service(tmp_path, host=3 * BLOCK_BYTES) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        results = await store(toy.service, ns, {i: block(i) for i in range(10)})
        assert [r.outcome for r in results] == ["stored"] * 10
        assert [await fetch(toy.service, ns, i) for i in range(10)] == [block(i) for i in range(10)]


async def test_what_follows_a_block_is_known_when_it_is_packed(tmp_path) -> None:
    tokens = list(range(4 * BLOCK_TOKENS + 3))
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        async with toy.service.blocks.batch(ns, b"", soon(), durable=True) as batch:
            for number, link in enumerate(chain(ns.digest, tokens, BLOCK_TOKENS)):
                data = block(number, link.tokens)
                slot = await batch.reserve(BlockHead(link.key, link.tokens, link.first), len(data))
                slot.write(memoryview(data))
            await batch.commit()
        (codec,) = toy.codecs
    afters = [codec.afters[block(n, BLOCK_TOKENS if n < 4 else 3)] for n in range(5)]
    assert afters == [3 * 16 + 3, 2 * 16 + 3, 16 + 3, 3, 0]


async def test_a_match_of_tokens_ends_with_a_partial_block(tmp_path) -> None:
    tokens = list(range(100, 100 + 2 * BLOCK_TOKENS + 5))

    async def put(service, ns, sequence, supersedes=None):
        links = list(chain(ns.digest, sequence, BLOCK_TOKENS))
        async with service.blocks.batch(ns, b"", soon(), durable=True) as batch:
            for link in links:
                data = block(link.tokens, link.tokens)
                head = BlockHead(link.key, link.tokens, link.first, link.parent, supersedes)
                slot = await batch.reserve(head, len(data))
                if slot is not None:
                    slot.write(memoryview(data))
            await batch.commit()
        return links

    async with toy_service(tmp_path) as toy:
        service = toy.service
        ns = await service.register(TENANT, "n", IDENTITY)
        links = await put(service, ns, tokens)
        longer = service.prefixes.match_tokens(ns, [*tokens, 7, 8, 9], b"").blocks
        same = service.prefixes.match_tokens(ns, tokens, b"").blocks
        diverging = service.prefixes.match_tokens(ns, [*tokens[:-1], 0, 0], b"").blocks
        short = await put(service, ns, [1, 2, 3])
        of_short = service.prefixes.match_tokens(ns, [1, 2, 3, 4], b"").blocks
        grown = [*tokens, *range(11)]
        full = await put(service, ns, grown, supersedes=links[-1].key)
        superseded = service.prefixes.match(ns, [links[-1].key], b"").blocks

    assert [m.key for m in longer] == [m.key for m in same] == [link.key for link in links]
    assert [m.tokens for m in longer] == [16, 16, 5]
    assert [m.tokens for m in diverging] == [16, 16]
    assert [m.key for m in of_short] == [short[0].key]
    assert superseded[0].tier is None, "the full block takes the place of its partial sibling"
    assert full[2].tokens == BLOCK_TOKENS


async def test_a_damaged_record_is_a_miss_and_is_forgotten(tmp_path, caplog) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, {1: block(1), 2: block(2)})
        await toy.service.blocks.demote(ns, [key(1), key(2)], b"", soon())
        tenant = toy.service._registry.tenants[TENANT]
        records = {k: tenant.writer.environment.read(k) for k in keys_in(tenant.writer.environment)}
        (a, (envelope_a, blob_a)), (b, _) = records.items()

        blob_a[len(blob_a) // 2] ^= 1
        await tenant.writer.exclusive(lambda env: env.write([Put(a, envelope_a, blob_a)], []))
        await tenant.writer.exclusive(lambda env: env.write([Put(b, envelope_a, blob_a)], []))
        for number in (1, 2):
            with pytest.raises(NotFound):
                await fetch(toy.service, ns, number)
        gone = toy.service.prefixes.match(ns, [key(1), key(2)], b"").blocks
        text = toy.service.metrics_text().decode()
        stored = await store(toy.service, ns, {1: block(1)}, durable=True)
        check(toy.catalog)

    assert [m.tier for m in gone] == [None, None]
    assert 'kvtcd_damaged_records_total{error="BadChecksum"} 1.0' in text
    assert 'kvtcd_damaged_records_total{error="WrongRecord"} 1.0' in text
    assert stored[0].outcome == "stored"
    for record, where in ((a, "BadChecksum"), (b, "WrongRecord")):
        named = (
            f"record {record[:6].hex()} of namespace n, tenant {TENANT}: the move from disk to host failed"
        )
        assert len([line for line in caplog.messages if line.startswith(named)]) == 1, where
    secrets = [tenant.keys.record, tenant.keys.mac, (tmp_path / "master.key").read_bytes()]
    assert not [secret for secret in secrets if secret[:6].hex() in caplog.text]


async def test_what_is_damaged_at_a_start_is_named_with_its_namespace_and_tenant(tmp_path, caplog) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, {n: block(n) for n in range(recovery.SHOWN + 5)}, durable=True)
        writer = toy.service._registry.tenants[TENANT].writer
        records = {k: writer.environment.read(k) for k in keys_in(writer.environment)}
        whole = records.pop(next(iter(records)))
        puts = [Put(k, envelope[: len(envelope) // 2], blob) for k, (envelope, blob) in records.items()]
        await writer.exclusive(lambda env: env.write(puts, []))
    async with toy_service(tmp_path) as toy:
        assert len(keys_in(toy.service._registry.tenants[TENANT].writer.environment)) == 1

    assert whole
    told = [line for line in caplog.messages if line.startswith("damaged record ")]
    assert {line.split()[2] for line in told} <= {record[:6].hex() for record in records}
    assert len(told) == recovery.SHOWN
    assert all(f"of an unknown namespace, tenant {TENANT}: " in line for line in told)
    assert f"4 more damaged records of tenant {TENANT}" in caplog.messages


async def test_a_namespace_that_is_purged_during_a_reload_is_not_governed_again(
    tmp_path, monkeypatch
) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        chooser, begun, go_on = toy.service._tenancy._chooser, asyncio.Event(), asyncio.Event()
        codec = chooser.first

        async def slow(*args):
            begun.set()
            await go_on.wait()
            return await codec(*args)

        monkeypatch.setattr(chooser, "first", slow)
        reloading = asyncio.create_task(toy.service.reload((Policy("x", codec=CodecChoice("lossless")),)))
        await begun.wait()
        await toy.service.purge(TENANT, "n")
        go_on.set()
        await reloading
        assert ns.number not in toy.catalog.residents.rules


async def test_a_block_without_its_profile_is_forgotten_and_stored_anew(tmp_path) -> None:
    def missing(_blob, _scratch) -> None:
        raise UnknownProfile(bytes(32))

    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, {1: block(1)})
        await toy.service.blocks.demote(ns, [key(1)], b"", soon())
        toy.codecs[0].inflate = missing
        with pytest.raises(NotFound):
            await fetch(toy.service, ns, 1)
        gone = toy.service.prefixes.match(ns, [key(1)], b"").blocks
        del toy.codecs[0].inflate
        again = await store(toy.service, ns, {1: block(1)}, durable=True)
        check(toy.catalog)

    assert gone[0].tier is None
    assert again[0].outcome == "stored"


async def test_what_was_set_aside_as_damaged_is_kept(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, {1: block(1)}, durable=True)
    (data,) = tmp_path.rglob("data.mdb")
    os.truncate(data, data.stat().st_size // 2)
    async with toy_service(tmp_path) as toy:
        assert toy.service.namespaces(TENANT) == []
        kept = list(tmp_path.rglob("*.bad-*"))
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        stored = await store(toy.service, ns, {1: block(1)}, durable=True)

    assert len(kept) == 1
    assert stored[0].outcome == "stored"


async def test_a_tenant_whose_files_cannot_be_opened_does_not_stop_the_others(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        for tenant in ("uid:1", "uid:2"):
            ns = await toy.service.register(tenant, "n", IDENTITY)
            await store(toy.service, ns, {1: block(1)}, durable=True)
        broken = toy.service._registry.tenants["uid:2"].keys.tag.hex()
    (data,) = (tmp_path / "tenants" / broken).rglob("data.mdb")
    data.unlink()
    data.mkdir()
    async with toy_service(tmp_path) as toy:
        ns = toy.service.namespace("uid:1", "n")
        assert await fetch(toy.service, ns, 1) == block(1)
        with pytest.raises(StoreFailed):
            await toy.service.register("uid:2", "n", IDENTITY)
        text = toy.service.metrics_text().decode()

    assert 'kvtcd_internal_errors_total{where="open"} 1.0' in text


async def test_tenants_never_meet(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ours = await toy.service.register("uid:1", "n", IDENTITY)
        theirs = await toy.service.register("uid:2", "n", IDENTITY)
        await store(toy.service, ours, {1: block(1)}, durable=True)
        await store(toy.service, ours, {2: block(2)}, salt=b"s", durable=True)
        assert toy.service.prefixes.match(theirs, [key(1)], b"").blocks[0].tier is None
        assert toy.service.prefixes.match(ours, [key(2)], b"").blocks[0].tier is None
        assert toy.service.prefixes.match(ours, [key(2)], b"s").blocks[0].tier is Tier.HOST
        with pytest.raises(NotFound):
            await fetch(toy.service, theirs, 1)
        with pytest.raises(UnknownNamespace):
            toy.service.namespace("uid:3", "n")
        with pytest.raises(UnknownNamespace, match=r"is not registered: there is nothing to remove$"):
            await toy.service.purge("uid:3", "n")


async def test_a_purge_leaves_no_byte_and_spares_the_neighbours(tmp_path) -> None:
    marker = b"purge-me" * (BLOCK_BYTES // 8)
    async with toy_service(tmp_path) as toy:
        one = await toy.service.register(TENANT, "one", IDENTITY)
        two = await toy.service.register(TENANT, "two", replace(IDENTITY, model="other"))
        toy.codecs[0].encode = _stored
        await store(toy.service, one, {1: marker}, durable=True)
        await store(toy.service, two, {1: block(1)}, durable=True)
        assert any(marker[:64] in p.read_bytes() for p in tmp_path.rglob("data.mdb"))
        removed = await toy.service.purge(TENANT, "one")
        left = [p for p in tmp_path.rglob("*") if p.is_file() and marker[:64] in p.read_bytes()]
        with pytest.raises(UnknownNamespace):
            toy.service.namespace(TENANT, "one")
        with pytest.raises(UnknownNamespace):
            await store(toy.service, one, {1: marker})
        assert await fetch(toy.service, two, 1) == block(1)
    assert (removed.removed, left) == (1, [])


def _stored(raw, *, tokens, first_token, after):  # noqa: ARG001 - the signature of a codec
    header = blobs.Header(
        blobs.CodecId.LOSSLESS, 1, LAYOUT.dtype, LAYOUT.digest, tokens, len(raw), first_token
    )
    run = blobs.Run(blobs.Kind.RAW, 255, 0, 0, tokens, len(raw), data=bytes(raw))
    return ToyPacked(blobs.assemble(header, [run]))


async def test_a_purge_on_a_full_device_is_done_and_what_had_to_go_is_a_clean_miss(
    tmp_path, monkeypatch
) -> None:
    marker = b"purge-me" * (BLOCK_BYTES // 8)
    real = environments.copied

    def full(*_) -> None:
        raise StoreFull("write", "ENOSPC")

    async with toy_service(tmp_path) as toy:
        one = await toy.service.register(TENANT, "one", IDENTITY)
        two = await toy.service.register(TENANT, "two", replace(IDENTITY, model="other"))
        other = await toy.service.register("uid:2", "two", IDENTITY)
        toy.codecs[0].encode = _stored
        await store(toy.service, one, {1: marker}, durable=True)
        await store(toy.service, two, {1: block(1), 2: block(2)}, durable=True)
        await store(toy.service, other, {1: block(1)}, durable=True)
        await toy.service.blocks.demote(two, [key(1)], b"", soon())
        environment = toy.service._registry.tenants[TENANT].writer.environment
        with monkeypatch.context() as device:
            device.setattr(environments, "copied", full)
            device.setattr(environment, "write", full)
            removed = await toy.service.purge(TENANT, "one")
            left = [p for p in tmp_path.rglob("*") if p.is_file() and marker[:64] in p.read_bytes()]
        assert environments.copied is real
        await toy.service._driver.idle()
        tiers = [b.tier for b in toy.service.prefixes.match(two, [key(1), key(2)], b"").blocks]
        with pytest.raises(NotFound):
            await fetch(toy.service, two, 1)
        assert await fetch(toy.service, two, 2) == block(2), "what was raw in memory too stays there"
        assert await fetch(toy.service, other, 1) == block(1)
        again = await store(toy.service, two, {1: block(1)}, durable=True)
        text = toy.service.metrics_text().decode()
        check(toy.catalog)
    async with toy_service(tmp_path) as toy:
        two = toy.service.namespace(TENANT, "two")
        assert await fetch(toy.service, two, 1) == block(1)
        with pytest.raises(UnknownNamespace):
            toy.service.namespace(TENANT, "one")

    assert (removed.removed, left, tiers) == (1, [], [None, Tier.HOST])
    assert again[0].outcome == "stored"
    for counter in ("damaged_records", "internal_errors"):
        assert set(re.findall(rf"^kvtcd_{counter}_total{{.*}} (.*)$", text, re.MULTILINE)) == {"0.0"}


async def test_a_name_belongs_to_one_identity(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        first = await toy.service.register(TENANT, "n", IDENTITY)
        again = await toy.service.register(TENANT, "n", IDENTITY)
        with pytest.raises(IdentityConflict, match="differs in weights"):
            await toy.service.register(TENANT, "n", replace(IDENTITY, weights="cd" * 32))
        with pytest.raises(IdentityConflict, match="already registered as namespace 'n'"):
            await toy.service.register(TENANT, "m", IDENTITY)
    assert first is again


@pytest.mark.parametrize(
    ("tokens", "nbytes"), [(0, 0), (BLOCK_TOKENS, BLOCK_BYTES - 1), (BLOCK_TOKENS + 1, LAYOUT.nbytes(17))]
)
async def test_a_block_of_another_shape_is_refused(tmp_path, tokens, nbytes) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        async with toy.service.blocks.batch(ns, b"", soon()) as batch:
            with pytest.raises(BlockMismatch):
                await batch.reserve(BlockHead(key(1), tokens), nbytes)


async def test_an_abandoned_batch_gives_its_room_back(tmp_path) -> None:
    async with toy_service(tmp_path, disk=0) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        for _ in range(100):
            async with toy.service.blocks.batch(ns, b"", soon()) as batch:
                slot = await batch.reserve(BlockHead(key(1), BLOCK_TOKENS), BLOCK_BYTES)
                slot.write(memoryview(block(1)[:100]))
        assert len(toy.catalog.residents.entries) == 0
        assert toy.catalog.residents.shelves[Tier.HOST].whole.used == 0
        with pytest.raises(NotFound):
            await fetch(toy.service, ns, 1)


async def test_a_put_without_room_is_refused_in_time(tmp_path) -> None:
    policy = Policy("lru", evict=Evict("lru"))  # every newcomer is worth it
    async with toy_service(tmp_path, host=2 * BLOCK_BYTES, disk=0, policy=policy) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, {1: block(1), 2: block(2)})
        async with (
            toy.service.blocks.read(ns, key(1), b"", soon()),
            toy.service.blocks.read(ns, key(2), b"", soon()),
        ):
            with pytest.raises(Busy):
                await store(toy.service, ns, {3: block(3)}, deadline=soon(0.05))
        results = await store(toy.service, ns, {3: block(3)})
        check(toy.catalog)
    assert results[0].outcome == "stored"


async def test_a_codec_that_breaks_costs_one_block_not_the_daemon(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        toy.codecs[0].fail = ZeroDivisionError("bug")
        results = await store(toy.service, ns, {1: block(1)}, durable=True)
        toy.codecs[0].fail = None
        assert await fetch(toy.service, ns, 1) == block(1)
        await store(toy.service, ns, {2: block(2)}, durable=True)
        text = toy.service.metrics_text().decode()
        check(toy.catalog)
    assert (results[0].outcome, results[0].reason) == ("dropped", "failed")
    assert 'kvtcd_internal_errors_total{where="mover"} 1.0' in text


async def test_a_full_disk_refuses_and_recovers(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        environment = toy.service._registry.tenants[TENANT].writer.environment
        write, environment.write = environment.write, _full
        refused = await store(toy.service, ns, {1: block(1)}, durable=True)
        from_host = await fetch(toy.service, ns, 1)
        environment.write = write
        flushed = await toy.service.blocks.flush(ns, [key(1)], b"", soon())
        await toy.service.blocks.demote(ns, [key(1)], b"", soon())
        from_disk = await fetch(toy.service, ns, 1)
        check(toy.catalog)

    assert [(r.outcome, r.reason) for r in refused] == [("dropped", "failed")]
    assert [r.outcome for r in flushed] == ["stored"]
    assert from_host == from_disk == block(1)


def _full(_puts, _drops) -> None:
    raise StoreFull("write", "ENOSPC")


async def test_a_disk_that_holds_less_than_was_meant_evicts_and_goes_on(tmp_path) -> None:
    # To a full disk lfu admits only what is worth more than the coldest there, and these are worth the same.
    async with toy_service(tmp_path, policy=Policy("recent", evict=Evict("lru"))) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        environment = toy.service._registry.tenants[TENANT].writer.environment
        write, most, refused = environment.write, 0, 0

        def write_if_there_is_room(puts, drops) -> None:
            nonlocal refused
            if puts and most and environment.used + sum(put.footprint for put in puts) > most:
                refused += 1
                raise StoreFull("write", "ENOSPC")
            write(puts, drops)

        environment.write = write_if_there_is_room
        await store(toy.service, ns, {n: block(n) for n in range(100)}, durable=True)
        most = environment.used
        results = await store(toy.service, ns, {n: block(n) for n in range(100, 110)}, durable=True)
        results += await store(toy.service, ns, {n: block(n) for n in range(110, 120)}, durable=True)
        found = toy.service.prefixes.match(ns, [key(n) for n in range(120)], b"").blocks
        text, ready, disk = toy.service.metrics_text().decode(), toy.service.ready, toy.service.overview.disk
        check(toy.catalog)

    assert (ready, disk) == (True, "full")
    assert {result.outcome for result in results} == {"stored"}
    assert 1 <= refused <= 10, "once and again, not for each block"
    assert all(block.tier for block in found[100:])
    assert 10 <= sum(block.tier is None for block in found[:100]) <= 50
    assert "kvtcd_disk_full_total 0.0" not in text
    assert "kvtcd_disk_withheld_bytes 0.0" not in text


async def test_a_thousand_readers_of_a_cold_block_cost_one_read_and_one_decode(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, {1: block(1)})
        await toy.service.blocks.demote(ns, [key(1)], b"", soon())
        bodies = await asyncio.gather(*(fetch(toy.service, ns, 1) for _ in range(1000)))
        text = toy.service.metrics_text().decode()
    assert bodies == [block(1)] * 1000
    assert 'kvtcd_moves_total{direction="disk-host",outcome="moved"} 1.0' in text
    for stage in ("read", "inflate", "synthesize"):
        assert f'kvtcd_stage_seconds_count{{pipeline="promote",stage="{stage}"}} 1.0' in text


async def test_readers_who_leave_keep_no_pin(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, {i: block(i) for i in range(8)})
        await toy.service.blocks.demote(ns, [key(i) for i in range(8)], b"", soon())
        rng = random.Random(1)
        tasks = [asyncio.create_task(fetch(toy.service, ns, rng.randrange(8))) for _ in range(200)]
        for task in tasks:
            if rng.random() < 0.5:
                await asyncio.sleep(0)
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await toy.service._driver.idle()
        check(toy.catalog)
        assert not toy.catalog.residents.pins


async def test_many_are_read_in_order_with_misses_between(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, {i: block(i) for i in range(0, 10, 2)})
        await toy.service.blocks.demote(ns, [key(i) for i in range(0, 10, 2)], b"", soon())
        found = []
        async for engine_key, lease in toy.service.blocks.read_many(
            ns, [key(i) for i in range(10)], b"", soon()
        ):
            body = b"".join(bytes(p) for p in lease.pieces()) if lease else None
            found.append((engine_key, body))
        assert not toy.catalog.residents.pins
    assert found == [(key(i), block(i) if i % 2 == 0 else None) for i in range(10)]


async def test_a_durable_put_that_is_not_packed_in_time_says_so_and_stays(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        toy.codecs[0].gate.clear()
        with pytest.raises(DeadlineExceeded):
            await store(toy.service, ns, {1: block(1)}, durable=True, deadline=soon(0.05))
        toy.codecs[0].gate.set()
        assert await fetch(toy.service, ns, 1) == block(1)


async def test_a_service_against_a_dict(tmp_path) -> None:
    """Random traffic of several clients over a host of five blocks: right bytes or a miss, never others."""
    policy = Policy("small", host=HostTier(high=0.9, low=0.6), disk=DiskTier(high=0.9, low=0.7))
    async with toy_service(tmp_path, host=5 * BLOCK_BYTES, disk=40 * BLOCK_BYTES, policy=policy) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        hits = 0

        async def client(seed: int) -> None:
            nonlocal hits
            rng = random.Random(seed)
            for calls in count():
                if calls >= 60 and hits > 50:
                    return
                number = rng.randrange(30)
                choice = rng.random()
                if choice < 0.4:
                    await store(toy.service, ns, {number: block(number)})
                elif choice < 0.9:
                    try:
                        assert await fetch(toy.service, ns, number) == block(number)
                        hits += 1
                    except NotFound:
                        pass
                else:
                    await toy.service.blocks.delete(ns, [key(number)], b"")

        async with asyncio.timeout(2 * PATIENCE_S):
            await asyncio.gather(*(client(seed) for seed in range(8)))
        await toy.service._driver.idle()
        check(toy.catalog)
        environment = toy.service._registry.tenants[TENANT].writer.environment
        assert environment.used == toy.catalog.residents.shelves[Tier.DISK].whole.used


async def test_a_missing_profile_is_logged_with_its_namespace_and_tenant(tmp_path, caplog) -> None:
    def unprofiled(identity, choice) -> ToyCodec:
        codec = ToyCodec(identity)
        codec.reason = None if choice.name == "lossless" else "there is no profile"
        return codec

    async with toy_service(tmp_path, codec=unprofiled) as toy:
        await toy.service.register(TENANT, "n", IDENTITY)
    assert f"namespace n of tenant {TENANT} is packed with toy: there is no profile" in caplog.text
