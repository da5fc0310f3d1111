"""HTTP/1.1 with the standard library, over a Unix socket or TCP; connections are kept and used again."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvtcd.client.address import Address
from kvtcd.client.call import Call
from kvtcd.core.errors import DeadlineExceeded, Unavailable

PIECE = 1 << 20
GRACE_S = 10.0
"""How much longer than the daemon's deadline an answer is waited for."""


class Connection(http.client.HTTPConnection):
    """One connection to an address."""

    def __init__(self, address: Address) -> None:
        super().__init__(address.host, address.port)
        self._socket_path, self._headers, self._tls = address.socket, address.headers(), address.tls

    def connect(self) -> None:
        """Open it."""
        if self._socket_path is None:
            super().connect()
            if self._tls is not None:
                self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self.timeout)
        try:
            sock.connect(self._socket_path)
        except BaseException:
            sock.close()
            raise
        self.sock = sock

    def exchange(self, call: Call[Any], timeout: float) -> http.client.HTTPResponse:
        """Send a request; return the answer with its body still to be read."""
        self.timeout = timeout
        if self.sock is not None:
            self.sock.settimeout(timeout)
        self.putrequest(call.method, call.path, skip_accept_encoding=True)
        for name, value in (self._headers | dict(call.headers)).items():
            self.putheader(name, value)
        if call.body:
            self.putheader("Content-Length", str(call.nbytes))
        self.endheaders()
        try:
            for part in call.body:
                view = memoryview(part)
                for start in range(0, len(view), PIECE):  # the timeout is for each piece
                    self.send(view[start : start + PIECE])
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
            pass  # refused before its end: the answer says why
        return self.getresponse()


IDLE = 8
"""Connections to keep: a call that must not be sent twice opens one of its own each time."""


class Pool:
    """Connections to one daemon. Any thread may use it; a connection belongs to one exchange at a time.

    Args:
        address: where the daemon is.
        timeout: seconds for each read and write on the socket.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self._address, self._timeout = address, timeout
        self._idle: list[Connection] = []  # appended and popped atomically by several threads

    @contextmanager
    def exchange(self, call: Call[Any]) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield the answer. What is left unread of it costs the connection.

        Raises:
            Unavailable: no daemon there, or it broke off.
            DeadlineExceeded: it did not answer in time.
        """
        timeout = max(self._timeout, (call.deadline or 0.0) + GRACE_S)
        try:
            connection, response = self._send(call, timeout)
            try:
                yield response
            except BaseException:
                connection.close()
                raise
            if response.isclosed() and not response.will_close and len(self._idle) < IDLE:
                self._idle.append(connection)
            else:
                connection.close()
        except TimeoutError:
            raise DeadlineExceeded("the daemon's answer", timeout) from None
        except (ConnectionError, ssl.SSLError, http.client.HTTPException) as error:
            raise Unavailable(
                f"the daemon on {self._address} broke off: {str(error) or type(error).__name__}"
            ) from None

    def _send(self, call: Call[Any], timeout: float) -> tuple[Connection, http.client.HTTPResponse]:
        """Send on a kept connection, and once more on a new one if the daemon had closed it meanwhile."""
        if call.repeatable and (kept := self._take()) is not None:
            try:
                return kept, kept.exchange(call, timeout)
            except (ConnectionError, ssl.SSLError):
                kept.close()
                self.close()  # those that are as old have the same fate
            except BaseException:
                kept.close()
                raise
        connection = self._open(timeout)
        try:
            return connection, connection.exchange(call, timeout)
        except BaseException:
            connection.close()
            raise

    def _take(self) -> Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _open(self, timeout: float) -> Connection:
        connection = Connection(self._address)
        connection.timeout = timeout
        try:
            connection.connect()
        except TimeoutError:
            raise
        except OSError as error:
            raise self._address.unavailable(error) from None
        return connection

    def close(self) -> None:
        """Close what is idle."""
        while (connection := self._take()) is not None:
            connection.close()


def fill(response: http.client.HTTPResponse, view: memoryview, *, may_end: bool = False) -> bool:
    """Fill a view from a body, without a copy in between; False: the body ended before its first byte."""
    filled = 0
    while filled < len(view):
        n = response.readinto(view[filled:])
        if not n:
            if may_end and not filled:
                return False
            raise http.client.IncompleteRead(b"", len(view) - filled)
        filled += n
    return True
