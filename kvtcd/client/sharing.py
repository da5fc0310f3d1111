"""The connection on the side socket by which memory is shared with the daemon, as long as it is open."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from kvtcd.client.address import Address
from kvtcd.client.call import problem
from kvtcd.core.device_errors import DeviceUnshared
from kvtcd.core.errors import Corrupt, KvtcdError, Unavailable
from kvtcd.core.fields import json_object
from kvtcd.core.regions import MAX_ANSWER, Grant, side_socket

CONNECT_S = 5.0
CLOSED = "the region is closed"
REFUSED_S = 30.0
"""How long a daemon that cannot open memory is not asked again."""


class Sharing:
    """Memory and the daemon that shares it, or why none does. Any thread may use it.

    Args:
        address: of the daemon.
        say: sends what the daemon has to know of the memory.

    Attributes:
        why: why it is not shared, if so.
    """

    def __init__(self, address: Address, say: Callable[[socket.socket], object]) -> None:
        self._address, self._say = address, say
        self._lock = threading.Lock()
        self._shared: tuple[socket.socket, str] | None = None
        self._not_before = 0.0
        self.closed = False
        self.why = ""

    @property
    def is_shared(self) -> bool:
        """Whether the daemon has it, as far as is known."""
        return self._shared is not None

    def share(self) -> str | None:
        """Return under which id the daemon knows it, None if it cannot; tries to share it if it is not."""
        with self._lock:
            if self._shared is None and not self.closed and time.monotonic() >= self._not_before:
                try:
                    self._shared = self._hand_over()
                    self.why = ""
                except KvtcdError as error:
                    self.why = str(error)
                    if isinstance(error, DeviceUnshared):
                        self._not_before = time.monotonic() + REFUSED_S
            return self._shared[1] if self._shared else None

    def recall(self, why: str, region: str | None = None) -> bool:
        """Share it no more, if it is under this id, and wait until the daemon touches it no more.

        False: the daemon does not say so. `why` is what is said until it is shared again.
        """
        with self._lock:
            if self._shared is None or region not in {None, self._shared[1]}:
                return True
            connection, _ = self._shared
            self._shared, self.why = None, why
        with connection:
            try:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1):
                    pass
            except TimeoutError:
                return False
            except OSError:
                pass  # it is gone, and all that it did with it
        return True

    def close(self) -> bool:
        """Share it no more, at once; tell whether that is new."""
        with self._lock:
            closed, self.closed = self.closed, True
            if self._shared:
                self._shared[0].close()
                self._shared = None
            self.why = CLOSED
            return not closed

    def _hand_over(self) -> tuple[socket.socket, str]:
        """Return the connection that keeps it shared, and the id of the region.

        Raises:
            KvtcdError: it cannot be had, and why.
        """
        if self._address.socket is None:
            raise Unavailable(f"memory is shared on a Unix socket only, not on {self._address}")
        path = side_socket(self._address.socket)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(CONNECT_S)
            connection.connect(path)
            self._say(connection)
            return connection, _granted(connection.recv(MAX_ANSWER)).region
        except (OSError, Corrupt) as error:
            connection.close()
            raise Unavailable(f"the daemon shares no memory on {path}: {error}") from None
        except BaseException:
            connection.close()
            raise


def _granted(answer: bytes) -> Grant:
    body = json_object(answer)
    if "region" not in body:
        raise problem(int(body.get("status", 0)), answer)
    return Grant.from_json(body)
