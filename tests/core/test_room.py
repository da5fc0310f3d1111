"""Who gets room: shares of namespaces and tenants, and who waits for whom."""

from __future__ import annotations

import pytest
from support.scene import PACKED, RAW, WAITS, Scene, key, policy

from kvtcd.core import events as ev
from kvtcd.core.place import Tier
from kvtcd.core.policy import DiskTier, HostTier, Promote, Share
from kvtcd.core.reason import Reason
from kvtcd.core.room import REFILLS

EVICT = DiskTier("evict", high=1.0, low=1.0)
RAW_HOST = HostTier("raw", high=1.0, low=1.0)


def brim(**fields: object):
    return policy(host=RAW_HOST, **({"disk": EVICT} | fields))


def test_a_namespace_has_no_more_of_the_host_than_its_share() -> None:
    scene = Scene({1: brim(share=Share(host=0.3)), 2: brim()}, host=100)
    for number in range(3):
        scene.put(number)
    ticket = scene.put(3)

    assert scene.answers[ticket] == WAITS
    assert scene.moving() == ["0 host-disk"], "the coldest of its own"
    assert scene.used(Tier.HOST, 1) == 30
    scene.settle_down()
    assert scene.answers[ticket] is None
    assert (scene.used(Tier.HOST, 1), scene.used(Tier.HOST)) == (30, 30)
    assert scene.used(Tier.DISK, 1) == PACKED


def test_who_waits_for_his_own_share_keeps_nobody_else_waiting() -> None:
    scene = Scene({1: brim(share=Share(host=0.25)), 2: brim()}, host=100)
    for number in range(2):
        scene.put(number)
    full = scene.put(2)
    other = scene.put(3, namespace=2)
    same = scene.put(4, nbytes=1)

    assert scene.answers[full] == WAITS
    assert scene.answers[other] is None
    assert scene.answers[same] == WAITS, "it would fit, but waits for its turn"
    assert scene.used(Tier.HOST, 2) == RAW


def test_who_waits_for_the_whole_tier_lets_nobody_pass() -> None:
    scene = Scene({1: brim(), 2: brim()}, host=25)
    scene.put(0)
    scene.put(1)
    large = scene.put(2, nbytes=20)
    small = scene.put(3, nbytes=1, namespace=2)

    assert [scene.answers[large], scene.answers[small]] == [WAITS, WAITS]
    scene.settle_down()
    assert [scene.answers[large], scene.answers[small]] == [None, None]


def test_a_promotion_that_waits_for_its_share_keeps_no_other_namespace_waiting() -> None:
    scene = Scene({1: brim(share=Share(host=0.1)), 2: brim()}, host=100)
    scene.recover(0)
    scene.recover(1)
    scene.recover(2, namespace=2)
    scene.get(0)
    scene.settle_down()  # it is read, and so it stays
    waits = scene.get(1)
    passes = scene.get(2)
    put = scene.put(3, namespace=2)

    assert scene.moving() == ["2 disk-host"]
    assert scene.answers[put] is None
    scene.end(2)
    assert (scene.answers[waits], scene.answers[passes]) == (WAITS, None)
    scene.tell(ev.Release(key(0)))
    scene.settle_down()
    assert scene.answers[waits] is None


def test_all_namespaces_of_a_tenant_share_what_he_may_have() -> None:
    scene = Scene(
        {1: brim(), 2: brim(), 3: brim()}, host=100, tenants=Share(host=0.2), owners={1: "a", 2: "a", 3: "b"}
    )
    scene.put(0, namespace=1)
    scene.put(1, namespace=2)
    mine = scene.put(2, namespace=2)
    theirs = scene.put(3, namespace=3)

    assert (scene.answers[mine], scene.answers[theirs]) == (WAITS, None)
    assert scene.moving() == ["0 host-disk"], "of the tenant's, the one that was idle longest"
    scene.settle_down()
    assert scene.answers[mine] is None
    assert [scene.used(Tier.HOST, number) for number in (1, 2, 3)] == [0, 20, 10]


def test_a_share_of_the_disk_binds_too() -> None:
    rules = brim(share=Share(disk=3 * RAW), disk=DiskTier("behind", high=1.0, low=1.0))
    scene = Scene({1: rules, 2: brim()}, host=1000, disk=1000)
    for number in range(20):
        scene.put(number)
        scene.settle_down()

    assert scene.used(Tier.DISK, 1) <= 30
    assert scene.where(19) == "host disk"
    assert scene.lost == [], "the host still has them"


def test_a_tenants_share_of_the_disk_binds_too() -> None:
    rules = brim(disk=DiskTier("behind", high=1.0, low=1.0))
    scene = Scene({1: rules, 2: rules}, host=1000, tenants=Share(disk=2 * RAW))
    for number in range(20):
        scene.put(number, namespace=1 + number % 2)
        scene.settle_down()

    assert scene.used(Tier.DISK) <= 20
    assert scene.used(Tier.DISK, 1) + scene.used(Tier.DISK, 2) == scene.used(Tier.DISK)


def test_what_exceeds_its_share_is_too_large_however_large_the_tier() -> None:
    scene = Scene({1: brim(share=Share(host=0.3)), 2: brim()}, host=100)

    assert scene.answers[scene.put(0, nbytes=31)] is Reason.TOO_LARGE
    assert scene.answers[scene.put(1, nbytes=31, namespace=2)] is None


def test_what_exceeds_the_tenants_share_is_too_large() -> None:
    scene = Scene(brim(), host=100, tenants=Share(host=0.3))

    assert scene.answers[scene.put(0, nbytes=31)] is Reason.TOO_LARGE
    assert scene.answers[scene.put(1, nbytes=30)] is None


def test_room_is_booked_in_whole_granules_of_memory_and_to_the_byte_on_disk() -> None:
    scene = Scene(policy(), host=64, granule=16)
    scene.put(0)
    scene.settle_down()

    assert scene.used(Tier.HOST) == 16
    assert scene.used(Tier.DISK) == PACKED


def test_a_move_down_reserves_the_bound_and_gives_the_rest_back() -> None:
    scene = Scene(policy(), host=100, bound=lambda nbytes: nbytes + 5)
    scene.put(0)
    assert scene.used(Tier.DISK) == RAW + 5
    scene.settle_down()

    assert scene.used(Tier.DISK) == PACKED


def test_an_idle_host_takes_back_packed_copies_but_pushes_nothing_out() -> None:
    rules = policy(host=HostTier("raw-then-packed", raw=0.0, high=0.5, low=0.3))
    scene = Scene(rules, host=100)
    for number in range(6):
        scene.put(number)
        scene.settle_down()
    scene.settle_down()

    assert [scene.where(number) for number in range(6)] == ["packed disk"] * 3 + ["host disk"] * 3
    assert scene.used(Tier.HOST) == 3 * RAW + 3 * PACKED
    assert scene.lost == []


def test_packed_copies_of_a_namespace_without_room_keep_no_others_down() -> None:
    scene = Scene({1: brim(share=Share(host=0.1)), 2: brim()}, host=100)
    scene.recover(0)
    scene.recover(1, namespace=2)
    scene.put(2)
    assert scene.answers[scene.get(2)] is None  # its share is full of what is read
    for number in (0, 1):
        scene.catalog.room.refill_later(key(number))
    scene.tell(ev.Tick())

    assert scene.moving() == ["1 disk-packed"]


def test_only_the_latest_packed_copies_wait_to_come_back() -> None:
    scene = Scene(brim(), disk=REFILLS * RAW)
    for number in range(REFILLS + 10):
        scene.recover(number)
    for number in range(REFILLS + 10):
        scene.catalog.room.refill_later(key(number))

    assert list(scene.catalog.room.refills) == [key(number) for number in range(10, REFILLS + 10)]


def test_a_block_that_is_larger_than_the_gpu_pushes_nothing_out_of_it() -> None:
    scene = Scene(brim(promote=Promote("gpu")), host=100, gpu=15)
    scene.put(0)
    scene.read(0)
    scene.settle_down()
    scene.put(1, nbytes=20)
    scene.read(1)

    assert scene.where(0) == "gpu host"
    assert not scene.catalog.room.lifts


def test_a_large_block_is_not_overtaken_for_ever() -> None:
    scene = Scene(brim(), host=30, descents=1)
    for number in range(3):
        scene.put(number, patient=True)
    large = scene.put(3, nbytes=30, patient=True)
    small = [scene.put(number, patient=True) for number in range(4, 9)]
    scene.end()
    scene.end()
    assert scene.answers[large] == WAITS
    assert {scene.answers[ticket] for ticket in small} == {WAITS}
    scene.end()
    assert scene.answers[large] is None


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_who_will_not_wait_hurries_those_before_him_who_would(share) -> None:
    scene = Scene(brim(share=Share(host=share)), host=int(50 / share), descents=1)
    for number in range(5):
        scene.put(number)
    scene.settle(4)
    patient = scene.put(5, patient=True)
    assert (scene.answers[patient], scene.lost) == (WAITS, [])
    hasty = scene.put(6)

    assert [scene.answers[patient], scene.answers[hasty]] == [None, None]
    assert scene.lost == [(0, Reason.PRESSURE), (1, Reason.PRESSURE)]


def test_those_behind_one_who_waits_for_the_whole_tier_are_not_looked_at_with_every_event() -> None:
    scene = Scene(brim(), host=30, descents=1)
    for number in range(3):
        scene.put(number, patient=True)
    for number in range(3, 100):
        scene.put(number, patient=True)
    room, looked_at = scene.catalog.room, []
    known = room.known
    room.known = lambda put: looked_at.append(put) or known(put)
    scene.tell(ev.Tick())

    assert len(looked_at) == 1


def test_promotions_behind_one_that_waits_for_the_whole_tier_are_not_looked_at_with_every_event() -> None:
    scene = Scene(brim(), host=30, descents=1)
    for number in range(10, 60):
        scene.recover(number)
    for number in range(3):
        scene.put(number, patient=True)
    for number in range(10, 60):
        scene.get(number)
    host, looked_at = scene.catalog.residents.shelves[Tier.HOST], []
    tight = host.accounts
    host.accounts = lambda namespace: looked_at.append(namespace) or tight(namespace)
    scene.tell(ev.Tick())

    assert len(looked_at) < 10
