"""Ways for the bytes of a block to get from one process to another and back, all timed in the same manner."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvtcd.client import BlockHead, Client
from kvtcd.core.keys import EngineKey

if TYPE_CHECKING:
    from redis import Redis

Verb = Literal["get", "put"]
_PIECE = 1 << 20
_TAKE, _GIVE = b"T", b"G"
_PATIENCE_S = 20.0


class Carrier(ABC):
    """One way.

    Args:
        memory: of this process; its first bytes are moved.
        pids: of the other processes that work for it.
    """

    def __init__(self, memory: memoryview, *pids: int) -> None:
        self.memory, self._pids = memory, pids

    def move(self, verb: Verb, nbytes: int) -> None:
        """Bring bytes there, or bring back what was brought there last."""
        (self._put if verb == "put" else self._get)(nbytes)

    def tidy(self) -> None:  # noqa: B027 - most have nothing to do
        """Make room for the next block; not timed."""

    def spent(self) -> float:
        """Return the seconds of CPU that all its processes have used so far."""
        return time.process_time() + sum(map(_spent, self._pids))

    @abstractmethod
    def _put(self, nbytes: int) -> None: ...

    @abstractmethod
    def _get(self, nbytes: int) -> None: ...


def _spent(pid: int) -> float:
    """Seconds of CPU of all threads of a process; its `stat` counts in hundredths only."""
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            nanoseconds += int((thread / "schedstat").read_text("ascii").split()[0])
    return nanoseconds / 1e9


class Blocks(Carrier):
    """Blocks of a namespace of the daemon, into and out of memory that is used again."""

    def __init__(self, memory: memoryview, pid: int, client: Client, name: str, tokens: int) -> None:
        super().__init__(memory, pid)
        self._client, self._name, self._tokens, self._count = client, name, tokens, 0

    def _key(self) -> EngineKey:
        return EngineKey(f"{self._name}-{self._count:08}".encode())

    def _put(self, nbytes: int) -> None:
        self._count += 1
        head = BlockHead(self._key(), self._tokens, first_token=0)
        stored = self._client.put(self._name, head, self.memory[:nbytes])
        assert stored.outcome == "stored", stored

    def _get(self, nbytes: int) -> None:
        self._client.get(self._name, self._key(), out=self.memory[:nbytes])

    def tidy(self) -> None:  # noqa: D102 - as above
        self._client.delete(self._name, self._key())


class Memcpy(Carrier):
    """From memory to memory of one process: what no way is faster than."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._other = np.ones(len(memory), np.uint8)
        self._own = np.frombuffer(memory, np.uint8)

    def _put(self, nbytes: int) -> None:
        np.copyto(self._other[:nbytes], self._own[:nbytes])

    def _get(self, nbytes: int) -> None:
        np.copyto(self._own[:nbytes], self._other[:nbytes])


class Files(Carrier):
    """A file for each block, as file tiers do; the page cache is warm, and nothing is synced."""

    def __init__(self, memory: memoryview, folder: Path) -> None:
        super().__init__(memory)
        self._path = folder / "block"

    def _put(self, nbytes: int) -> None:
        with self._path.open("wb", buffering=0) as file:
            at = 0
            while at < nbytes:
                at += file.write(self.memory[at:nbytes])

    def _get(self, nbytes: int) -> None:
        with self._path.open("rb", buffering=0) as file:
            at = 0
            while at < nbytes:
                at += file.readinto(self.memory[at:nbytes])

    def tidy(self) -> None:  # noqa: D102 - as above
        self._path.unlink()


class RedisValues(Carrier):
    """Values of a Redis server on a Unix socket, through its maintained client."""

    def __init__(self, memory: memoryview, pid: int, redis: Redis) -> None:
        super().__init__(memory, pid)
        self._redis = redis

    def _put(self, nbytes: int) -> None:
        self._redis.set("block", self.memory[:nbytes])

    def _get(self, nbytes: int) -> None:
        value = self._redis.get("block")
        assert isinstance(value, bytes)
        self.memory[:nbytes] = value


class RawSocket(Carrier):
    """A socket with nothing on it but the bytes."""

    def __init__(self, memory: memoryview, pid: int, connection: socket.socket) -> None:
        super().__init__(memory, pid)
        self._connection = connection

    def _put(self, nbytes: int) -> None:
        self._connection.sendall(_TAKE + nbytes.to_bytes(8, "little"))
        self._connection.sendall(self.memory[:nbytes])
        _fill(self._connection, memoryview(bytearray(1)))

    def _get(self, nbytes: int) -> None:
        self._connection.sendall(_GIVE + nbytes.to_bytes(8, "little"))
        _fill(self._connection, self.memory[:nbytes])


def _fill(connection: socket.socket, view: memoryview) -> bool:
    filled = 0
    while filled < len(view):
        part = connection.recv_into(view[filled : filled + _PIECE])
        if not part:
            return False
        filled += part
    return True


@contextmanager
def raw_socket(memory: memoryview, family: socket.AddressFamily, folder: Path) -> Iterator[RawSocket]:
    """Yield a way through a bare socket to a process of its own."""
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.bind(str(folder / "raw") if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listening.listen(1)
        command = [sys.executable, "-m", __name__, str(listening.fileno()), str(len(memory))]
        with (
            subprocess.Popen(command, pass_fds=[listening.fileno()]) as peer,  # noqa: S603 - this very module
            socket.socket(family, socket.SOCK_STREAM) as connection,
        ):
            connection.connect(listening.getsockname())
            yield RawSocket(memory, peer.pid, connection)
    (folder / "raw").unlink(missing_ok=True)


@contextmanager
def redis_values(memory: memoryview, folder: Path) -> Iterator[RedisValues | None]:
    """Yield a way through a Redis server that is started for it; None where there is none, or no client."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None or find_spec("redis") is None:
        yield None
        return
    from redis import ConnectionError as NotYet  # noqa: PLC0415 - an extra
    from redis import Redis  # noqa: PLC0415 - an extra

    path = folder / "redis"
    options = [
        "--port",
        "0",
        "--unixsocket",
        str(path),
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(folder),
    ]
    with subprocess.Popen([server, *options], stdout=subprocess.DEVNULL) as process:  # noqa: S603 - found on PATH
        try:
            with Redis(unix_socket_path=str(path), socket_timeout=_PATIENCE_S) as redis:
                end = time.monotonic() + _PATIENCE_S
                while True:
                    with suppress(NotYet):
                        redis.ping()
                        break
                    if time.monotonic() > end:
                        yield None
                        return
                    time.sleep(0.05)
                yield RedisValues(memory, process.pid, redis)
        finally:
            process.terminate()


def _serve(listening: socket.socket, nbytes: int) -> None:
    """Be the other end of a `RawSocket`, until it is closed."""
    memory = memoryview(bytearray(nbytes))
    connection, _ = listening.accept()
    asked = memoryview(bytearray(9))
    with connection:
        while _fill(connection, asked):
            size = int.from_bytes(asked[1:], "little")
            if asked[:1] == _TAKE:
                _fill(connection, memory[:size])
                connection.sendall(b".")
            else:
                connection.sendall(memory[:size])


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
