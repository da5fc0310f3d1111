"""Large blocks pass through the loop without stopping it for others."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace

import pytest
from support.http import running
from support.toy import IDENTITY

from kvtcd.client import BlockHead, Client
from kvtcd.core.keys import EngineKey
from kvtcd.core.layout import Dtype, kv_layout

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]
LARGE = replace(
    IDENTITY, layout=kv_layout(layers=32, kv_heads=8, head_dim=128, dtype=Dtype.BF16), block_tokens=512
)
NBYTES = LARGE.layout.nbytes(512)
"""64 MiB."""


async def test_blocks_of_64_mib_stall_nobody():
    pauses: list[float] = []

    async def tick() -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(0.001)
            pauses.append(loop.time() - before)

    blocks = [bytes([number]) * NBYTES for number in range(3)]
    buffers = [bytearray(NBYTES) for _ in blocks]
    sums = [zlib.crc32(data) for data in blocks]

    def work(client: Client, number: int) -> bool:
        """Do nothing that keeps the interpreter lock for long: the loop would wait for the test."""
        key = EngineKey(b"%d" % number)
        client.put("demo", BlockHead(key, 512, 0), blocks[number])
        return zlib.crc32(client.get("demo", key, out=buffers[number])) == sums[number]

    async with running(host=8 * NBYTES, disk=0) as daemon:
        await daemon.register(LARGE)
        ticker = asyncio.create_task(tick())
        with Client(daemon.socket) as client:
            for _ in range(3):
                done = await asyncio.gather(*(asyncio.to_thread(work, client, n) for n in range(3)))
                assert all(done)
                for n in range(3):
                    await asyncio.to_thread(client.delete, "demo", b"%d" % n)
        ticker.cancel()
    pauses.sort()
    assert pauses[len(pauses) * 99 // 100] < 0.05, pauses[-20:]
    assert pauses[-1] < 0.3, pauses[-20:]
