"""A disk that is full below its capacity holds what it can, and is believed again after a while."""

from __future__ import annotations

from support.scene import PACKED, WAITS, Scene, policy

from kvtcd.core import events as ev
from kvtcd.core.account import KEPT, PAUSE, REST
from kvtcd.core.place import Tier
from kvtcd.core.policy import DiskTier
from kvtcd.core.reason import Reason

HELD = 100
"""Blocks on disk when it turns out to be full."""
LEARNED = int(KEPT * HELD * PACKED / 0.92)
"""The capacity whose low mark is a tenth below that."""


def full_disk(**fields: object) -> Scene:
    """A disk of room for many more that holds so many blocks, and a further one on its way to it."""
    scene = Scene(policy(disk=DiskTier(write="behind")), host=10_000, disk=10_000, **fields)
    for number in range(HELD):
        scene.recover(number)
    scene.put(HELD)
    assert scene.moving() == [f"{HELD} host-disk"]
    return scene


def test_a_tenth_goes_and_the_block_is_stored_after_all() -> None:
    scene = full_disk()
    ticket = scene.settle(HELD)
    scene.end(full=True)
    disk = scene.catalog.residents.shelves[Tier.DISK]

    assert abs(disk.accounts(1)[1].low - KEPT * HELD * PACKED) <= 1
    assert disk.withheld == 10_000 - LEARNED
    assert disk.capacity == 10_000, "that of the others"
    assert {reason for _, reason in scene.lost} == {Reason.NO_TIER}
    assert scene.lost[0][0] == 0, "the coldest"
    assert HELD * 0.1 <= len(scene.lost) <= HELD * 0.1 + 10, "and room for what waits"
    assert scene.moving() == [f"{HELD} host-disk"], "it is tried again"
    scene.end()
    assert scene.answers[ticket] is None
    assert scene.where(HELD) == "host disk"


def test_a_block_that_is_refused_twice_has_failed_and_nothing_more_goes_for_it() -> None:
    scene = full_disk()
    ticket = scene.settle(HELD)
    scene.end(full=True)
    gone = len(scene.lost)
    assert scene.answers[ticket] == WAITS
    scene.end(full=True)

    assert (scene.answers[ticket], len(scene.lost), scene.moving()) == (Reason.FAILED, gone, [])
    assert scene.where(HELD) == "host", "and is still there"
    scene.settle(HELD)
    assert scene.moving() == [f"{HELD} host-disk"], "whoever asks again has it tried again"
    scene.end(full=True)
    assert scene.moving() == [f"{HELD} host-disk"], "twice, as before"


def test_all_blocks_of_one_commit_are_tried_again_and_one_tenth_goes_for_all() -> None:
    scene = full_disk()
    scene.put(HELD + 1)
    scene.put(HELD + 2)
    for number in range(HELD, HELD + 3):
        scene.end(number, full=True)

    assert scene.catalog.residents.shelves[Tier.DISK].withheld == 10_000 - LEARNED
    scene.settle_down()
    assert [scene.where(number) for number in range(HELD, HELD + 3)] == ["host disk"] * 3


def test_what_is_still_full_after_a_pause_gives_up_another_tenth() -> None:
    scene = full_disk()
    scene.end(full=True)
    scene.settle_down()
    disk = scene.catalog.residents.shelves[Tier.DISK]
    first = disk.accounts(1)[1].capacity
    scene.now += PAUSE
    scene.put(HELD + 1)
    scene.end(full=True)

    assert disk.accounts(1)[1].capacity < first


def test_a_disk_that_takes_nothing_at_all_ends_in_refusals_and_not_in_a_loop() -> None:
    scene = full_disk()
    tickets = [scene.settle(HELD)]
    for number in range(HELD + 1, 2 * HELD):
        scene.now += PAUSE
        scene.put(number)
        tickets.append(scene.settle(number))
        while scene.moves:
            scene.end(full=True)

    assert not scene.moves
    assert {scene.answers[ticket] for ticket in tickets} <= {Reason.FAILED, Reason.TOO_LARGE}
    assert scene.where(150) == "host"
    assert HELD * PACKED / 4 < scene.used(Tier.DISK) < HELD * PACKED, "a tenth that makes no room is kept"


def test_a_little_more_is_tried_after_a_while_up_to_what_was_meant() -> None:
    scene = full_disk()
    scene.end(full=True)
    scene.settle_down()
    account = scene.catalog.residents.shelves[Tier.DISK].accounts(1)[1]
    short, number = account.capacity, HELD + 1
    scene.put(number)
    scene.settle_down()
    assert account.capacity == short, "not yet"
    capacities = []
    while account.capacity < account.meant:
        scene.now += REST
        number += 1
        scene.put(number)
        scene.settle_down()
        capacities.append(account.capacity)

    assert capacities == sorted(set(capacities))
    assert capacities[0] < short + account.meant // 100
    assert capacities[-1] == account.meant == 10_000
    scene.now += REST
    scene.put(number + 1)
    scene.settle_down()
    assert account.capacity == 10_000


def test_another_tenant_keeps_what_is_his() -> None:
    scene = Scene(
        {1: policy(disk=DiskTier(write="behind")), 2: policy(disk=DiskTier(write="behind"))},
        host=10_000, disk=1_000, owners={1: "a", 2: "b"},
    )  # fmt: skip
    for number in range(HELD):
        scene.recover(number, namespace=2)
        scene.recover(100 + number)
    scene.put(200)
    scene.end(full=True)
    scene.settle_down()

    assert scene.used(Tier.DISK, 2) == HELD * PACKED
    assert {number for number, _ in scene.lost} <= set(range(100, 200))


def test_what_waits_for_the_disk_and_will_never_fit_it_now_is_told_so() -> None:
    scene = full_disk(descents=1)
    scene.put(HELD + 1, nbytes=LEARNED + 50)
    ticket = scene.settle(HELD + 1)
    assert scene.answers[ticket] == WAITS
    scene.end(HELD, full=True)

    assert scene.answers[ticket] is Reason.TOO_LARGE


def test_a_reload_changes_the_marks_of_what_the_disk_holds() -> None:
    scene = full_disk()
    scene.end(full=True)
    scene.settle_down()
    scene.tell(ev.Mark(policy(disk=DiskTier(high=0.5, low=0.4))))
    account = scene.catalog.residents.shelves[Tier.DISK].accounts(1)[1]

    assert (account.capacity, account.meant) == (LEARNED, 10_000)
    assert scene.used(Tier.DISK) <= LEARNED * 0.5 + 1
