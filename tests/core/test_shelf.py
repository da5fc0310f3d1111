"""Bytes of a tier: in all, of tenants, of namespaces; and the marks on them."""

from __future__ import annotations

import pytest
from support.scene import key

from kvtcd.core.account import Account
from kvtcd.core.entry import Copy, Entry, Kind, State
from kvtcd.core.place import Place, Tier
from kvtcd.core.policy import DiskTier, Evict, HostTier, Policy
from kvtcd.core.shelf import Marks, Shelf, marks, shelves
from kvtcd.core.sightings import Sightings

LRU = Evict("lru")


def account(used: int, *, leaving: int = 0, dropping: int = 0) -> Account:
    made = Account(100, 0.9, 0.6)
    made.used, made.leaving, made.dropping = used, leaving, dropping
    return made


@pytest.fixture
def shelf() -> Shelf:
    made = Shelf(Tier.HOST, 1000, Marks(0.9, 0.6), Sightings(width=64), granule=16, tenant_share=0.5)
    made.govern(1, "a", 0.25, Marks(0.8, 0.4), LRU)
    made.govern(2, "a", 1.0, Marks(), LRU)
    made.govern(3, "b", 300, Marks(), LRU)
    return made


# Accounts ---------------------------------------------------------------------------------------------------


def test_nothing_is_in_excess_up_to_the_high_mark() -> None:
    assert account(80).excess(10) == 0
    assert account(80).excess(11) == 31, "down to the low mark"


def test_what_eases_goes_on_to_the_low_mark() -> None:
    easing = account(70)
    easing.easing = True

    assert easing.excess(0) == 10
    assert account(70).excess(0) == 0
    assert not easing.full(20)
    assert easing.full(21)


def test_bytes_on_their_way_out_are_not_moved_out_once_more() -> None:
    assert account(100, leaving=10, dropping=5).excess(0) == 0
    assert account(100, leaving=5, dropping=4).excess(0) == 31


def test_a_shortfall_is_what_is_missing_when_all_that_leaves_has_left() -> None:
    assert account(100, leaving=10, dropping=5).shortfall(15) == 0
    assert account(100, leaving=10, dropping=5).shortfall(16) == 1


def test_a_shortage_is_what_is_missing_without_waiting_for_moves() -> None:
    assert account(100, leaving=10, dropping=5).shortage(16) == 11
    assert account(100, leaving=10, dropping=5).shortage(5) == 0


def test_a_footprint_fits_when_there_is_room_now() -> None:
    assert account(90, leaving=50).fits(10)
    assert not account(90, leaving=50).fits(11)


# Shelves ----------------------------------------------------------------------------------------------------


def test_what_a_namespace_may_have_is_the_least_of_its_own_its_tenants_and_the_tier(shelf) -> None:
    assert [shelf.room(number) for number in (1, 2, 3)] == [250, 500, 300]


def test_bytes_are_booked_on_all_three(shelf) -> None:
    shelf.book(1, 100)
    shelf.book(2, 40)
    shelf.leave(1, 20)
    shelf.drop(2, 30)
    own, tenant, whole = shelf.accounts(1)

    assert [(a.used, a.leaving, a.dropping) for a in (own, tenant, whole)] == [
        (100, 20, 0), (140, 20, 30), (140, 20, 30)
    ]  # fmt: skip
    assert shelf.accounts(2)[1] is tenant
    assert shelf.accounts(3)[1] is not tenant
    assert shelf.accounts(3)[2] is whole is shelf.whole
    assert [sorted(a.namespaces) for a in (own, tenant, whole)] == [[1], [1, 2], [1, 2, 3]]


def test_the_narrowest_bound_is_named_first(shelf) -> None:
    own, tenant, whole = shelf.accounts(1)
    shelf.book(1, 200)
    shelf.book(2, 280)
    assert shelf.tight(1, 20) is None
    assert shelf.tight(1, 21) is tenant
    assert shelf.tight(1, 51) is own
    shelf.book(3, 300)
    assert shelf.tight(3, 1) is shelf.accounts(3)[0]
    whole.used = 1000
    assert shelf.tight(2, 1) is whole
    assert shelf.bounds() == [own, shelf.accounts(3)[0], tenant, shelf.accounts(3)[1], whole]


def test_a_share_of_all_bounds_nothing(shelf) -> None:
    own = shelf.accounts(2)[0]
    own.used = own.capacity

    assert shelf.tight(2, 1) is None
    assert own not in shelf.bounds()


def test_a_share_in_bytes_is_no_more_than_there_is(shelf) -> None:
    shelf.govern(3, "b", 5000, Marks(), LRU)

    assert shelf.accounts(3)[0].capacity == 1000
    assert shelf.room(3) == 500


def test_governing_again_keeps_what_is_booked(shelf) -> None:
    shelf.book(1, 100)
    own = shelf.accounts(1)[0]
    shelf.govern(1, "a", 0.5, Marks(0.5, 0.1), LRU)

    assert shelf.accounts(1)[0] is own
    assert (own.used, own.capacity, own.high, own.low) == (100, 500, 250, 50)


def test_other_marks_are_those_of_the_tier_and_of_tenants_but_not_of_namespaces(shelf) -> None:
    shelf.remark(Marks(0.5, 0.1))
    own, tenant, whole = shelf.accounts(1)

    assert (whole.high, whole.low) == (500, 100)
    assert (tenant.high, tenant.low) == (250, 50)
    assert (own.high, own.low) == (200, 100)
    shelf.govern(9, "c", 1.0, Marks(), LRU)
    assert (shelf.accounts(9)[1].high, shelf.accounts(9)[1].low) == (250, 50), "those of a new tenant too"


def test_a_namespace_that_is_gone_leaves_no_account(shelf) -> None:
    shelf.ungovern(1)
    shelf.ungovern(3)

    assert shelf.accounts(2)[1].namespaces == {2}
    assert shelf.whole.namespaces == {2}
    assert len(shelf.bounds()) == 2
    assert all(parts.keys() == {2} for parts in shelf.parts.values())
    shelf.ungovern(3)  # it may never have come here


def test_room_is_given_out_in_granules(shelf) -> None:
    assert [shelf.footprint(nbytes) for nbytes in (1, 16, 17)] == [16, 16, 32]


def test_the_marks_of_each_tier_are_those_of_its_section() -> None:
    policy = Policy("p", host=HostTier(high=0.7, low=0.5), disk=DiskTier(high=0.8, low=0.4))

    assert marks(policy, Tier.HOST) == Marks(0.7, 0.5)
    assert marks(policy, Tier.DISK) == Marks(0.8, 0.4)


def test_only_tiers_that_have_bytes_exist() -> None:
    sightings = Sightings(width=64)

    assert shelves(Policy("p"), sightings, host=0).keys() == {Tier.HOST}
    assert shelves(Policy("p"), sightings, host=1, disk=1).keys() == {Tier.HOST, Tier.DISK}


# Order ------------------------------------------------------------------------------------------------------


def copies(count: int) -> list[Copy]:
    made = []
    for number in range(count):
        entry = Entry(key(number), Kind(1, 16, 10))
        made.append(Copy(entry, State.READY, 10))
    return made


@pytest.mark.parametrize("policy", ["lfu", "arc", "s3fifo", "gdsf"])
def test_under_another_policy_the_coldest_stay_so(shelf, policy) -> None:
    part = shelf.parts[Place.HOST][1]
    seats = copies(6)
    for seat in seats:
        part.insert(seat)
    for number in (3, 1):
        part.use(seats[number])
    part.hold(seats[0])
    part.reorder(LRU, 250)
    assert seats[0] in part.held.values(), "the same policy changes nothing"
    part.reorder(Evict(policy), 250)

    assert [seat.block.key for seat in part.order.coldest()] == [key(number) for number in (0, 2, 4, 5, 3, 1)]
    assert part.held == {}
    assert (part.blocks, part.nbytes) == (6, 60)


def test_a_part_counts_what_it_has(shelf) -> None:
    part = shelf.parts[Place.HOST][1]
    seats = copies(3)
    for seat in seats:
        part.insert(seat)
    part.hold(seats[1])
    part.discard(seats[1])

    assert (part.blocks, part.nbytes, part.held) == (2, 20, {})


@pytest.mark.parametrize("act", ["use", "renew"])
def test_a_held_copy_that_is_used_is_named_again(shelf, act) -> None:
    part = shelf.parts[Place.HOST][1]
    seats = copies(2)
    for seat in seats:
        part.insert(seat)
    part.hold(seats[0])
    assert list(part.order.coldest()) == [seats[1]]
    getattr(part, act)(seats[0])

    assert list(part.order.coldest()) == [seats[1], seats[0]]
    assert part.held == {}
