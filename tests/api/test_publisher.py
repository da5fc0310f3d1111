"""KV events as a subscriber gets them who knows ZeroMQ and msgpack and nothing of us."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq.asyncio
from support.patience import PATIENCE_S
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, ToyService, block, soon, toy_service

from kvtcd.api import publisher
from kvtcd.api.publisher import Endpoints, Publication, Publisher
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.notices import Notice, What
from kvtcd.core.place import Tier
from kvtcd.core.policy import Policy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio
MINE, OTHER = "uid:1", "uid:2"
END = b"\xff" * 8


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number]) * 32)


class Router:
    """A subscriber. It asks for what came before it was there, as vLLM's own examples do."""

    def __init__(self, folder: Path) -> None:
        self.what = Publication(
            f"ipc://{folder}/out", f"ipc://{folder}/again", topic="kv@one", tenant=MINE, as_int=True
        )
        self._context = zmq.asyncio.Context()
        self._heard = self._context.socket(zmq.SUB)
        self._heard.connect(self.what.endpoint)
        self._heard.subscribe(b"kv@")

    async def joined(self, toy: ToyService) -> None:
        """Return when nothing is missed any more: who subscribes is not in time for what is being told."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self._heard.poll(50):
                toy.service.feeds.publish(MINE, Notice(What.PURGED, namespace="n"))
        last = (await self.ask(0))[-1][0]
        while (await self.hear())[0] != last:
            pass

    async def hear(self) -> tuple[int, list[Any]]:
        """Return number and events of the next batch."""
        async with asyncio.timeout(PATIENCE_S):
            return self._read(await self._heard.recv_multipart())

    async def events(self, count: int) -> list[Any]:
        """Return the next so many events."""
        found: list[Any] = []
        while len(found) < count:
            found += (await self.hear())[1]
        return found

    async def ask(self, first: int) -> list[tuple[int, list[Any]]]:
        """Return all batches from a number on that can be had again."""
        asked = self._context.socket(zmq.DEALER)
        asked.connect(self.what.replay)
        await asked.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        async with asyncio.timeout(PATIENCE_S):
            while (frames := await asked.recv_multipart())[2] != END:
                found.append(self._read(frames[1:]))
        asked.close(linger=0)
        return found

    def _read(self, frames: list[bytes]) -> tuple[int, list[Any]]:
        topic, number, payload = frames
        assert topic == b"kv@one"
        when, events = msgspec.msgpack.decode(payload)
        assert isinstance(when, float)
        return int.from_bytes(number, "big"), events

    def close(self) -> None:
        self._heard.close(linger=0)
        self._context.term()


@asynccontextmanager
async def published(folder: Path, **rest: Any) -> AsyncIterator[tuple[ToyService, Router]]:
    router = Router(folder)
    try:
        async with toy_service(folder / "state", **rest) as toy:
            for tenant in (MINE, OTHER):
                await toy.service.register(tenant, "n", IDENTITY)
            async with Publisher(toy.service, router.what, Endpoints(router.what)):
                await router.joined(toy)
                yield toy, router
    finally:
        router.close()


async def put(toy: ToyService, *numbers: int, tenant: str = MINE, tokens: int = BLOCK_TOKENS) -> None:
    namespace, nbytes = toy.service.namespace(tenant, "n"), BLOCK_BYTES * tokens // BLOCK_TOKENS
    async with toy.service.blocks.batch(namespace, b"", soon(), durable=False) as batch:
        for number in numbers:
            slot = await batch.reserve(BlockHead(key(number), tokens, first_token=0), nbytes)
            assert slot is not None
            slot.write(memoryview(block(number))[:nbytes])
        await batch.commit()


async def test_what_becomes_of_blocks_is_told_in_order(tmp_path: Path) -> None:
    async with published(tmp_path) as (toy, router):
        await put(toy, 1, 2)
        await put(toy, 9, tenant=OTHER)
        namespace = toy.service.namespace(MINE, "n")
        await toy.service.blocks.delete(namespace, [key(1)], b"")
        heard: list[Any] = []
        while not any(event["type"] == "BlockRemoved" for event in heard):
            heard += await router.events(1)

    stored = [event["block_hashes"] for event in heard if event["type"] == "BlockStored"]
    assert [key(1)] in stored
    assert [key(9)] not in stored
    first = next(event for event in heard if event["type"] == "BlockStored")
    assert first["block_size"] == BLOCK_TOKENS
    assert first["medium"] == "CPU"
    assert first["ownership"] == "kvtcd:n"
    removed = next(event for event in heard if event["type"] == "BlockRemoved")
    assert removed["block_hashes"] == [key(1)]


async def test_partial_blocks_come_and_go_without_a_word(tmp_path: Path) -> None:
    async with published(tmp_path, disk=0, policy=Policy("host")) as (toy, router):
        namespace = toy.service.namespace(MINE, "n")
        await put(toy, 1, tokens=BLOCK_TOKENS - 1)
        await toy.service.blocks.delete(namespace, [key(1)], b"")
        await put(toy, 2)
        await toy.service.blocks.delete(namespace, [key(2)], b"")
        heard = await router.events(2)

    assert [(event["type"], event["block_hashes"]) for event in heard] == [
        ("BlockStored", [key(2)]), ("BlockRemoved", [key(2)])
    ]  # fmt: skip


async def test_batches_are_numbered_without_a_gap_and_can_be_had_again(tmp_path: Path) -> None:
    async with published(tmp_path, disk=0, policy=Policy("host")) as (toy, router):
        assert (await router.ask(0))[0] == (0, [{"type": "AllBlocksCleared"}])  # it begins with nothing
        batches = []
        for number in range(1, 6):
            await put(toy, number)
            batches.append(await router.hear())
        numbers = [number for number, _ in batches]
        assert numbers == list(range(numbers[0], numbers[0] + 5))
        again = await router.ask(numbers[2])
        assert again == batches[2:]
        assert await router.ask(1 << 40) == []
        text = toy.service.metrics.text().decode()
        assert 'kvtcd_kv_events_total{type="BlockStored"} 5.0' in text


async def test_after_a_loss_everything_is_cleared(tmp_path: Path, monkeypatch) -> None:
    """The ring of notices is too short for what happens at once: a router must not believe what it knows."""
    monkeypatch.setattr("kvtcd.engine.feed.Feed.__init__.__defaults__", (4,))
    async with published(tmp_path, disk=0) as (toy, router):
        await put(toy, 1)
        assert [event["type"] for event in await router.events(1)] == ["BlockStored"]
        for number in range(10):  # within one turn of the loop
            toy.service.feeds.publish(MINE, Notice(What.STORED, None, "n", key(number), tier=Tier.HOST))
        assert (await router.hear())[1] == [{"type": "AllBlocksCleared"}]
        await put(toy, 2)
        assert [event["block_hashes"] for event in await router.events(1)] == [[key(2)]]


async def test_whoever_asks_in_another_way_is_not_answered(tmp_path: Path) -> None:
    async with published(tmp_path) as (_, router):
        context = zmq.asyncio.Context()
        asked = context.socket(zmq.DEALER)
        asked.connect(router.what.replay)
        for frames in ([b"x"], [b"", b"1"], [b"", b"1" * 9], [b"", b"", b""]):
            await asked.send_multipart(frames)
        assert await router.ask(0)  # and others still are
        asked.close(linger=0)
        context.term()


async def test_an_endpoint_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    async with toy_service(tmp_path / "state"):
        for place in ("out", "again"):
            folder = {"out": tmp_path, "again": tmp_path, place: tmp_path / "missing"}
            what = Publication(
                f"ipc://{folder['out']}/out", f"ipc://{folder['again']}/again", "", MINE, as_int=True
            )
            with pytest.raises(OSError, match="No such file") as caught:
                Endpoints(what)
            assert caught.value.filename == f"ipc://{tmp_path}/missing/{place}"


async def test_without_zeromq_it_is_said(tmp_path: Path, monkeypatch) -> None:
    async with toy_service(tmp_path / "state"):
        monkeypatch.setitem(sys.modules, "zmq.asyncio", None)
        with pytest.raises(ModuleNotFoundError):
            Endpoints(Publication("ipc:///x", "", "", MINE, as_int=True))


async def test_batches_that_are_kept_are_bounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(publisher, "REPLAY", 3)
    async with published(tmp_path, disk=0) as (toy, router):
        for number in range(1, 6):
            await put(toy, number)
            last, _ = await router.hear()
        assert [number for number, _ in await router.ask(0)] == [last - 2, last - 1, last]
