"""Redis as Debian has it: one server, or a cluster of three on loopback; skipped where there is none."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from support.patience import PATIENCE_S
from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
needed = pytest.mark.skipif(BINARY is None, reason="neither redis-server nor valkey-server is installed")
SLOTS = 16384
CLUSTER = (
    "--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no",
)  # fmt: skip
"""Options of a node: what is left of the cluster serves what it has when one of them is away."""


@dataclass
class Server:
    """One server; `start` after `kill` finds nothing that was there.

    `bus`: the port that nodes of a cluster talk by, which is otherwise 10,000 beyond `port`, free or not.
    """

    port: int
    bus: int
    folder: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(self.folder), "--daemonize", "no", "--cluster-port", str(self.bus), *self.options,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    async def ready(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    if await self.ask("PING"):
                        return
                except (OSError, RedisError):
                    assert self.process is None or self.process.poll() is None, "it has ended"
                    await asyncio.sleep(0.05)

    async def ask(self, *command: object) -> object:
        """Send one command."""
        async with Redis(port=self.port, driver_info=None) as client:
            return await client.execute_command(*command)


@contextmanager
def servers(folder: Path, count: int, *options: str) -> Iterator[list[Server]]:
    """Run some servers, that know nothing of each other."""
    started = []
    try:
        for number in range(count):
            home = folder / f"redis-{number}"
            home.mkdir(parents=True)
            started.append(Server(free_port(), free_port(), home, options))
            started[-1].start()
        yield started
    finally:
        for server in started:
            server.kill()


@asynccontextmanager
async def single(folder: Path, *options: str) -> AsyncIterator[Server]:
    """Run one server."""
    with servers(folder, 1, *options) as (server,):
        await server.ready()
        yield server


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[list[Server]]:
    """Run three servers as a cluster that serves what it has when one of them is away."""
    with servers(folder, 3, *CLUSTER) as nodes:
        await joined(nodes)
        yield nodes


async def joined(nodes: list[Server]) -> None:
    """Make one cluster of three servers."""
    for number, node in enumerate(nodes):
        await node.ready()
        first, end = number * SLOTS // 3, (number + 1) * SLOTS // 3
        await node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        await node.ask("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
    for other in nodes[1:]:
        await nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus)
    async with asyncio.timeout(PATIENCE_S):
        while not all([await _agrees(node) for node in nodes]):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def _agrees(node: Server) -> bool:
    told = await node.ask("CLUSTER", "INFO")
    info = told if isinstance(told, dict) else dict(line.split(":") for line in bytes(told).decode().split())
    return (info["cluster_state"], info["cluster_slots_ok"]) == ("ok", str(SLOTS))
