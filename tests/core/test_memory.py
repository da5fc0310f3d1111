"""How much memory a block takes while nothing happens to it."""

from __future__ import annotations

import gc
import hashlib
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import get_args

import pytest

from kvtcd.core import events as ev
from kvtcd.core.catalog import Catalog
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place
from kvtcd.core.policy import Evict, EvictName, Policy
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings

BLOCKS, CHAIN = 15_000, 50


def key(number: int) -> RecordKey:
    """Return a new object each time, as an HMAC does."""
    return RecordKey(hashlib.sha256(b"%d" % number).digest())


def catalog_of(policy: EvictName) -> Catalog:
    sightings = Sightings(width=64)
    rules = Policy("p", evict=Evict(policy))
    tiers = shelves(rules, sightings, host=1 << 50, disk=1 << 50, granule=1)
    catalog = Catalog(tiers, lambda nbytes: nbytes, sightings)
    catalog.handle(ev.Govern(1, "tenant", rules))
    return catalog


def recover(catalog: Catalog, blocks: int) -> None:
    for number in range(blocks):
        place = number % CHAIN
        parent = key(number - 1) if place else None
        size = (number * 37 % 64 + 1) * 4096
        catalog.handle(ev.Recovered((ev.Found(key(number), 1, 512, 7 << 20, size, parent, 512 * place),)))


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Yield what tells how many bytes more are in use now."""

    def taken() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    gc.collect()
    tracemalloc.start()
    yield taken
    tracemalloc.stop()


@pytest.mark.parametrize("policy", get_args(EvictName))
def test_a_block_on_disk_takes_at_most_400_bytes(policy) -> None:
    catalog = catalog_of(policy)
    with traced() as taken:
        recover(catalog, BLOCKS)

        assert taken() / BLOCKS <= 400


def test_each_further_copy_takes_at_most_150_bytes() -> None:
    blocks = 2_000
    catalog = catalog_of("lfu")
    with traced() as taken:
        recover(catalog, blocks)
        for number in range(blocks):
            catalog.room.refill_later(key(number))
            catalog.handle(ev.Tick())
            catalog.handle(ev.Moved(key(number), 4096))
        packed = taken()
        for number in range(blocks):
            catalog.handle(ev.Prefetch(number, key(number)))
            catalog.handle(ev.Moved(key(number), 7 << 20))
        both = taken()
        entry = catalog.residents.entries[key(0)]

        assert entry.copies.keys() == {Place.HOST, Place.PACKED, Place.DISK}
        assert packed / blocks <= 400 + 150
        assert (both - packed) / blocks <= 150
