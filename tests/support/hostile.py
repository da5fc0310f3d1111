"""A crowd that wishes a daemon ill, and what a healthy client feels of it.

``PYTHONPATH=tests python -m support.hostile`` prints the figures: of 2,000 matches of a healthy
client without and with a crowd of up to 10,000 connections, and of the daemon's memory.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block

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
    """Return what the n-th of a crowd sends: nothing, half a head, or a head and three bytes of its body."""
    head = _HEAD % (number % 256, BLOCK_TOKENS)
    return (b"", head[: len(head) // 2], head + _BODY % BLOCK_BYTES + b"abc")[number % 3]


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


def _matches(client: Client, count: int) -> list[float]:
    took = []
    for _ in range(count):
        begun = time.perf_counter()
        assert client.match("demo", KEYS).prefix_blocks == len(KEYS)
        took.append(time.perf_counter() - begun)
    return sorted(took)


def _rss_mib(pid: int) -> float:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmRSS"].split()[0]) / 1024


def main() -> None:
    """Print the figures as JSON."""
    with tempfile.TemporaryDirectory(prefix="kvtcd-crowd-") as name:
        folder = Path(name)
        daemon = Daemon(folder, host=64 << 20, disk=64 << 20, profiles=folder / "profiles")
        with daemon, daemon.client() as client:
            client.register("demo", IDENTITY)
            for number, key in enumerate(KEYS):
                client.put("demo", BlockHead(key, BLOCK_TOKENS, number * BLOCK_TOKENS), block(number))
            alone, before = _matches(client, 2000), _rss_mib(daemon.pid)
            with crowd(daemon.socket, room(1)) as members:
                crowded, after = _matches(client, 2000), _rss_mib(daemon.pid)
                size = len(members)
    figures = {
        "connections": size,
        "match_p50_ms": [round(took[len(took) // 2] * 1e3, 2) for took in (alone, crowded)],
        "match_p99_ms": [round(took[len(took) * 99 // 100] * 1e3, 2) for took in (alone, crowded)],
        "rss_mib": [round(before), round(after)],
        "load": os.getloadavg()[0],
    }
    print(json.dumps(figures))  # noqa: T201 - this is what it is for


if __name__ == "__main__":
    main()
