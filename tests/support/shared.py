"""Two hosts with disks of their own and one store: what tests of the remote tier do with them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from support.patience import PATIENCE_S
from support.toy import BLOCK_BYTES, IDENTITY, block, soon, toy_service

from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import Tier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from support.toy import ToyService

TENANT = "uid:1"


def key(number: int) -> EngineKey:
    return EngineKey(number.to_bytes(32, "big"))


async def store(toy: ToyService, ns, numbers: Iterable[int], *, chained: bool = False) -> None:
    """Store blocks durably, so that they are packed; `chained`, they continue each other from number 0 on."""
    async with toy.service.blocks.batch(ns, b"", soon(), durable=True) as batch:
        for number in numbers:
            data = block(number)
            first = number * ns.identity.block_tokens if chained else 0
            parent = key(number - 1) if first else None
            head = BlockHead(key(number), ns.identity.block_tokens, first_token=first, parent=parent)
            if slot := await batch.reserve(head, len(data)):
                slot.write(memoryview(data))
        results = await batch.commit()
    assert all(result.outcome in {"stored", "duplicate"} for result in results), results


async def fetch(toy: ToyService, ns, number: int) -> tuple[bytes, Tier]:
    """Return a block and where it was found."""
    async with toy.service.blocks.read(ns, key(number), b"", soon()) as lease:
        return b"".join(bytes(piece) for piece in lease.pieces()), lease.tier


async def tiers(toy: ToyService, ns, numbers: Iterable[int]) -> list[Tier | None]:
    """Return what a match says of blocks."""
    keys = [key(number) for number in numbers]
    await toy.service.prefixes.look(ns, b"", keys=keys)
    return list(toy.service.prefixes.match(ns, keys, b"").tiers)


async def until(true: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - what is looked at tells nobody
            await asyncio.sleep(0.01)


def stats(toy: ToyService):
    """Return the figures of the remote tier."""
    return toy.service.overview.stats(TENANT).remote


async def written(toy: ToyService, count: int) -> None:
    """Wait until so many blocks have gone to the store, or were there."""
    await until(lambda: stats(toy).written + stats(toy).there >= count)


@asynccontextmanager
async def host(path, remote, **options) -> AsyncIterator[tuple[ToyService, object]]:
    """Run a daemon's engine on a store, with one namespace.

    Its memory has room for all that a test stores: what is read from disk to lie there again, at whatever
    moment, is offered to the store again.
    """
    async with toy_service(path, **({"host": 256 * BLOCK_BYTES} | options), remote=remote) as toy:
        yield toy, await toy.service.register(TENANT, "n", IDENTITY)


async def filled(path, remote, numbers: Sequence[int]) -> None:
    """Have a host store blocks, and end once the store has them."""
    async with host(path, remote) as (toy, ns):
        await store(toy, ns, numbers)
        await written(toy, len(numbers))
