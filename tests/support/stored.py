"""Blocks whose number says their key and bytes, stored in and fetched from a toy service."""

from __future__ import annotations

from support.toy import BLOCK_TOKENS, LAYOUT, block, soon

from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead


def key(number: int) -> EngineKey:
    """Return the key of a block."""
    return EngineKey(number.to_bytes(32, "big"))


async def store(service, ns, *heads: BlockHead, durable: bool = True) -> list[str]:
    """Store blocks of these heads in one batch, each with the bytes of its number; return the outcomes."""
    async with service.blocks.batch(ns, b"", soon(), durable=durable) as batch:
        for head in heads:
            slot = await batch.reserve(head, LAYOUT.nbytes(head.tokens))
            if slot is not None:
                slot.write(memoryview(block(int.from_bytes(head.key, "big"), head.tokens)))
        results = {result.key: result for result in await batch.commit()}
    return [results[head.key].reason or results[head.key].outcome for head in heads]


async def store_each(service, ns, *numbers: int, durable: bool = False) -> None:
    """Store whole blocks, one after the other."""
    for number in numbers:
        await store(service, ns, BlockHead(key(number), BLOCK_TOKENS, first_token=0), durable=durable)


async def fetch(service, ns, number: int) -> bytes:
    """Return the bytes of a block."""
    async with service.blocks.read(ns, key(number), b"", soon()) as lease:
        return b"".join(bytes(piece) for piece in lease.pieces())
