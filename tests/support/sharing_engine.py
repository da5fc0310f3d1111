"""An engine with memory on a scripted GPU, in the same process as the daemon that it shares it with."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from support.fake_driver import Machine, Process
from support.patience import PATIENCE_S
from support.toy import BLOCK_BYTES

from kvtcd.core.regions import side_socket
from kvtcd.cuda.exports import Exported

if TYPE_CHECKING:
    from support.http import Daemon

BLOCKS = 8
SIZE = BLOCKS * BLOCK_BYTES


class Engine:
    """An engine with memory on a GPU, which it hands over as any client would."""

    connections: ClassVar[list[socket.socket]] = []

    def __init__(self, machine: Machine) -> None:
        self.process = Process(machine)
        self.driver = self.process.driver()
        self.context = self.driver.retain(0)
        with self.driver.current(self.context):
            self.memory = self.driver.allocate(SIZE + 4096)
            self.stream = self.driver.create_stream()
        self.exported = Exported(self.driver, self.memory + 4096, SIZE)
        self.connection: socket.socket | None = None
        self.answer: dict = {}

    @classmethod
    def leave_all(cls) -> None:
        """End every connection."""
        while cls.connections:
            cls.connections.pop().close()

    def offer(self, daemon: Daemon, offer: bytes | None = None) -> dict:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connections.append(self.connection)
        self.connection.settimeout(PATIENCE_S)
        self.connection.connect(side_socket(str(daemon.socket)))
        self.connection.send(self.exported.offer().to_message() if offer is None else offer)
        self.answer = json.loads(self.connection.recv(4096) or b"{}")
        return self.answer

    async def share(self, daemon: Daemon, offer: bytes | None = None) -> str | None:
        return (await asyncio.to_thread(self.offer, daemon, offer)).get("region")

    def recall(self) -> bytes:
        self.connection.shutdown(socket.SHUT_WR)
        return self.connection.recv(1)

    def write(self, place: int, data: bytes) -> None:
        self.process.set(self.memory + 4096 + place * BLOCK_BYTES, data)

    def read(self, place: int) -> bytes:
        return self.process.bytes_at(self.memory + 4096 + place * BLOCK_BYTES, BLOCK_BYTES)

    def free(self) -> None:
        with self.driver.current(self.context):
            self.driver.free(self.memory)

    @contextmanager
    def work(self):
        """Queue work that is done only once this is left."""
        stream = self.process.things[self.stream]
        stream.held = True
        yield stream.queued
        stream.held = False
        stream.run()
