"""Every way between places with real bytes, through the service: what goes in comes out."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from support.codec_world import World, kv
from support.invariants import check
from support.patience import PATIENCE_S
from support.stored import fetch, key, store_each
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, LAYOUT, ToyCodec, block, soon, toy_service

from kvtcd.codec.choose import codec_for
from kvtcd.codec.profile import store as store_profile
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.core import events as ev
from kvtcd.core.errors import Busy, NotFound
from kvtcd.core.keys import EngineKey, chain
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import MEMORY, Form, Tier
from kvtcd.core.policy import CodecChoice, DiskTier, Evict, HostTier, Policy, Promote, Share

pytestmark = pytest.mark.asyncio
TENANT = "uid:1"
LRU = Evict("lru")
PACKING = Policy(
    "packing", host=HostTier("raw-then-packed", raw=0.0, high=0.5, low=0.3), disk=DiskTier("evict"), evict=LRU
)
ROOMY = 16 * BLOCK_BYTES
"""Of `PACKING`, eight raw blocks fit below the high mark."""


def record_key(toy, ns, number: int):
    return toy.service._registry.record_keys(ns, b"")(key(number))


def where(toy, ns, number: int) -> str:
    return " ".join(map(str, toy.catalog.places(record_key(toy, ns, number))))


def moves(toy) -> dict[str, int]:
    """Return how many moves of each way have ended well."""
    found = {}
    for sample in next(iter(toy.service.metrics.moves.collect())).samples:
        if sample.name.endswith("_total") and sample.labels["outcome"] == "moved":
            found[sample.labels["direction"]] = int(sample.value)
    return found


async def packed(toy, ns) -> None:
    """Store blocks 0 to 8, and see 0 packed in place and nowhere else."""
    await store_each(toy.service, ns, *range(9))
    await toy.service._driver.idle()
    assert where(toy, ns, 0) == "packed"


# Every way --------------------------------------------------------------------------------------------------


async def test_a_block_goes_every_way_and_keeps_its_bytes(tmp_path) -> None:
    policy = replace(PACKING, disk=DiskTier("evict"))
    async with toy_service(tmp_path, host=ROOMY, policy=policy, gpu=2 * BLOCK_BYTES) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        await packed(toy, ns)  # host-packed
        seen = [await fetch(service, ns, 0)]  # packed-host
        assert where(toy, ns, 0) == "host packed"
        await service.blocks.flush(ns, [key(0)], b"", soon())  # packed-disk
        assert where(toy, ns, 0) == "host packed disk"
        await service.blocks.demote(ns, [key(0)], b"", soon())
        assert where(toy, ns, 0) == "disk"
        seen.append(await fetch(service, ns, 0))  # disk-host
        await service.blocks.demote(ns, [key(0)], b"", soon())
        toy.catalog.room.refill_later(record_key(toy, ns, 0))
        service._driver.tell(ev.Tick())  # disk-packed
        await service._driver.idle()
        assert where(toy, ns, 0) == "packed disk"
        results = await service.blocks.prefetch(ns, [key(0)], b"", soon(), tier=Tier.GPU)  # host-gpu
        assert [result.outcome for result in results] == ["stored"]
        assert where(toy, ns, 0) == "gpu host packed disk"
        seen.append(await fetch(service, ns, 0))
        for number in range(20, 60):  # its raw copy on the host must go
            await store_each(service, ns, number)
            await service._driver.idle()
        assert where(toy, ns, 0).startswith("gpu")
        assert "host" not in where(toy, ns, 0)
        seen.append(await fetch(service, ns, 0))  # gpu-host
        await store_each(service, ns, 99)
        await service.blocks.demote(ns, [key(99)], b"", soon())  # host-disk, or packed-disk
        seen.append(await fetch(service, ns, 0))
        check(toy.catalog)
        ways = moves(toy)

    assert seen == [block(0)] * 5
    assert {
        "host-packed", "packed-host", "packed-disk", "disk-host", "disk-packed", "host-gpu", "gpu-host"
    } <= ways.keys()  # fmt: skip


async def test_every_block_of_a_host_that_packs_comes_back(tmp_path) -> None:
    async with toy_service(tmp_path, host=ROOMY, policy=PACKING) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        for number in range(40):
            await store_each(toy.service, ns, number)
            await toy.service._driver.idle()  # newcomers do not wait, and would have others lost
        bodies = [await fetch(toy.service, ns, number) for number in range(40)]
        await toy.service._driver.idle()
        check(toy.catalog)
        ways = moves(toy)

    assert bodies == [block(number) for number in range(40)]
    assert ways["host-packed"] > 0


@pytest.mark.parametrize(("disk", "way"), [(0, "packed-host"), (1 << 30, "packed-disk")])
async def test_a_packed_block_in_several_pieces_comes_back(tmp_path, disk, way) -> None:
    data = [
        np.random.default_rng(n).integers(0, 256, BLOCK_BYTES, dtype=np.uint8).tobytes() for n in range(5)
    ]
    cut = []
    async with toy_service(tmp_path, host=ROOMY, disk=disk, policy=PACKING) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        for number, body in enumerate(data):  # zlib cannot shrink it: packed, it takes three granules
            async with service.blocks.batch(ns, b"", soon()) as batch:
                slot = await batch.reserve(BlockHead(key(number), BLOCK_TOKENS, first_token=0), BLOCK_BYTES)
                slot.write(memoryview(body))
                await batch.commit()
        memory, allocate = toy.memory, toy.memory.allocate
        fillers = [EngineKey(bytes([255, number]) * 16) for number in range(32 - 10)]
        for filler in fillers:
            allocate(filler, 4096)
        for filler in fillers[::2]:  # all that is free are holes of one granule
            memory.free(filler)

        def allocating(key, nbytes, form=Form.RAW) -> None:
            allocate(key, nbytes, form)
            cut.append((form, len(memory.pieces(key, form))))

        memory.allocate = allocating
        service._driver.tell(ev.Mark(replace(PACKING, host=HostTier("raw-then-packed", 0.0, 0.25, 0.25))))
        await service._driver.idle()
        for filler in fillers[1::2]:
            memory.free(filler)
        bodies = [await fetch(service, ns, number) for number in range(5)]
        ways = moves(toy)

    assert (Form.PACKED, 3) in cut
    assert ways[way] > 0
    assert bodies == data


# Damage in memory -------------------------------------------------------------------------------------------


async def test_a_flipped_bit_in_a_packed_host_copy_costs_that_block_alone(tmp_path) -> None:
    async with toy_service(tmp_path, host=ROOMY, policy=PACKING) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        await packed(toy, ns)
        toy.memory.pieces(record_key(toy, ns, 0), Form.PACKED)[0][100] ^= 4
        with pytest.raises(NotFound):
            await fetch(service, ns, 0)
        others = [await fetch(service, ns, number) for number in range(1, 9)]
        text = service.metrics_text().decode()
        there = where(toy, ns, 0)
        check(toy.catalog)

    assert there == ""
    assert others == [block(number) for number in range(1, 9)]
    assert 'kvtcd_damaged_records_total{error="BadChecksum"} 1.0' in text
    assert 'kvtcd_moves_total{direction="packed-host",outcome="damaged"} 1.0' in text
    assert 'kvtcd_lost_total{reason="damaged"} 1.0' in text


async def test_a_flipped_bit_in_a_packed_host_copy_is_healed_from_disk(tmp_path) -> None:
    async with toy_service(tmp_path, host=ROOMY, policy=PACKING) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        await packed(toy, ns)
        await service.blocks.flush(ns, [key(0)], b"", soon())
        assert where(toy, ns, 0) == "packed disk"
        toy.memory.pieces(record_key(toy, ns, 0), Form.PACKED)[0][-1] ^= 1
        body = await fetch(service, ns, 0)
        text = service.metrics_text().decode()
        there = where(toy, ns, 0)

    assert body == block(0)
    assert there == "host disk"
    assert 'kvtcd_moves_total{direction="packed-host",outcome="damaged"} 1.0' in text
    assert 'kvtcd_lost_total{reason="damaged"} 0.0' in text


async def test_a_flipped_bit_never_gets_to_disk(tmp_path) -> None:
    async with toy_service(tmp_path, host=ROOMY, policy=PACKING) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        await packed(toy, ns)
        assert await fetch(service, ns, 0) == block(0)
        toy.memory.pieces(record_key(toy, ns, 0), Form.PACKED)[0][50] ^= 128
        results = await service.blocks.demote(ns, [key(0)], b"", soon())
        body = await fetch(service, ns, 0)

    assert [result.outcome for result in results] == ["stored"], "its raw copy was packed anew"
    assert body == block(0)


async def test_nothing_is_remembered_of_a_block_whose_copies_went_in_one_turn(tmp_path) -> None:
    async with toy_service(tmp_path, host=ROOMY, policy=PACKING, gpu=2 * BLOCK_BYTES) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        await packed(toy, ns)
        await service.blocks.prefetch(ns, [key(0)], b"", soon(), tier=Tier.GPU)
        assert where(toy, ns, 0) == "gpu host packed"
        await service.blocks.delete(ns, [key(number) for number in range(9)], b"")

        assert not service._driver.origins
        assert not toy.memory._copies


# Pressure, and other policies -------------------------------------------------------------------------------


async def test_what_is_packed_in_a_hurry_is_packed_losslessly_and_comes_back(tmp_path) -> None:
    policy = Policy(
        "hurry", host=HostTier("raw", high=1.0, low=1.0), disk=DiskTier("evict"), evict=LRU,
        packer_behind="lossless",
    )  # fmt: skip
    async with toy_service(tmp_path, host=12 * BLOCK_BYTES, policy=policy) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        await store_each(service, ns, *range(12))
        (codec,) = toy.codecs
        codec.gate.clear()  # the packer stands still, with all it may take
        flushing = asyncio.create_task(service.blocks.flush(ns, [key(n) for n in range(4, 12)], b"", soon()))
        await asyncio.sleep(0)
        newcomers = asyncio.create_task(store_each(service, ns, 20, 21, 22))
        await asyncio.sleep(0.05)
        codec.gate.set()
        await newcomers
        await flushing
        bodies = [await fetch(service, ns, number) for number in [*range(12), 20, 21, 22]]
        hurried = service.metrics.lossless_because.labels("hurry")._value.get()

    assert bodies == [block(number) for number in [*range(12), 20, 21, 22]]
    assert hurried > 0
    assert block(0) not in codec.afters, "the coldest was packed by another codec"
    assert block(4) in codec.afters


async def test_after_a_reload_blocks_are_packed_where_the_policy_says_in_a_hurry_too(tmp_path) -> None:
    here, there = (replace(PACKING, codec=CodecChoice(device=device)) for device in ("cpu", "cuda"))
    made = []

    def codec(identity, choice) -> ToyCodec:
        made.append(choice.device)
        return ToyCodec(identity, device=choice.device)

    async with toy_service(tmp_path, policy=here, codec=codec) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        assert (ns.codec.device, ns.lossless.device) == ("cpu", "cpu")
        await toy.service.reload((there,))
        assert (ns.codec.device, ns.lossless.device) == ("cuda", "cuda")
        hurried, before = ns.lossless, len(made)
        await toy.service.reload((replace(there, share=Share(host=0.75)),))
        assert ns.lossless is hurried, "nothing asks for another"
        assert len(made) == before + 1, "one that is compared with the codec in use"


async def test_a_reload_sets_the_marks_of_the_tiers_and_shares_of_namespaces(tmp_path) -> None:
    async with toy_service(tmp_path, host=ROOMY, policy=PACKING) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        await store_each(service, ns, *range(7))
        await service._driver.idle()
        before = moves(toy)
        host = HostTier("raw-then-packed", raw=0.0, high=0.25, low=0.2)
        await service.reload((replace(PACKING, host=host, share=Share(host=0.75)),))
        await service._driver.idle()
        shelf = toy.catalog.residents.shelves[Tier.HOST]
        after = moves(toy)
        bodies = [await fetch(service, ns, number) for number in range(7)]

    assert (sum(before.values()), after["host-packed"] > 2) == (0, True)
    assert (shelf.whole.high, shelf.whole.low) == (4 * BLOCK_BYTES, int(3.2 * BLOCK_BYTES))
    assert shelf.room(ns.number) == 12 * BLOCK_BYTES
    assert bodies == [block(number) for number in range(7)]


# Restart ----------------------------------------------------------------------------------------------------


async def test_what_was_packed_in_place_survives_a_stop_that_flushes(tmp_path) -> None:
    async with toy_service(tmp_path, host=ROOMY, policy=replace(PACKING, flush="host")) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store_each(toy.service, ns, *range(12))
        (codec,) = toy.codecs
    encoded = dict(codec.afters)
    async with toy_service(tmp_path, host=ROOMY, policy=PACKING) as toy:
        ns = toy.service.namespace(TENANT, "n")
        bodies = [await fetch(toy.service, ns, number) for number in range(12)]

    assert bodies == [block(number) for number in range(12)]
    assert len(encoded) == 12


async def test_without_a_flush_what_was_only_packed_in_place_is_a_miss_and_nothing_worse(tmp_path) -> None:
    async with toy_service(tmp_path, host=ROOMY, policy=replace(PACKING, flush="none")) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await packed(toy, ns)
        await toy.service.blocks.flush(ns, [key(1)], b"", soon())
    async with toy_service(tmp_path, host=ROOMY, policy=PACKING) as toy:
        ns = toy.service.namespace(TENANT, "n")
        with pytest.raises(NotFound):
            await fetch(toy.service, ns, 0)
        assert await fetch(toy.service, ns, 1) == block(1)


# The recent window ------------------------------------------------------------------------------------------


def heads(ns, tokens: list[int]) -> list[BlockHead]:
    return [BlockHead(link.key, link.tokens, link.first) for link in chain(ns.digest, tokens, BLOCK_TOKENS)]


async def write(
    service, ns, tokens: list[int], bodies: dict[EngineKey, bytes], *, durable: bool = True
) -> None:
    """Store a sequence as one batch; a block that is there already is passed over."""
    async with service.blocks.batch(ns, b"", soon(), durable=durable) as batch:
        for head in heads(ns, tokens):
            slot = await batch.reserve(head, LAYOUT.nbytes(head.tokens))
            if slot is not None:
                slot.write(memoryview(bodies.setdefault(head.key, block(len(bodies), head.tokens))))
        await batch.commit()


async def test_the_longest_branch_says_what_follows_a_shared_block(tmp_path) -> None:
    """A prefix of two blocks; then one branch of one block, and one of three. Each is packed at last."""
    shared = list(range(2 * BLOCK_TOKENS))
    short, long = [*shared, *[7] * BLOCK_TOKENS], [*shared, *[8] * (3 * BLOCK_TOKENS)]
    policy = Policy("evict", disk=DiskTier("evict"), host=HostTier("raw"), evict=LRU)
    async with toy_service(tmp_path, policy=policy) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        bodies: dict[EngineKey, bytes] = {}
        await write(service, ns, long, bodies, durable=False)
        await write(service, ns, short, bodies, durable=False)
        await service.blocks.flush(ns, None, b"", soon())
        (codec,) = toy.codecs
    afters = {engine_key: codec.afters[body] // BLOCK_TOKENS for engine_key, body in bodies.items()}

    assert [afters[head.key] for head in heads(ns, long)] == [4, 3, 2, 1, 0]
    assert [afters[head.key] for head in heads(ns, short)] == [4, 3, 0]


async def test_blocks_found_at_the_start_count_as_what_follows(tmp_path) -> None:
    """The beginning of a sequence was lost; it is packed for what is still on disk behind it."""
    tokens = list(range(4 * BLOCK_TOKENS))
    bodies: dict[EngineKey, bytes] = {}
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await write(toy.service, ns, tokens, bodies)
        first = heads(ns, tokens)[0]
        await toy.service.blocks.delete(ns, [first.key], b"")
    async with toy_service(tmp_path) as toy:
        ns = toy.service.namespace(TENANT, "n")
        await write(toy.service, ns, tokens, bodies)
        (codec,) = toy.codecs

    assert codec.afters == {bodies[first.key]: 3 * BLOCK_TOKENS}, "and nothing else is packed again"


async def test_a_block_that_was_packed_before_its_continuation_came_is_not_packed_again(tmp_path) -> None:
    """What was stored finer stays so, over promotions, demotions and a restart."""
    tokens = list(range(3 * BLOCK_TOKENS))
    bodies: dict[EngineKey, bytes] = {}
    async with toy_service(tmp_path, host=ROOMY, policy=PACKING) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        await write(service, ns, tokens[:BLOCK_TOKENS], bodies, durable=False)
        await store_each(service, ns, *range(100, 109))
        await service._driver.idle()
        first = heads(ns, tokens)[0].key
        number = int.from_bytes(first, "big")
        assert where(toy, ns, number) == "packed"
        blob = np.concatenate(toy.memory.pieces(record_key(toy, ns, number), Form.PACKED)).tobytes()
        await write(service, ns, tokens, bodies)
        bodies_read = [await fetch(service, ns, number)]
        await service.blocks.demote(ns, [first], b"", soon())
        bodies_read.append(await fetch(service, ns, number))
        await service.blocks.demote(ns, [first], b"", soon())
        codec, environment = toy.codecs[0], service._registry.tenants[TENANT].writer.environment
        _, stored = environment.read(record_key(toy, ns, number))
        encodings = codec.afters[bodies[first]]
    async with toy_service(tmp_path, host=ROOMY, policy=PACKING) as toy:
        ns = toy.service.namespace(TENANT, "n")
        bodies_read.append(await fetch(toy.service, ns, number))

    assert bytes(stored) == blob
    assert encodings == 0, "nothing followed when it was packed"
    assert bodies_read == [bodies[first]] * 3


async def test_with_the_real_codec_the_window_of_a_leaf_is_exact_and_of_an_inner_block_is_not(
    tmp_path,
) -> None:
    world, window = World(kv()), 16
    size = world.identity.block_tokens
    await asyncio.to_thread(store_profile, world.profile()[1], tmp_path)
    folder = ProfileFolder(tmp_path)
    policy = Policy(
        "real",
        codec=CodecChoice("kvtc", 8, window=window),
        host=HostTier("raw"),
        disk=DiskTier("evict"),
        evict=LRU,
    )
    async with toy_service(
        tmp_path / "state", policy=policy, codec=lambda identity, choice: codec_for(identity, choice, folder)
    ) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", world.identity)
        links = list(chain(ns.digest, list(range(3 * size)), size))
        raws = [world.block(size, seed=n, first_token=n * size) for n in range(3)]
        async with service.blocks.batch(ns, b"", soon()) as batch:
            for link, raw in zip(links, raws, strict=True):
                data = raw.numpy().tobytes()
                slot = await batch.reserve(BlockHead(link.key, link.tokens, link.first), len(data))
                slot.write(memoryview(data))
            await batch.commit()
        keys = [link.key for link in links]
        await service.blocks.demote(ns, keys, b"", soon())
        got = [await fetch(service, ns, int.from_bytes(engine_key, "big")) for engine_key in keys]
    exact = []
    for raw, body in zip(raws, got, strict=True):
        want = world.values(raw, size)
        have = world.values(torch.frombuffer(bytearray(body), dtype=torch.uint8), size)
        same = [(want[name] == have[name]).transpose(0, 1).flatten(1).all(dim=1) for name in want]
        exact.append(torch.stack(same).all(dim=0).tolist())

    assert exact[0] == [token < 4 for token in range(size)], "sinks alone"
    assert not any(exact[1])
    assert exact[2] == [token >= size - window for token in range(size)], "the window alone"


# Many at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
async def test_clients_of_a_tiny_host_that_packs_against_a_dict(tmp_path, seed) -> None:
    """Two namespaces with shares, a GPU, a small disk: right bytes, or a miss that loss explains."""
    policy = Policy(
        "small",
        host=HostTier("raw-then-packed", raw=0.3, high=0.6, low=0.4),
        disk=DiskTier("behind" if seed == 1 else "evict", high=0.9, low=0.7),
        share=Share(host=0.7, disk=0.6),
        evict=LRU,
        promote=Promote("gpu", on_hit=2),
        packer_behind="drop" if seed == 1 else "lossless",
    )
    async with toy_service(
        tmp_path, host=14 * BLOCK_BYTES, disk=30 * BLOCK_BYTES, gpu=3 * BLOCK_BYTES, policy=policy
    ) as toy:
        service = toy.service
        spaces = [await service.register(TENANT, "n", IDENTITY)]
        spaces.append(await service.register(TENANT, "m", replace(IDENTITY, model="other")))
        hits, rng = 0, random.Random(seed)

        async def client(own: random.Random) -> None:
            nonlocal hits
            for calls in count():
                if calls >= 60 and hits > 30 and "host-packed" in moves(toy):
                    return
                space, number = own.randrange(2), own.randrange(25)
                ns, choice = spaces[space], own.random()
                if choice < 0.4:
                    await store_each(service, ns, number, durable=own.random() < 0.2)
                elif choice < 0.9:
                    try:
                        assert await fetch(service, ns, number) == block(number)
                        hits += 1
                    except (NotFound, Busy):
                        pass
                elif choice < 0.95:
                    tier = own.choice([Tier.HOST, Tier.GPU])
                    await service.blocks.prefetch(ns, [key(number)], b"", soon(), tier=tier)
                else:
                    await service.blocks.delete(ns, [key(number)], b"")

        async with asyncio.timeout(2 * PATIENCE_S):
            await asyncio.gather(*(client(random.Random(rng.random())) for _ in range(8)))
        await service._driver.idle()
        check(toy.catalog)
        environment = service._registry.tenants[TENANT].writer.environment
        assert environment.used == toy.catalog.residents.shelves[Tier.DISK].whole.used
        assert service._driver.waiting == 0
        copies = {(k, p) for k, entry in toy.catalog.residents.entries.items() for p in entry.copies}
        assert toy.memory._copies.keys() == {(k, p.form) for k, p in copies if p.tier is Tier.HOST}
        assert service._driver.origins.keys() == {k for k, p in copies if p in MEMORY}
