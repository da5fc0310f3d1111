"""A daemon as a service manager runs it: sockets are handed over, what it says is heard."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from support.patience import PATIENCE_S

from kvtcd.client import Client
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_LAUNCHER = """
import os, sys
prelude, config, *descriptors = sys.argv[1:]
for place, descriptor in enumerate(map(int, descriptors), start=3):
    os.dup2(descriptor, place)
os.environ["LISTEN_PID"] = str(os.getpid())
exec(prelude)
from kvtcd.cli import main
sys.argv = ["kvtcd", "serve", "--config", config]
main()
"""


class Supervised:
    """One process of a daemon.

    Attributes:
        heard: every message that it has sent so far, one list of lines each.
    """

    def __init__(self, process: subprocess.Popen[bytes], inbox: socket.socket, path: Path, log: Path) -> None:
        self.process, self.log, self.path = process, log, path
        self.heard: list[list[str]] = []
        self._inbox = inbox

    def listen(self, seconds: float) -> list[list[str]]:
        """Return what is said within so many seconds."""
        before, end = len(self.heard), time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._hear(left)
        return self.heard[before:]

    def forget(self) -> None:
        """Take in what has been said so far, so that what is heard from now on was said from now on."""
        before = -1
        while before < len(self.heard):
            before = len(self.heard)
            self._hear(0)

    def _hear(self, seconds: float) -> None:
        self._inbox.settimeout(seconds)
        try:
            self.heard.append(self._inbox.recv(4096).decode().split("\n"))
        except (TimeoutError, BlockingIOError):
            return

    def until(self, field: str, *, seconds: float = PATIENCE_S) -> list[str]:
        """Wait for the next message that has this field, and return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            before = len(self.heard)
            self._hear(0.2)
            if len(self.heard) > before and field in self.heard[-1]:
                return self.heard[-1]
        raise AssertionError(f"no {field} in {self.heard}\n{self.log.read_text()}")

    def listen_until(self, true: Callable[[], object]) -> None:
        """Listen until something is true: a daemon whose messages nobody takes waits with them."""
        eventually(lambda: (self.listen(0.05), true())[1])

    def client(self) -> Client:
        """Return a client of this daemon."""
        return Client(self.path)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def stop(self) -> int:
        """Tell it to end, and return its exit status."""
        self.process.terminate()
        return self.ended()

    def ended(self) -> int:
        """Wait for its end, and return its exit status."""
        return self.process.wait(PATIENCE_S)


@contextmanager
def supervised(
    daemon: Daemon,
    *,
    sockets: Sequence[tuple[str, socket.socket]] = (),
    prelude: str = "",
    **environment: str,
) -> Iterator[Supervised]:
    """Start the daemon of a folder; it is killed at the end, if it has not ended by then.

    Args:
        daemon: whose configuration is used.
        sockets: handed over under these names.
        prelude: Python that is run in the process before anything of ours.
        environment: more variables.
    """
    folder = daemon.config.parent
    address = folder / "notify"
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox, daemon.log.open("ab") as log:
        inbox.bind(str(address))
        descriptors = [inheritable(found) for _, found in sockets]
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, prelude, str(daemon.config), *map(str, descriptors)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=descriptors,
            env=os.environ
            | {"NOTIFY_SOCKET": str(address), "PYTHONUNBUFFERED": "1"}
            | ({"LISTEN_FDS": str(len(sockets))} if sockets else {})
            | ({"LISTEN_FDNAMES": ":".join(name for name, _ in sockets)} if sockets else {})
            | environment,
        )  # fmt: skip
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            yield Supervised(process, inbox, daemon.socket, daemon.log)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def inheritable(found: socket.socket) -> int:
    """Return a copy of a descriptor, out of the way of those that are handed over."""
    return fcntl.fcntl(found.fileno(), fcntl.F_DUPFD, 100)


def listening(path: Path | str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Return a Unix socket as a socket unit makes it."""
    found = socket.socket(socket.AF_UNIX, kind)
    found.bind(str(path))
    found.listen(128)
    return found


def eventually(true: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait until something is true; fail when it does not become so."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
