"""Leased blocks stay, somewhere, until their leases end."""

from __future__ import annotations

import pytest
from support.scene import WAITS, Scene, key, policy

from kvtcd.core import events as ev
from kvtcd.core.policy import DiskTier, HostTier, Share
from kvtcd.core.reason import Reason

EVICT = DiskTier("evict", high=1.0, low=1.0)
BRIM = HostTier("raw", high=1.0, low=1.0)


def brim(**fields: object):
    return policy(host=BRIM, **({"disk": EVICT} | fields))


def test_a_leased_block_is_not_lost_for_newcomers() -> None:
    scene = Scene(brim(), host=40, disk=0)
    for number in range(4):
        scene.put(number)
    lease = scene.lease(0, 1)
    newcomers = [scene.put(number) for number in range(4, 8)]

    assert scene.answers[lease] is None
    assert [scene.answers[ticket] for ticket in newcomers] == [None] * 4
    assert (scene.where(0), scene.where(1)) == ("host", "host")
    assert [number for number, _ in scene.lost] == [2, 3, 4, 5]


def test_a_leased_block_on_disk_alone_is_not_lost_for_others() -> None:
    scene = Scene(policy(disk=DiskTier(high=0.9, low=0.5)), host=100, disk=20)
    for number in range(9):
        scene.recover(number)
    assert scene.answers[scene.lease(0)] is None
    scene.recover(9)

    assert scene.where(0) == "disk"
    assert [number for number, _ in scene.lost] == [1, 2, 3, 4, 5]


def test_the_disk_copy_of_a_leased_block_may_go_when_the_host_has_another() -> None:
    scene = Scene(policy(disk=DiskTier(high=0.9, low=0.5)), host=100, disk=20)
    for number in range(9):
        scene.recover(number)
    scene.read(0)
    for number in range(1, 9):
        scene.tell(ev.Touch((key(number),)))
    scene.lease(0)
    scene.recover(9)

    assert scene.where(0) == "host"
    assert [number for number, _ in scene.lost] == [1, 2, 3, 4]


def test_a_leased_block_may_move_down() -> None:
    scene = Scene(brim(), host=30)
    for number in range(3):
        scene.put(number)
    scene.lease(0)
    scene.put(3)
    assert scene.moving() == ["0 host-disk"]
    scene.settle_down()

    assert scene.where(0) == "disk"
    assert scene.lost == []


def test_a_leased_block_may_be_packed_and_its_copies_above_may_go() -> None:
    scene = Scene(policy(host=HostTier(high=0.5, low=0.3), disk=EVICT), host=100)
    for number in range(5):
        scene.put(number)
    scene.lease(0)
    scene.put(5)
    scene.settle_down()

    assert scene.where(0) == "packed"


def test_pressure_spares_what_is_leased() -> None:
    scene = Scene(brim(), host=50, descents=1)
    for number in range(5):
        scene.put(number)
    scene.lease(0, 1)
    scene.settle(4)
    scene.put(5)

    assert scene.lost == [(2, Reason.PRESSURE)]


def test_it_ends_with_its_lease() -> None:
    scene = Scene(brim(), host=40, disk=0)
    for number in range(4):
        scene.put(number)
    scene.lease(0)
    scene.lease(0)
    scene.unlease(0)
    scene.put(4)
    still = scene.where(0)
    scene.unlease(0)
    scene.put(5)

    assert still == "host"
    assert scene.where(0) == ""


@pytest.mark.parametrize(("disk", "most"), [(0, 5), (60, 3)])
def test_leases_hold_at_most_half_of_the_last_tier(disk, most) -> None:
    scene = Scene(policy(), host=100, disk=disk)
    for number in range(6):
        scene.put(number)
        scene.settle_down()

    assert scene.answers[scene.lease(*range(most))] is None
    assert scene.answers[scene.lease(5)] is Reason.PINNED
    assert scene.answers[scene.lease(0, 1)] is None, "what is leased already counts once"
    scene.unlease(0, 1)
    assert scene.answers[scene.lease(5)] is Reason.PINNED
    scene.unlease(*range(most))
    assert scene.answers[scene.lease(*range(1, most + 1))] is None


def test_leases_hold_at_most_half_of_what_a_namespace_may_have() -> None:
    scene = Scene(brim(share=Share(host=0.4)), host=100, disk=0)
    for number in range(4):
        scene.put(number)
    assert scene.answers[scene.lease(0, 1, 2)] is Reason.PINNED
    assert scene.answers[scene.lease(0, 1)] is None
    newcomer = scene.put(4)

    assert scene.answers[newcomer] is None, "there is always room for what is new"


def test_leases_hold_at_most_half_of_what_a_tenant_may_have() -> None:
    scene = Scene({1: brim(), 2: brim()}, host=100, disk=0, tenants=Share(host=0.4))
    for number in range(4):
        scene.put(number, namespace=1 + number % 2)

    assert scene.answers[scene.lease(0, 1)] is None
    assert scene.answers[scene.lease(2)] is Reason.PINNED


def test_all_blocks_of_a_lease_are_held_or_none() -> None:
    scene = Scene(brim(), host=40, disk=0)
    scene.put(0)
    refused = scene.lease(0, 7)

    assert scene.answers[refused] is Reason.NOT_FOUND
    assert not scene.catalog.residents.leases


def test_a_block_counts_once_in_its_lease() -> None:
    scene = Scene(brim(), host=20, disk=0)
    scene.put(0)

    assert scene.answers[scene.lease(0, 0)] is None
    scene.unlease(0, 0)
    assert not scene.catalog.residents.leases


def test_a_delete_waits_for_leases_and_serves_nobody_meanwhile() -> None:
    scene = Scene(policy(), host=100)
    scene.put(0)
    scene.settle_down()
    scene.lease(0)
    ticket = scene.delete(0)
    there = list(scene.catalog.residents.entries)
    found = scene.get(0)
    scene.unlease(0)

    assert there == [key(0)]
    assert scene.answers[found] is Reason.NOT_FOUND
    assert scene.answers[ticket] is None
    assert not scene.catalog.residents.entries


def test_a_leased_block_outlives_its_time() -> None:
    scene = Scene(policy(disk=DiskTier(ttl=10)), host=100)
    scene.put(0)
    scene.settle_down()
    scene.lease(0)
    scene.now += 20
    scene.tell(ev.Tick())
    during = scene.where(0)
    scene.unlease(0)
    after = scene.where(0)
    scene.tell(ev.Tick())

    assert (during, after) == ("host disk", "")
    assert not scene.catalog.residents.entries
    assert scene.lost == [(0, Reason.EXPIRED)]


def test_a_lease_of_a_block_that_was_damaged_ends_in_peace() -> None:
    scene = Scene(policy(), host=100)
    scene.recover(0)
    scene.lease(0)
    ticket = scene.get(0)
    scene.end(0, damaged=True)
    scene.unlease(0)

    assert scene.answers[ticket] is Reason.DAMAGED
    assert scene.lost == [(0, Reason.DAMAGED)]
    assert not scene.catalog.residents.leases
    scene.put(0)
    scene.settle_down()
    assert scene.where(0) == "host disk"


def test_a_leased_block_that_cannot_go_to_disk_stays_on_the_host() -> None:
    scene = Scene(brim(), host=40)
    for number in range(4):
        scene.put(number)
    scene.lease(0)
    failing = scene.settle(0)
    scene.end(0, failed=True)
    waits = [scene.put(number) for number in range(4, 7)]
    scene.settle_down()

    assert scene.answers[failing] is Reason.FAILED
    assert scene.where(0) == "host"
    assert WAITS not in [scene.answers[ticket] for ticket in waits]
