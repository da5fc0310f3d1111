"""Blocks at rest that only the master key opens."""

from __future__ import annotations

import zlib

import pytest
from engine.test_service import fetch, key, store
from support.toy import BLOCK_BYTES, IDENTITY, block, soon, toy_service

from kvtcd.core.errors import NotFound
from kvtcd.core.place import Form
from kvtcd.core.policy import DiskTier, Evict, HostTier, Policy

pytestmark = pytest.mark.asyncio
TENANT = "uid:1"


def on_disk(path) -> bytes:
    return b"".join(file.read_bytes() for file in path.rglob("data.mdb"))


async def test_what_lies_on_disk_is_encrypted_and_read_again(tmp_path) -> None:
    async with toy_service(tmp_path, encrypt=True) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, {1: block(1), 2: block(2)}, durable=True)
    inside = zlib.compress(block(1), 1)[100:200]
    assert inside not in on_disk(tmp_path)

    async with toy_service(tmp_path) as toy:  # not what is packed from now on
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        assert await fetch(toy.service, ns, 1) == block(1)
        await store(toy.service, ns, {3: block(3)}, durable=True)
    assert zlib.compress(block(3), 1)[100:200] in on_disk(tmp_path), "this test sees what is not encrypted"

    async with toy_service(tmp_path, encrypt=True) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        for number in (2, 3):
            assert await fetch(toy.service, ns, number) == block(number)


async def test_packed_copies_in_memory_are_encrypted_too(tmp_path) -> None:
    policy = Policy(
        "packed",
        host=HostTier("raw-then-packed", high=0.5, low=0.3),
        disk=DiskTier("evict"),
        evict=Evict("lru"),
    )
    async with toy_service(tmp_path, encrypt=True, policy=policy, host=8 * BLOCK_BYTES) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        for number in range(12):
            await store(toy.service, ns, {number: block(number)})
        counts = toy.service.overview.stats(TENANT).to_json()["tiers"]["host"][str(Form.PACKED)]
        assert counts["blocks"], "some were packed in place"
        assert zlib.compress(block(0), 1)[100:200] not in bytes(toy.memory.slab)
        for number in range(12):
            assert await fetch(toy.service, ns, number) == block(number)


async def test_without_the_master_key_nothing_is_left(tmp_path) -> None:
    async with toy_service(tmp_path, encrypt=True) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, {1: block(1)}, durable=True)
    (tmp_path / "master.key").write_bytes(bytes(32))

    async with toy_service(tmp_path, encrypt=True) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        with pytest.raises(NotFound):
            async with toy.service.blocks.read(ns, key(1), b"", soon()):
                pass
