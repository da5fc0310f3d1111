"""The service manager that started this process: what it hands over, and what it is told.

The protocols are those of sd_notify(3), sd_listen_fds(3), sd_watchdog_enabled(3), and of credentials in
systemd.exec(5). They are plain environment variables, sockets and files, so other managers speak them too;
without any, nothing is handed over and nobody is told.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from kvtcd.core.errors import ConfigError

_log = logging.getLogger(__name__)
_FIRST_DESCRIPTOR = 3
"""SD_LISTEN_FDS_START: behind standard input, output and error."""
_SEND_S = 2.0
"""How long the manager may keep a message waiting: those who tell it something are on the event loop."""


class Supervisor:
    """Told what becomes of the daemon; does nothing where nobody asked for it.

    Args:
        environment: with ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``.

    Attributes:
        watchdog: seconds after which a silent daemon is killed, None if nobody watches.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.watchdog = _watchdog(environment)
        self._socket: socket.socket | None = None
        if address := environment.get("NOTIFY_SOCKET"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.settimeout(_SEND_S)
            try:
                self._socket.connect("\0" + address[1:] if address.startswith("@") else address)
            except OSError as error:
                _log.warning("the service manager cannot be told anything: %s", error)
                self.close()

    def tell(self, *fields: str, status: str | None = None) -> None:
        """Send one message.

        Args:
            fields: such as ``READY=1``.
            status: a line for people.
        """
        if self._socket is None:
            return
        lines = [*fields] if status is None else [*fields, "STATUS=" + " ".join(status.split())]
        try:
            self._socket.send("\n".join(lines).encode())
        except OSError as error:
            _log.warning(
                "the service manager was not told %s: %s", fields[0] if fields else "a status", error
            )

    def close(self) -> None:
        """Tell nobody anything any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _watchdog(environment: Mapping[str, str]) -> float | None:
    """Return the seconds of the watchdog, if it is this process that it watches."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    period = environment.get("WATCHDOG_USEC", "")
    return int(period) / 1e6 if period.isdecimal() and int(period) else None


def inherited(environment: MutableMapping[str, str]) -> list[tuple[str, socket.socket]]:
    """Return the sockets that the manager listens on for this process, each with its ``FileDescriptorName``.

    They are handed over once, and to no child: the variables are removed.

    Raises:
        ConfigError: one of them is not a socket that listens.
    """
    meant = environment.pop("LISTEN_PID", "")
    count, names = environment.pop("LISTEN_FDS", ""), environment.pop("LISTEN_FDNAMES", "")
    if meant != str(os.getpid()) or not count.isdecimal():
        return []
    named = [*names.split(":"), *[""] * int(count)] if names else [""] * int(count)
    sockets = []
    for number, name in enumerate(named[: int(count)], start=_FIRST_DESCRIPTOR):
        os.set_inheritable(number, False)  # noqa: FBT003 - takes no keyword
        sockets.append((name, _listening(number, name)))
    return sockets


def _listening(descriptor: int, name: str) -> socket.socket:
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        raise ConfigError("LISTEN_FDS", name, "is not a socket") from None
    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        found.close()
        raise ConfigError("LISTEN_FDS", name, "does not listen; the socket unit must say Accept=no")
    return found


def credential(environment: Mapping[str, str], name: str) -> bytes | None:
    """Return the content of a credential (``LoadCredential=``), None if there is none of this name.

    Raises:
        ConfigError: it cannot be read.
    """
    folder = environment.get("CREDENTIALS_DIRECTORY")
    if not folder:
        return None
    path = Path(folder) / name
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {error.strerror}") from None
