"""The most hits that any cache could have, knowing the future (Belady 1966)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from kvtcd.core.keys import RecordKey
from kvtcd.lab.trace import Request


def most_hits(requests: Sequence[Request], capacity: int) -> int:
    """Return the most blocks that can be hit as part of a leading prefix, with room for `capacity` blocks.

    After each request, of what was kept and what it brought, those are kept that are used again soonest. That
    is optimal for single blocks (they need not be kept at all), and for prefixes too: a prefix is used again
    no later than what continues it, and of blocks used again by the same request the end goes first.
    """
    upcoming = _next_uses(requests)
    kept: dict[RecordKey, tuple[float, int]] = {}
    """When each block kept is used next, and, negative, how deep it lies."""
    heap: list[tuple[float, int, RecordKey]] = []
    hits = 0
    for request, nexts in zip(requests, upcoming, strict=True):
        hits += next((n for n, key in enumerate(request.blocks) if key not in kept), len(request.blocks))
        for depth, (key, use) in enumerate(zip(request.blocks, nexts, strict=True)):
            kept.pop(key, None)
            if use < math.inf:
                kept[key] = (-use, -depth)
                heapq.heappush(heap, (-use, -depth, key))
        while len(kept) > capacity:
            use, depth, key = heapq.heappop(heap)
            if kept.get(key) == (use, depth):
                del kept[key]
    return hits


def _next_uses(requests: Sequence[Request]) -> list[list[float]]:
    """Return, for each block of each request, the number of the request that uses it next."""
    upcoming: dict[RecordKey, float] = {}
    nexts = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number].blocks
        nexts.append([upcoming.get(key, math.inf) for key in blocks])
        upcoming.update(dict.fromkeys(blocks, number))
    return nexts[::-1]
