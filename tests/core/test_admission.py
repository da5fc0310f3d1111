"""What is stored at all: what was seen often enough, and is worth more than what would go for it."""

from __future__ import annotations

import pytest
from support.scene import RAW, Scene, key, policy

from kvtcd.core import events as ev
from kvtcd.core.admission import admits
from kvtcd.core.catalog import Catalog
from kvtcd.core.events import Reason
from kvtcd.core.keys import RecordKey
from kvtcd.core.policy import Admit, DiskTier, Evict, HostTier, Policy, Share
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
