"""Which copies make room: leaves first, whatever the order, and without searching for them."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from support.invariants import checked_victims

from kvtcd.core import events as ev
from kvtcd.core.entry import Entry, Kind
from kvtcd.core.gpus import Gpus
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place, Tier
from kvtcd.core.policy import Evict, EvictName, HostTier, Policy
from kvtcd.core.residency import Residents
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings
from kvtcd.core.victims import MOST, victims

POLICIES = get_args(EvictName)


def key(number: int) -> RecordKey:
    return RecordKey(number.to_bytes(8, "little") * 4)


class Tiers:
    """A host tier and a disk tier of blocks of one byte."""

    def __init__(
        self, evict: EvictName = "lru", *, leaves_first: bool = True, form: str = "raw", namespaces: int = 1
    ) -> None:
        self.sightings = Sightings(period=10**9, width=1 << 14)
        policy = Policy("p", host=HostTier(form), evict=Evict(evict, leaves_first=leaves_first))
        tiers = shelves(policy, self.sightings, host=10_000, disk=10_000, granule=1)
        self.residents = Residents(tiers, Gpus())
        for namespace in range(1, namespaces + 1):
            self.residents.govern(ev.Govern(namespace, "tenant", policy))
        self.named = 0
        order = tiers[Tier.HOST].parts[Place.HOST][1].order
        coldest = order.coldest

        def counted():
            for seat in coldest():
                self.named += 1
                yield seat

        order.coldest = counted

    def add(
        self, number: int, parent: int | None = None, place: Place = Place.HOST, namespace: int = 1
    ) -> Entry:
        above = None if parent is None else key(parent)
        entry = Entry(key(number), Kind(namespace, 1, 1), parent=above)
        self.sightings.note(key(number))
        self.residents.admit(entry, place, 1)
        self.residents.ready(entry, place)
        return entry

    def victims(self, place: Place, excess: int) -> list[Entry]:
        shelf = self.residents.shelves[place.tier]
        return checked_victims(self.residents, shelf, place, shelf.whole, excess)

    def evict_one(self) -> Entry:
        host = self.residents.shelves[Tier.HOST]
        (entry,) = victims(self.residents, host, Place.HOST, host.whole, 1)
        self.residents.drop(entry, Place.HOST)
        self.residents.dropped(entry, Place.HOST)
        return entry


@pytest.mark.parametrize("policy", POLICIES)
def test_chains_go_from_their_ends_in_constant_time_each(policy) -> None:
    tiers = Tiers(policy)
    chains, length = 30, 40
    for chain in range(chains):
        for link in range(length):
            number = chain * length + link
            tiers.add(number, number - 1 if link else None)
    rng = random.Random(1)

    uses = 0
    left = dict.fromkeys(range(chains), length)
    for _ in range(chains * length):
        used = rng.randrange(chains)
        for link in range(rng.randrange(left[used] + 1)):
            tiers.residents.use(key(used * length + link))
            uses += 1
        gone = tiers.evict_one()
        chain, link = divmod(int.from_bytes(gone.key[:8], "little"), length)
        left[chain] -= 1
        assert link == left[chain], "a chain is never holed"

    assert tiers.named <= uses + 2 * chains * length
    assert not tiers.residents.entries


@pytest.mark.parametrize("policy", POLICIES)
def test_what_many_others_continue_is_met_once(policy) -> None:
    tiers = Tiers(policy)
    tiers.add(0)
    for number in range(1, 1001):
        tiers.add(number, 0)

    gone = [tiers.evict_one().key for _ in range(1001)]

    assert gone[-1] == key(0)
    assert tiers.named <= 2 * 1001


def test_without_leaves_first_a_prefix_is_holed() -> None:
    tiers = Tiers(leaves_first=False)
    for number in range(3):
        tiers.add(number, number - 1 if number else None)

    assert tiers.evict_one().key == key(0)


def test_one_search_takes_a_whole_chain_when_it_must() -> None:
    tiers = Tiers()
    for number in range(5):
        tiers.add(number, number - 1 if number else None)

    assert [entry.key for entry in tiers.victims(Place.HOST, 5)] == [key(n) for n in (4, 3, 2, 1, 0)]


def test_a_chain_whose_end_is_read_waits() -> None:
    tiers = Tiers()
    for number in range(3):
        tiers.add(number, number - 1 if number else None)
    tiers.residents.pins.take(key(2), Place.HOST)

    assert tiers.victims(Place.HOST, 1) == []
    tiers.residents.pins.give_back(key(2), Place.HOST)
    assert tiers.evict_one().key == key(2)


def test_a_child_on_disk_does_not_keep_its_parent_on_the_host() -> None:
    tiers = Tiers()
    parent = tiers.add(0)
    tiers.add(1, 0, Place.DISK)
    tiers.add(2)

    assert tiers.victims(Place.HOST, 1) == [parent], "it may join its child on disk"


def test_a_child_on_the_host_keeps_its_parent_on_disk() -> None:
    tiers = Tiers()
    tiers.add(0, None, Place.DISK)
    tiers.add(1, 0)
    other = tiers.add(2, None, Place.DISK)

    assert tiers.victims(Place.DISK, 1) == [other]


def test_when_children_on_the_host_hold_the_whole_disk_a_parent_goes_all_the_same() -> None:
    """Nobody could come down otherwise, and so nobody would ever go."""
    tiers = Tiers()
    parent = tiers.add(0, None, Place.DISK)
    tiers.add(1, 0)

    assert tiers.victims(Place.DISK, 1) == [parent]


def test_while_something_leaves_a_parent_waits_for_that() -> None:
    tiers = Tiers()
    tiers.add(0, None, Place.DISK)
    tiers.add(1, 0)
    disk = tiers.residents.shelves[Tier.DISK]
    disk.drop(1, 1)

    assert tiers.victims(Place.DISK, 1) == []


def test_a_copy_that_others_are_to_leave_for_stays() -> None:
    tiers = Tiers()
    entry, other = tiers.add(0, None, Place.DISK), tiers.add(1, None, Place.DISK)
    tiers.residents.outgoing[entry.key] = (Place.HOST,)

    assert tiers.victims(Place.DISK, 2) == [other]


def test_a_block_does_not_continue_itself() -> None:
    tiers = Tiers()
    entry = tiers.add(0, 0)

    assert entry.parent is None
    assert tiers.victims(Place.HOST, 1) == [entry]


def test_a_parent_that_comes_after_its_children_is_held_too() -> None:
    tiers = Tiers()
    tiers.add(1, 0)
    tiers.add(2, 0)
    tiers.add(0)
    for number in (1, 2):
        tiers.residents.use(key(number))

    assert [tiers.evict_one().key for _ in range(3)] == [key(1), key(2), key(0)]


def test_of_several_namespaces_the_copy_that_was_idle_longest_goes() -> None:
    tiers = Tiers(namespaces=3)
    for second, number in enumerate((7, 3, 5, 1, 9)):
        tiers.sightings.now = second
        tiers.add(number, namespace=1 + number % 3)

    assert [entry.key for entry in tiers.victims(Place.HOST, 5)] == [key(n) for n in (7, 3, 5, 1, 9)]


def test_blocks_that_are_packed_in_place_go_without_regard_to_what_continues_them() -> None:
    tiers = Tiers(form="raw-then-packed")
    parent = tiers.add(0)
    tiers.add(1, 0)

    assert tiers.victims(Place.HOST, 1) == [parent], "it stays in memory, and so does its prefix"


def test_an_account_of_one_namespace_names_only_its_own() -> None:
    tiers = Tiers(namespaces=2)
    tiers.add(0, namespace=1)
    other = tiers.add(1, namespace=2)
    host = tiers.residents.shelves[Tier.HOST]
    own = host.accounts(2)[0]

    assert victims(tiers.residents, host, Place.HOST, own, 5) == [other]


def test_a_search_ends_when_it_has_named_what_one_pass_can_use() -> None:
    """A tier far above its mark would else be searched from end to end for each newcomer."""
    tiers = Tiers()
    for number in range(1000):
        tiers.add(number)
    found = tiers.victims(Place.HOST, 1000)

    assert [entry.key for entry in found] == [key(number) for number in range(MOST)]
    assert tiers.named <= MOST + 1
