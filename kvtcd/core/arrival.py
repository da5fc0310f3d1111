"""What is said of a block that comes packed from another host."""

from __future__ import annotations

from typing import NamedTuple


class Arrival(NamedTuple):
    """A block that comes packed, from another host: bytes of it, and what is left of its time, in seconds."""

    nbytes: int
    ttl: int | None
