"""Ports for those who cannot take over a socket that listens already."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free, and that nobody who connects somewhere gets by chance."""
    first = int(_HANDED_OUT.read_text().split()[0])
    for port in random.SystemRandom().sample(range(max(first - 20_000, 1025), first), 1000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")
