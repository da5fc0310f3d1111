"""Requests for blocks that lie in a region, and the keys and parts that tests of regions use."""

from __future__ import annotations

from support.http import NS, Daemon
from support.toy import BLOCK_BYTES

from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.regions import PlacedHead, PlacedKey, RegionGet, RegionPut, Span


def key(number: int) -> EngineKey:
    """Name a block."""
    return EngineKey(number.to_bytes(8, "big"))


def span(place: int, length: int = BLOCK_BYTES) -> Span:
    """Return the n-th part of a region, of a block's length."""
    return Span(place * BLOCK_BYTES, length)


async def put(daemon: Daemon, region: str, *blocks: tuple[BlockHead, Span], **headers: str):
    """Store blocks from parts of a region; return status and answer."""
    body = RegionPut(region, tuple(PlacedHead(*block) for block in blocks)).to_json()
    async with daemon.request("POST", f"{NS}/blocks:put", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def get(daemon: Daemon, region: str, *blocks: tuple[EngineKey, Span], **headers: str):
    """Read blocks into parts of a region; return status and answer."""
    body = RegionGet(region, tuple(PlacedKey(*block) for block in blocks)).to_json()
    async with daemon.request("POST", f"{NS}/blocks:get", json=body, headers=headers) as answer:
        return answer.status, await answer.json()
