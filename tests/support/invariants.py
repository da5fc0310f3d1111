"""Every rule that a catalog must hold between two events."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvtcd.core.entry import State
from kvtcd.core.events import Tier

if TYPE_CHECKING:
    from kvtcd.core.catalog import Catalog


def check(catalog: Catalog) -> None:
    """Assert every invariant; the messages name the rule of `core.catalog` that is broken."""
    residents, room = catalog.residents, catalog.room
    used: Counter[Tier] = Counter()
    leaving: Counter[Tier] = Counter()
    demoting = 0
    for key, entry in residents.entries.items():
        assert entry.copies, "1: a block without copies is forgotten"
        assert entry.pins >= 0
        if entry.pins:
            assert entry.ready(Tier.HOST), "3: a pinned host copy is READY and stays"
        transfer = entry.transfer
        if transfer:
            assert entry.ready(transfer.source), "2: a source is READY while its transfer runs"
            assert entry.copies[transfer.target].state is State.FILLING
            demoting += transfer.target is Tier.DISK
            if transfer.leaving:
                leaving[transfer.source] += entry.copies[transfer.source].nbytes
        if room.promotions.get(key):
            assert not entry.ready(Tier.HOST), "nobody waits for what is there"
            assert not entry.doomed
        for tier, copy in entry.copies.items():
            used[tier] += copy.nbytes
            assert (copy.rank is not None) == (copy.state is State.READY), (
                "the order knows exactly the READY copies"
            )
            if copy.state is State.DROPPING:
                leaving[tier] += copy.nbytes
            if copy.state is State.FILLING and tier is Tier.DISK:
                assert transfer, "only a transfer fills the disk"
        if not entry.doomed and not entry.transfer and not entry.pins and entry.evict:
            assert not (entry.ready(Tier.HOST) and entry.ready(Tier.DISK)), "who is to leave, leaves"
        if entry.parent is not None:
            assert entry in residents.lineage.children(entry.parent)
        continuing = [child for child in residents.entries.values() if child.parent == key]
        assert set(continuing) == set(residents.lineage.children(key))
        assert entry.children == sum(child.ready(tier) for child in continuing for tier in Tier)
        assert entry.host_children == sum(child.ready(Tier.HOST) for child in continuing)
    for tier, shelf in residents.shelves.items():
        assert used[tier] == shelf.used, "sums agree with their parts"
        assert leaving[tier] == shelf.leaving
        assert shelf.used <= shelf.capacity, "5: room is reserved before bytes move"
        ready = {key for key, entry in residents.entries.items() if entry.ready(tier)}
        assert shelf.blocks == len(ready)
        assert set(shelf.held) <= ready
        for key in shelf.held:
            assert residents.entries[key].continued(tier), "only what others continue is held"
    assert demoting == room.demoting
    for key in (*room.promotions, *room.demotions):
        assert key in residents.entries, "a queue holds only known blocks"
    for put in room.puts.values():
        assert put.nbytes <= residents.shelves[Tier.HOST].capacity
