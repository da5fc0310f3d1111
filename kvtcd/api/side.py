"""The side socket: where a client hands over memory, and keeps it shared as long as it stays connected."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvtcd.api.auth import is_own
from kvtcd.api.limits import Limits
from kvtcd.api.regions import Regions
from kvtcd.core.access import Caller
from kvtcd.core.device_errors import SameProcess
from kvtcd.core.device_regions import MAX_MESSAGE, DeviceOffer
from kvtcd.core.errors import BadRequest, KvtcdError
from kvtcd.core.problem import kind_of, problem
from kvtcd.core.regions import HELLO, Grant

_log = logging.getLogger(__name__)
_FDS = 4
"""Descriptors taken from one message, so that those which are too many can be closed."""
_BACKLOG = 16
_PAUSE_S = 1.0


@dataclass(slots=True)
class _Link:
    """A connection: until it has said what it shares, while that is opened, and then."""

    given_up: asyncio.TimerHandle
    opening: bool = False
    region: str | None = None


class SideSocket:
    """Accepts connections that share memory. It belongs to the loop that runs when it is made.

    Args:
        listening: a ``SOCK_SEQPACKET`` that listens; closed with it.
        regions: where what is shared is known.
        identify: returns the caller at the other end of a connection.
        limits: one connection beyond them is closed at once, and one that shares nothing in time too.
    """

    def __init__(
        self,
        listening: socket.socket,
        regions: Regions,
        identify: Callable[[socket.socket], Caller],
        limits: Limits,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening, self._regions, self._identify, self._limits = listening, regions, identify, limits
        self._open: dict[socket.socket, _Link] = {}
        self._openings: set[asyncio.Task[None]] = set()
        listening.settimeout(0)
        self._again: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Accept no more, and end every connection with its region."""
        if self._again:
            self._again.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for connection in list(self._open):
            self._end(connection)

    async def ended(self) -> None:
        """Wait until what was being opened has been, and is removed again; once it is closed."""
        while self._openings:
            await asyncio.wait(self._openings)

    def _listen(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_BACKLOG):
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left: those who wait go on waiting, for a while unasked
                self._loop.remove_reader(self._listening)
                self._again = self._loop.call_later(_PAUSE_S, self._listen)
                return
            if len(self._open) >= self._limits.connections:
                connection.close()
                continue
            connection.settimeout(0)
            self._open[connection] = _Link(self._loop.call_later(self._limits.stall_s, self._end, connection))
            self._loop.add_reader(connection, self._heard, connection)

    def _heard(self, connection: socket.socket) -> None:
        link = self._open[connection]
        fds: list[int] = []
        try:
            message, fds, flags, _ = socket.recv_fds(connection, MAX_MESSAGE, _FDS)
            if link.opening or link.region or (not message and not fds):
                self._end(connection)  # it has nothing more to say, or has gone
                return
            link.given_up.cancel()
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise BadRequest(
                    "message", f"is longer than {MAX_MESSAGE} bytes, or has too many descriptors"
                )
            if message == HELLO and len(fds) == 1:
                self._shares(connection, link, self._regions.add(self._identify(connection).tenant, fds[0]))
            elif message.startswith(HELLO) and message != HELLO and not fds:
                offer, tenant = DeviceOffer.from_message(message), self._identify(connection).tenant
                link.opening = True
                opening = asyncio.ensure_future(self._opened(connection, link, tenant, offer))
                self._openings.add(opening)
                opening.add_done_callback(self._openings.discard)
            else:
                why = f"is neither {HELLO.hex()} with one descriptor, nor that and a JSON object with none"
                raise BadRequest("message", why)
        except BlockingIOError:
            pass
        except OSError:
            self._end(connection)
        except KvtcdError as error:
            self._refuse(connection, error)
        finally:
            for fd in fds:
                os.close(fd)

    async def _opened(self, connection: socket.socket, link: _Link, tenant: str, offer: DeviceOffer) -> None:
        """Have memory of a GPU opened; who has gone meanwhile shares nothing."""
        error: KvtcdError | None = None
        try:
            grant = await self._grant(connection, tenant, offer)
        except KvtcdError as refusal:
            error = refusal
        except Exception:  # noqa: BLE001 - logged; it ends this connection, and no other
            _log.exception("unexpected failure while memory of a GPU was opened")
        else:
            if connection in self._open:
                self._shares(connection, link, grant)
            else:
                self._regions.remove(grant.region, connection.close)
            return
        link.opening = False
        if connection not in self._open:
            connection.close()
        elif error:
            self._refuse(connection, error)
        else:
            self._end(connection)

    async def _grant(self, connection: socket.socket, tenant: str, offer: DeviceOffer) -> Grant:
        if is_own(connection):
            raise SameProcess
        return await self._regions.open(tenant, offer, partial(self._drop, connection))

    def _shares(self, connection: socket.socket, link: _Link, grant: Grant) -> None:
        link.opening, link.region = False, grant.region
        self._answer(connection, grant.to_json())

    def _refuse(self, connection: socket.socket, error: KvtcdError) -> None:
        if kind := kind_of(error):
            self._answer(connection, problem(kind, error))
        self._end(connection)

    def _answer(self, connection: socket.socket, body: dict[str, object]) -> None:
        with suppress(OSError):  # it has gone, which the next look at it shows
            connection.send(json.dumps(body).encode())

    def _drop(self, connection: socket.socket) -> None:
        """End a connection whose region is of no more use, if it has not ended yet."""
        if connection in self._open:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        link = self._open.pop(connection)
        self._loop.remove_reader(connection)
        link.given_up.cancel()
        if link.region:
            # Who ends a region and waits for this end of the connection knows then that nothing writes to it.
            self._regions.remove(link.region, connection.close)
        elif not link.opening:  # or it is closed once that has ended
            connection.close()
