"""The side socket: where a client hands over memory, and keeps it shared as long as it stays connected."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from kvtcd.api.limits import Limits
from kvtcd.api.regions import Regions
from kvtcd.core.access import Caller
from kvtcd.core.errors import BadRequest, KvtcdError
from kvtcd.core.problem import kind_of, problem
from kvtcd.core.regions import HELLO

_FDS = 4
"""Descriptors taken from one message, so that those which are too many can be closed."""
_BACKLOG = 16
_PAUSE_S = 1.0


class SideSocket:
    """Accepts connections that share memory. It belongs to the loop that runs when it is made.

    Args:
        listening: a ``SOCK_SEQPACKET`` that listens; closed with it.
        regions: where what is shared is known.
        identify: returns the caller at the other end of a connection.
        limits: one connection beyond them is closed at once, and one that sends no descriptor in time too.
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
        self._open: dict[socket.socket, str | asyncio.TimerHandle] = {}
        """What each connection shares; until then, when it is given up."""
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
            self._open[connection] = self._loop.call_later(self._limits.stall_s, self._end, connection)
            self._loop.add_reader(connection, self._heard, connection)

    def _heard(self, connection: socket.socket) -> None:
        shared = self._open[connection]
        fds: list[int] = []
        try:
            message, fds, flags, _ = socket.recv_fds(connection, len(HELLO) + 1, _FDS)
            if isinstance(shared, str) or (not message and not fds):
                self._end(connection)  # it has nothing more to say, or has gone
                return
            shared.cancel()
            if message != HELLO or len(fds) != 1 or flags & socket.MSG_CTRUNC:
                raise BadRequest("message", f"is not {HELLO.hex()} with one descriptor")
            grant = self._regions.add(self._identify(connection).tenant, fds[0])
            self._open[connection] = grant.region
            self._answer(connection, grant.to_json())
        except BlockingIOError:
            pass
        except OSError:
            self._end(connection)
        except KvtcdError as error:
            if kind := kind_of(error):
                self._answer(connection, problem(kind, error))
            self._end(connection)
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(self, connection: socket.socket, body: dict[str, object]) -> None:
        with suppress(OSError):  # it has gone, which the next look at it shows
            connection.send(json.dumps(body).encode())

    def _end(self, connection: socket.socket) -> None:
        shared = self._open.pop(connection)
        self._loop.remove_reader(connection)
        if isinstance(shared, str):
            # Who ends a region and waits for this end of the connection knows then that nothing writes to it.
            self._regions.remove(shared, connection.close)
        else:
            shared.cancel()
            connection.close()
