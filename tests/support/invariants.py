"""Every rule that a catalog must hold between two events."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvtcd.core.entry import State
from kvtcd.core.events import Tier
from kvtcd.core.victims import victims

if TYPE_CHECKING:
    from kvtcd.core.catalog import Catalog
    from kvtcd.core.entry import Entry
    from kvtcd.core.residency import Residents


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
        transfer = residents.transfers.get(key)
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
        if not entry.doomed and not transfer and not entry.pins and entry.evict:
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
    assert residents.transfers.keys() | residents.superseding.keys() <= residents.entries.keys()
    for key in (*room.promotions, *room.demotions):
        assert key in residents.entries, "a queue holds only known blocks"
    for put in room.puts.values():
        assert put.nbytes <= residents.shelves[Tier.HOST].capacity


def checked_victims(residents: Residents, tier: Tier, excess: int) -> list[Entry]:
    """Return what `victims` does, once it is clear that it may: for use in its place."""
    chosen = victims(residents, tier, excess)
    ready = {entry for entry in residents.entries.values() if entry.ready(tier)}
    idle = {entry for entry in ready if not _in_use(residents, entry, tier)}
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= idle, "nothing in use makes room"
    if not residents.shelves[tier].leaves_first:
        assert _enough(chosen, tier, excess) or set(chosen) == idle
        return chosen
    gone: set[Entry] = set()
    for entry in chosen:
        if _continued(residents, entry, tier, gone):
            assert not [leaf for leaf in ready - gone if not _continued(residents, leaf, tier, gone)], (
                "while there is a leaf, no block goes before what continues it"
            )
        gone.add(entry)
    left = [leaf for leaf in idle - gone if not _continued(residents, leaf, tier, gone)]
    assert _enough(chosen, tier, excess) or not left, "all leaves are found if they are needed"
    return chosen


def _in_use(residents: Residents, entry: Entry, tier: Tier) -> bool:
    leaving_host = tier is Tier.DISK and entry.evict
    return bool(entry.key in residents.transfers or leaving_host or (tier is Tier.HOST and entry.pins))


def _continued(residents: Residents, entry: Entry, tier: Tier, gone: set[Entry]) -> bool:
    """Tell whether a copy in this tier or a faster one continues `entry`, other than those gone from it."""
    children = [child for child in residents.entries.values() if child.parent == entry.key]
    return any(
        child.ready(t) and not (t is tier and child in gone)
        for child in children
        for t in Tier
        if tier is Tier.DISK or t is Tier.HOST
    )


def _enough(chosen: list[Entry], tier: Tier, excess: int) -> bool:
    return sum(entry.copies[tier].nbytes for entry in chosen) >= excess
