"""What is stored at all: what was seen often enough, and is worth more than what would go for it."""

from __future__ import annotations

import pytest
from support.scene import RAW, Scene, key, policy

from kvtcd.core import events as ev
from kvtcd.core.admission import admits
from kvtcd.core.catalog import Catalog
from kvtcd.core.keys import RecordKey
from kvtcd.core.policy import Admit, DiskTier, Evict, HostTier, Policy, Share
from kvtcd.core.reason import Reason
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings

LFU = Evict("lfu")


def put(number: int) -> ev.Put:
    return ev.Put(99, key(number), 1, 16, RAW)


@pytest.mark.parametrize(("seen", "enough"), [(1.4, False), (1.5, True), (2.0, True)])
def test_half_a_sight_is_taken_for_one(seen, enough) -> None:
    scene = Scene(policy(admit=Admit(on_sight=2)))

    assert admits(put(0), seen, scene.catalog.residents, lambda nbytes: nbytes) == enough


def test_a_block_is_stored_at_its_second_sight() -> None:
    scene = Scene(policy(admit=Admit(on_sight=2)))
    answers = [scene.answers[scene.put(0)] for _ in range(3)]

    assert answers == [Reason.NOT_ADMITTED, None, Reason.DUPLICATE]


def test_what_is_asked_for_and_not_here_is_not_seen() -> None:
    scene = Scene(policy(admit=Admit(on_sight=2)))
    scene.get(0)

    assert scene.answers[scene.put(0)] is Reason.NOT_ADMITTED


def test_a_disk_at_its_high_mark_takes_only_what_is_worth_more() -> None:
    scene = Scene(policy(evict=LFU, disk=DiskTier(high=0.9, low=0.9)), disk=100)
    for number in range(8):
        scene.recover(number, nbytes=RAW)
        scene.read(number)
        scene.read(number)
    below = scene.answers[scene.put(8)]
    scene.settle_down()
    scene.recover(9, nbytes=RAW - 2)
    scene.read(9)
    scene.read(9)
    once = scene.answers[scene.put(10)]
    often = [scene.answers[scene.put(11)] for _ in range(4)]

    assert below is None, "the disk has room for it"
    assert once is Reason.NOT_ADMITTED
    assert None in often


def test_without_a_disk_the_host_must_be_full_to_refuse() -> None:
    scene = Scene(policy(evict=LFU, host=HostTier("raw", high=0.5, low=0.5)), host=30, disk=0)
    for number in range(2):
        scene.put(number)
        scene.read(number)
    third, fourth = scene.put(2), scene.put(3)

    assert scene.answers[third] is None
    assert scene.answers[fourth] is Reason.NOT_ADMITTED


def test_lru_takes_all() -> None:
    scene = Scene(policy(host=HostTier("raw", high=1.0, low=1.0)), host=20, disk=0)
    for number in range(4):
        assert scene.answers[scene.put(number)] is None


def test_a_block_that_no_disk_can_take_is_weighed_against_the_host() -> None:
    sightings = Sightings(width=1 << 10)
    policy = Policy("p", share=Share(disk=1), evict=Evict("lfu"))
    catalog = Catalog(shelves(policy, sightings, host=100, disk=100), lambda n: n + 1, sightings)
    catalog.handle(ev.Govern(1, "t", policy))

    answers = [catalog.handle(ev.Put(n, RecordKey(bytes([n]) * 32), 1, 1, 10)) for n in range(1, 6)]

    assert answers == [[ev.Grant(n)] for n in range(1, 6)], "the host has room"


def full_disk(**fields: object) -> Scene:
    """Return a scene whose disk is full of three blocks that were used often."""
    marks = {"host": HostTier("raw", high=0.9, low=0.8), "disk": DiskTier(high=1.0, low=1.0)}
    rules = policy(evict=LFU, **(marks | fields))
    scene = Scene(rules, host=60, disk=30)
    for number in range(3):
        scene.recover(number, nbytes=RAW)
        for _ in range(3):
            scene.read(number)
    return scene


def test_a_host_with_room_keeps_what_a_full_disk_refuses_and_it_is_not_copied_behind() -> None:
    scene = full_disk()
    answer = scene.answers[scene.put(7)]
    scene.settle_down()

    assert answer is None
    assert scene.where(7) == "host"
    assert [scene.where(number).endswith("disk") for number in range(3)] == [True] * 3


def test_the_disk_takes_it_once_it_is_worth_more_than_what_is_there() -> None:
    scene = full_disk()
    scene.put(7)
    room, entry = scene.catalog.room, scene.catalog.residents.entries[key(7)]
    at_first = room.welcome(entry)
    for _ in range(8):
        scene.read(7)

    assert (at_first, room.welcome(entry)) == (False, True)
    ticket = scene.settle(7)
    scene.settle_down()
    assert scene.answers[ticket] is None
    assert scene.where(7) == "host disk"


def test_a_block_that_leaves_the_host_pushes_no_better_one_off_the_disk() -> None:
    scene = full_disk(disk=DiskTier("evict", high=1.0, low=1.0))
    scene.settle(0, 1, 2, evict=True)
    for number in range(10, 15):
        scene.put(number)
        scene.settle_down()
    for number in range(3):
        scene.read(number)  # they come up again, and newcomers must go
        scene.settle_down()

    assert [scene.where(number).endswith("disk") for number in range(3)] == [True] * 3
    assert scene.lost
    assert all(number >= 10 for number, _ in scene.lost)
