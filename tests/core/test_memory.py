"""How much memory a block takes while nothing happens to it."""

from __future__ import annotations

import gc
import hashlib
import tracemalloc

import pytest

from kvtcd.core import events as ev
from kvtcd.core.catalog import Catalog
from kvtcd.core.keys import RecordKey
from kvtcd.core.policy import Evict, Policy
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings

BLOCKS, CHAIN = 15_000, 50


def key(number: int) -> RecordKey:
    """Return a new object each time, as an HMAC does."""
    return RecordKey(hashlib.sha256(b"%d" % number).digest())


@pytest.mark.parametrize("policy", ["lru", "lfu", "arc", "s3fifo"])
def test_a_block_on_disk_takes_at_most_400_bytes(policy) -> None:
    sightings = Sightings(width=64)
    rules = Policy("p", evict=Evict(policy))
    tiers = shelves(rules, sightings, host=1 << 30, disk=1 << 50, granule=1)
    catalog = Catalog(tiers, lambda nbytes: nbytes, sightings)
    catalog.handle(ev.Govern(1, "tenant", rules))
    gc.collect()
    tracemalloc.start()
    for number in range(BLOCKS):
        place = number % CHAIN
        parent = key(number - 1) if place else None
        size = (number * 37 % 64 + 1) * 4096
        catalog.handle(ev.Recovered((ev.Found(key(number), 1, 512, 7 << 20, size, parent, 512 * place),)))
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert taken / BLOCKS <= 400
