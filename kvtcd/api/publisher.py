"""KV events on ZeroMQ, as vLLM's engines publish theirs: frames topic, number of the batch, msgpack.

ZeroMQ and msgspec are loaded when they are asked for; without `[events]` nobody needs them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kvtcd.core.errors import UnknownNamespace
from kvtcd.core.identity import Identity
from kvtcd.core.kv_events import CLEARED, Event, event_of
from kvtcd.core.notices import HEARTBEAT_S
from kvtcd.engine.errands import Errands
from kvtcd.engine.service import Service

if TYPE_CHECKING:
    import zmq.asyncio

REPLAY = 1024
"""Batches that are kept for those who have missed some."""
MOST_UNSENT = 4096
"""Batches that wait for each subscriber. Whoever is slower misses some, and sees that by their numbers."""
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class Publication:
    """What is published where.

    Attributes:
        endpoint: that subscribers connect to, e.g. ``tcp://127.0.0.1:5557``.
        replay: where they ask for batches again; empty: nowhere.
        topic: the first frame.
        tenant: whose blocks.
        as_int: vLLM's hashes as integers of 64 bits, its default; else all of their bytes.
    """

    endpoint: str
    replay: str
    topic: str
    tenant: str
    as_int: bool


class Endpoints:
    """The sockets that KV events leave by, bound.

    Args:
        what: is published where.

    Attributes:
        out: that subscribers connect to.
        asked: where they ask for batches again, None without.

    Raises:
        ModuleNotFoundError: ZeroMQ or msgspec is not installed.
        OSError: an endpoint, its `filename`, cannot be bound.
    """

    def __init__(self, what: Publication) -> None:
        import msgspec  # noqa: PLC0415 - nobody needs it who publishes nothing
        import zmq.asyncio  # noqa: PLC0415 - as above

        self.encode = msgspec.msgpack.encode
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        try:
            self.out = self._bound(zmq.PUB, what.endpoint)
            self.asked = self._bound(zmq.ROUTER, what.replay) if what.replay else None
        except OSError:
            self.close()
            raise

    def _bound(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        import zmq  # noqa: PLC0415 - as above

        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.sndhwm = MOST_UNSENT
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror, endpoint) from None
        return socket

    def close(self) -> None:
        """Close the sockets; what was not sent is dropped."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


class Publisher:
    """Publishes what becomes of blocks while it is entered. Belongs to the loop.

    Args:
        service: whose notices these are.
        what: is published where.
        endpoints: where, bound; closed in the end.
    """

    def __init__(self, service: Service, what: Publication, endpoints: Endpoints) -> None:
        self._service, self._what = service, what
        self._errands = Errands(service.metrics)
        self._endpoints = endpoints
        self._out, self._asked = endpoints.out, endpoints.asked
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=REPLAY)
        self._number = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            self._errands.start("publish", self._publish()),
            self._errands.start("replay", self._replay()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._endpoints.close()

    async def _publish(self) -> None:
        """Publish until the feed ends. First of all, nothing of an earlier daemon holds any more."""
        await self._send([CLEARED])
        with self._service.feeds.listen(self._what.tenant, None, None) as listener:
            while (notices := await listener.take(HEARTBEAT_S)) is not None:
                events = [
                    event
                    for notice in notices
                    if (event := event_of(notice, self._identity, as_int=self._what.as_int))
                ]
                self._service.metrics.untold.inc(len(notices) - len(events))
                if events:
                    await self._send(events)

    async def _replay(self) -> None:
        """Answer those who ask for the batches from a number on."""
        while self._asked is not None:
            who, *rest = await self._asked.recv_multipart()
            if len(rest) != 2 or len(rest[1]) != 8:
                continue
            first = int.from_bytes(rest[1], "big")
            for number, batch in [one for one in self._batches if one[0] >= first]:
                frames = self._topic, number.to_bytes(8, "big"), batch
                await self._asked.send_multipart((who, b"", *frames))
            await self._asked.send_multipart((who, b"", b"", _END, b""))

    @property
    def _topic(self) -> bytes:
        return self._what.topic.encode()

    def _identity(self, namespace: str) -> Identity | None:
        try:
            return self._service.namespace(self._what.tenant, namespace).identity
        except UnknownNamespace:
            return None  # it is gone, and that is told next

    async def _send(self, events: Sequence[Event]) -> None:
        batch = self._endpoints.encode([time.time(), events])
        number, self._number = self._number, self._number + 1
        self._batches.append((number, batch))
        for event in events:
            self._service.metrics.kv_events.labels(event["type"]).inc()
        await self._out.send_multipart((self._topic, number.to_bytes(8, "big"), batch))
