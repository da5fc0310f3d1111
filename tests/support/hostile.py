"""A crowd that wishes a daemon ill, and what a healthy client feels of it.

``PYTHONPATH=tests python -m support.hostile`` prints the figures: of 2,000 matches of a healthy
client without a crowd, with one of up to 10,000 connections that stay, and while such crowds come
and go without end; and of the daemon's memory, its peak included.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block

from kvtcd.api.connection import HEAD_BYTES
from kvtcd.client import BlockHead, Client
from kvtcd.core.keys import EngineKey
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 10_000
KEYS = [EngineKey(bytes([number])) for number in range(16)]
_HEAD = b"PUT /v1/namespaces/demo/blocks/ff%02x?tokens=%d HTTP/1.1\r\nHost: kvtcd\r\n"
_BODY = b"Content-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n"


def room(descriptors: int) -> int:
    """Return the connections that this process may open, each of so many descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MOST, (soft - 500) // descriptors)


def opening(number: int) -> bytes:
    """Return what the n-th of a crowd sends, and no more after it.

    Nothing, half a head, a head and three bytes of its body, or headers without end: as many as a
    connection may have waiting, or a hundred as long as a line may be.
    """
    head = _HEAD % (number % 256, BLOCK_TOKENS)
    begun = head[: len(head) // 2], head + _BODY % BLOCK_BYTES + b"abc"
    return (b"", *begun, head + _headers(HEAD_BYTES // 8000), head + _headers(100))[number % 5]


@cache
def _headers(count: int) -> bytes:
    """Return so many headers of 8,000 bytes, the last of which does not end."""
    return b"".join(b"X-%d: %s\r\n" % (number, b"a" * 7990) for number in range(count))[:-2]


@contextmanager
def crowd(path: Path, size: int) -> Iterator[list[socket.socket]]:
    """Open connections that never get to the end of what they begin."""
    members = []
    try:
        for number in range(size):
            one = socket.socket(socket.AF_UNIX)
            one.connect(str(path))  # waits while the backlog is full
            one.settimeout(60)
            with suppress(ConnectionError):
                one.sendall(opening(number))
            members.append(one)
        yield members
    finally:
        for one in members:
            one.close()


def matches(client: Client, count: int) -> list[float]:
    """Return the seconds that matches took, the shortest first."""
    took = []
    for _ in range(count):
        begun = time.perf_counter()
        assert client.match("demo", KEYS).prefix_blocks == len(KEYS)
        took.append(time.perf_counter() - begun)
    return sorted(took)


def memory_mib(pid: int, what: str = "VmRSS") -> float:
    """Return the memory of a process: what it has now, or had at most (``VmHWM``)."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows[what].split()[0]) / 1024


@contextmanager
def hostile_to(folder: Path) -> Iterator[tuple[Daemon, Client]]:
    """Run a daemon that has some blocks, and a client of it that means no harm."""
    daemon = Daemon(folder, host=64 << 20, disk=64 << 20, profiles=folder / "profiles")
    with daemon, daemon.client() as client:
        client.register("demo", IDENTITY)
        for number, key in enumerate(KEYS):
            client.put("demo", BlockHead(key, BLOCK_TOKENS, number * BLOCK_TOKENS), block(number))
        yield daemon, client


def storm(path: Path) -> None:
    """Be one crowd after the other, until somebody ends it."""
    while True:
        with crowd(path, room(1)):
            pass


def main() -> None:
    """Print the figures as JSON, or be a storm."""
    if sys.argv[1:]:
        storm(Path(sys.argv[1]))
    with (
        tempfile.TemporaryDirectory(prefix="kvtcd-crowd-") as name,
        hostile_to(Path(name)) as (daemon, client),
    ):
        alone, before = matches(client, 2000), memory_mib(daemon.pid)
        with crowd(daemon.socket, room(1)) as members:
            crowded, size = matches(client, 2000), len(members)
        with subprocess.Popen([sys.executable, "-m", "support.hostile", str(daemon.socket)]) as other:
            stormed = matches(client, 2000)
            other.kill()
        peak = memory_mib(daemon.pid, "VmHWM")
    figures = {
        "connections": size,
        "match_p50_ms": [round(took[len(took) // 2] * 1e3, 2) for took in (alone, crowded, stormed)],
        "match_p99_ms": [round(took[len(took) * 99 // 100] * 1e3, 2) for took in (alone, crowded, stormed)],
        "match_most_ms": [round(took[-1] * 1e3, 2) for took in (alone, crowded, stormed)],
        "rss_mib": [round(before), round(peak)],
        "load": os.getloadavg()[0],
    }
    print(json.dumps(figures))  # noqa: T201 - this is what it is for


if __name__ == "__main__":
    main()
