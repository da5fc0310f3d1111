"""Every rule that a catalog must hold between two events."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvtcd.core.entry import State
from kvtcd.core.place import BASES, MEMORY, Place, Tier
from kvtcd.core.shelf import Shelf
from kvtcd.core.victims import MOST, victims

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtcd.core.account import Account
    from kvtcd.core.catalog import Catalog
    from kvtcd.core.entry import Entry
    from kvtcd.core.residency import Residents


def check(catalog: Catalog) -> None:
    """Assert every invariant; the messages name the rule of `core.catalog` that is broken."""
    residents, room = catalog.residents, catalog.room
    used, leaving, dropping = (Counter[tuple[Shelf, int]]() for _ in range(3))
    descending = 0
    for key, entry in residents.entries.items():
        assert entry.copies, "1: a block without copies is forgotten"
        transfer = residents.transfers.get(key)
        for place in Place:
            if residents.pins.at(key, place):
                assert entry.at(place), "3: a copy that is read stays"
                assert entry.ready(place) or place is not Place.HOST, "3: a raw copy on the host is READY"
        if transfer:
            assert entry.ready(transfer.source), "2: a source is READY while its transfer runs"
            assert entry.copies[transfer.target].state is State.FILLING
            descending += transfer.down
            if transfer.leaving:
                for place in (transfer.source, transfer.target):
                    if place.tier is transfer.source.tier:
                        shelf = _lies(residents, entry, place)
                        leaving[shelf, entry.namespace] += entry.copies[place].nbytes
        if room.promotions.get(key):
            assert not entry.ready(Place.HOST), "nobody waits for what is there"
            assert key not in residents.doomed
        for place, copy in entry.copies.items():
            shelf = _lies(residents, entry, place)
            used[shelf, entry.namespace] += copy.nbytes
            dropping[shelf, entry.namespace] += copy.nbytes * (copy.state is State.DROPPING)
            assert (copy.rank is not None) == (copy.state is State.READY), (
                "the order knows exactly the READY copies"
            )
            if copy.state is State.FILLING and not transfer:
                assert place in (Place.HOST, Place.PACKED), "only puts and transfers fill"
        leaves = residents.outgoing.get(key, ())
        free = not transfer and key not in residents.pins and key not in residents.doomed
        if free and entry.kept(without=leaves):
            assert not any(entry.ready(place) for place in leaves), "who is to leave, leaves"
        if entry.parent is not None:
            assert entry in residents.lineage.children(entry.parent)
        continuing = [child for child in residents.entries.values() if child.parent == key]
        assert set(continuing) == set(residents.lineage.children(key))
        assert entry.children == sum(child.ready(place) for child in continuing for place in Place)
        assert entry.near_children == sum(child.ready(place) for child in continuing for place in MEMORY)
    for shelves in residents.tiers.values():
        for shelf in shelves:
            _check_shelf(residents, shelf, used, leaving, dropping)
            assert shelf.whole.used <= shelf.capacity, "5: room is reserved before bytes move"
    _check_gpus(catalog)
    assert descending == room.descending
    known = residents.entries.keys()
    assert residents.transfers.keys() | residents.superseding.keys() <= known
    assert residents.doomed | residents.failed | residents.outgoing.keys() <= known
    assert all(count > 0 for count in residents.leases.values())
    for key in residents.entries:
        counts = [residents.pins.at(key, place) for place in Place]
        assert min(counts) >= 0
        assert (key in residents.pins) == any(counts)
    for key in (*room.promotions, *room.demotions, *room.lifts, *room.refills, *room.passing):
        assert key in residents.entries, "a queue holds only known blocks"
    for put in room.puts.values():
        assert put.nbytes <= residents.shelves[Tier.HOST].capacity


def _check_gpus(catalog: Catalog) -> None:
    residents, entries = catalog.residents, catalog.residents.entries
    assert {key for key, entry in entries.items() if entry.gpu} == set(residents.gpus.lifted())
    for key in residents.gpus.lifted():
        if entries[key].ready(Place.GPU) and key not in residents.transfers:
            assert entries[key].kept(), "1: a copy on a GPU goes with the last other one"
            assert residents.gpus.at_home(key, entries[key].namespace), "6: a copy lies at home"
    for key in catalog.room.lifts:
        assert not catalog.room.unliftable(entries[key]), "who waits for a GPU can be on one"


def _lies(residents: Residents, entry: Entry, place: Place) -> Shelf:
    """Return the sums that a copy is in."""
    return residents.gpus.where(entry.key) if place is Place.GPU else residents.shelves[place.tier]


def _check_shelf(
    residents: Residents,
    shelf: Shelf,
    used: Counter[tuple[Shelf, int]],
    leaving: Counter[tuple[Shelf, int]],
    dropping: Counter[tuple[Shelf, int]],
) -> None:
    for account in {account for n in residents.rules for account in shelf.accounts(n)}:
        booked = account.namespaces
        assert sum(used[shelf, n] for n in booked) == account.used, "sums agree with their parts"
        assert sum(leaving[shelf, n] for n in booked) == account.leaving
        assert sum(dropping[shelf, n] for n in booked) == account.dropping
    for place, parts in shelf.parts.items():
        for namespace, part in parts.items():
            entries = {
                k: e
                for k, e in residents.entries.items()
                if e.namespace == namespace and e.ready(place) and _lies(residents, e, place) is shelf
            }
            assert part.blocks == len(entries)
            assert part.nbytes == sum(entry.copies[place].nbytes for entry in entries.values())
            assert part.held.keys() <= entries.keys()
            for key in part.held:
                assert residents.entries[key].continued(place), "only what others continue is held"


def checked_victims(
    residents: Residents,
    shelf: Shelf,
    place: Place,
    account: Account,
    excess: int,
    *,
    spared: Callable[[Entry], bool] = lambda _: False,
    packing: bool = True,
    without: frozenset[int] = frozenset(),
) -> list[Entry]:
    """Return what `victims` does, once it is clear that it may: for use in its place."""
    chosen = victims(
        residents, shelf, place, account, excess, spared=spared, packing=packing, without=without
    )
    named = account.namespaces - without
    booked = [entry for entry in residents.entries.values() if entry.namespace in named]
    ready = {entry for entry in booked if entry.ready(place) and _lies(residents, entry, place) is shelf}
    idle = {entry for entry in ready if not (_in_use(residents, entry, place) or spared(entry))}
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= idle, "nothing in use makes room"
    plain = {entry for entry in idle if not _leaf_wise(residents, entry, place, packing=packing)}
    if plain:
        assert _enough(chosen, place, excess) or set(chosen) >= plain
        return chosen
    gone: set[Entry] = set()
    for entry in chosen:
        if _continued(residents, entry, place, gone):
            assert not [leaf for leaf in ready - gone if not _continued(residents, leaf, place, gone)], (
                "while there is a leaf, no block goes before what continues it"
            )
        gone.add(entry)
    left = [leaf for leaf in idle - gone if not _continued(residents, leaf, place, gone)]
    assert _enough(chosen, place, excess) or not left, "all leaves are found if they are needed"
    return chosen


def _leaf_wise(residents: Residents, entry: Entry, place: Place, *, packing: bool) -> bool:
    policy = residents.rules[entry.namespace].policy
    packs = packing and place is Place.HOST and policy.host.form == "raw-then-packed"
    return policy.evict.leaves_first and not packs and place in BASES


def _in_use(residents: Residents, entry: Entry, place: Place) -> bool:
    leaves = residents.outgoing.get(entry.key)
    left_for = leaves is not None and place not in leaves
    read = residents.pins.at(entry.key, place) > 0
    return entry.key in residents.transfers or left_for or read


def _continued(residents: Residents, entry: Entry, place: Place, gone: set[Entry]) -> bool:
    """Tell whether a copy in this place or a faster one continues `entry`, other than those gone from it."""
    children = [child for child in residents.entries.values() if child.parent == entry.key]
    return any(
        child.ready(p) and not (p is place and child in gone)
        for child in children
        for p in (Place if place is Place.DISK else MEMORY)
    )


def _enough(chosen: list[Entry], place: Place, excess: int) -> bool:
    return len(chosen) == MOST or sum(entry.copies[place].nbytes for entry in chosen) >= excess
