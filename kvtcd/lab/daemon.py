"""A daemon of one's own, as a subprocess in a folder: started, stopped, killed, started again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtcd import config
from kvtcd.client import Client
from kvtcd.core.errors import Unavailable

START_SECONDS = 600.0
"""A million blocks on a machine with much other work take minutes; a daemon that ends is seen at once."""
_POLL = 0.05


class Daemon:
    """A daemon whose configuration, state and socket lie in `folder`.

    Used as a context it runs inside, and is stopped at the end; what it stored stays in the folder.

    Args:
        folder: where everything lies; created unless it exists. Keep the path short: a Unix socket's path
            has at most 107 bytes.
        host: bytes of host memory.
        disk: bytes of disk.
        profiles: folder of profiles.
        policy: a policy file; default: balanced.
        tcp: where it listens besides its socket.
        remote: a store that it shares with others.
        stop_seconds: how long it may take to stop.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: int,
        disk: int,
        profiles: Path,
        policy: Path | None = None,
        tcp: config.daemon.Tcp | None = None,
        remote: config.remote.Remote | None = None,
        stop_seconds: float = 60.0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.socket = folder / "kvtcd.sock"
        self.log = folder / "daemon.log"
        self.config = folder / "config.toml"
        self._stop_seconds = stop_seconds
        self._process: subprocess.Popen[bytes] | None = None
        settings = config.Config(
            daemon=config.daemon.Daemon(
                state=folder / "state", socket=self.socket, stop_seconds=stop_seconds
            ),
            tcp=tcp or config.daemon.Tcp(),
            host=config.daemon.Host(capacity=host),
            disk=config.daemon.Disk(capacity=disk),
            codec=config.daemon.Codec(profiles=profiles.absolute()),
            remote=remote or config.remote.Remote(),
            policies=(policy.absolute(),) if policy else (),
        )
        self.config.write_text(config.dump(settings))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Number of the process, while it runs."""
        assert self._process is not None, "it was started"
        return self._process.pid

    def client(self) -> Client:
        """Return a client of this daemon."""
        return Client(self.socket)

    def start(self) -> float:
        """Start it, wait until it is ready, and return how many seconds that took.

        Raises:
            Unavailable: it ended, or was not ready in time; the message ends with its log.
        """
        started = time.perf_counter()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-m", "kvtcd", "serve", "--config", str(self.config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        with self.client() as client:
            while not client.ready():
                if self._process.poll() is not None:
                    raise Unavailable(f"the daemon ended with {self._process.returncode}:\n{self._tail()}")
                if time.perf_counter() - started > START_SECONDS:
                    self.kill()
                    raise Unavailable(f"the daemon was not ready in {START_SECONDS:g} s:\n{self._tail()}")
                time.sleep(_POLL)
        return time.perf_counter() - started

    def stop(self) -> int:
        """Stop it as systemd would; return its exit status.

        Raises:
            Unavailable: it did not stop in its own time, and was killed.
        """
        if self._process is None:
            return 0
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            return self._process.wait(self._stop_seconds + 10)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Unavailable(f"the daemon did not stop:\n{self._tail()}") from None

    def kill(self) -> None:
        """Kill it without a word."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
