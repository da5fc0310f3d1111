"""Readers that take blocks themselves from where they lie: they pin copies there."""

from __future__ import annotations

import pytest
from support.scene import COPIES, PACKED, RAW, UNPACKS, WAITS, Scene, key, policy

from kvtcd.core import events as ev
from kvtcd.core.arrival import Arrival
from kvtcd.core.place import Place, Tier
from kvtcd.core.policy import DiskTier, Promote
from kvtcd.core.reason import Reason


def disk_scene(**fields: object) -> Scene:
    """Return a scene with block 0 on disk alone."""
    scene = Scene(**({"policies": policy()} | fields))
    scene.recover(0)
    return scene


def packed_scene(**fields: object) -> Scene:
    """Return a scene with block 0 packed in host memory and on disk, and not raw."""
    scene = disk_scene(**fields)
    scene.catalog.room.refill_later(key(0))
    scene.tell(ev.Tick())
    scene.end(0)
    assert scene.where(0) == "packed disk"
    return scene


def test_a_block_on_disk_is_read_there_at_once_and_nothing_comes_up():
    scene = disk_scene()
    ticket = scene.get(0, UNPACKS)
    assert (scene.answers[ticket], scene.pinned[ticket]) == (None, Place.DISK)
    assert scene.moving() == []
    assert scene.used(Tier.HOST) == 0
    scene.release(0, Place.DISK)
    assert scene.where(0) == "disk"


def test_the_fastest_packed_copy_is_read():
    scene = packed_scene()
    assert scene.pinned[scene.get(0, UNPACKS)] is Place.PACKED


def test_a_raw_copy_is_read_if_there_is_one():
    scene = disk_scene()
    scene.read(0)
    assert scene.where(0) == "host disk"
    assert scene.pinned[scene.get(0, UNPACKS)] is Place.HOST


def test_a_block_that_is_on_a_gpu_comes_up_as_for_any_reader():
    scene = disk_scene(policies=policy(promote=Promote("gpu")), gpu=100)
    scene.read(0)
    scene.settle_down()
    scene.catalog.residents.drop(scene.catalog.residents.entries[key(0)], Place.HOST)
    scene.tell(ev.Tick())
    assert scene.where(0) == "gpu disk"
    ticket = scene.get(0, UNPACKS)
    assert scene.moving() == ["0 gpu-host"]
    scene.end(0)
    assert scene.pinned[ticket] is Place.HOST


def lifted_scene(**fields: object) -> Scene:
    """Return a scene with block 0 on a GPU, the host and disk, and another GPU."""
    policies, gpu = policy(promote=Promote("gpu")), {"cuda:0": RAW, "cuda:1": RAW}
    scene = Scene(**({"policies": policies, "gpu": gpu} | fields))
    scene.put(0)
    scene.settle_down()
    scene.read(0)
    scene.settle_down()
    assert scene.where(0) == "gpu host disk"
    return scene


def test_a_copy_on_a_gpu_is_read_there_before_one_on_the_host():
    scene = lifted_scene()
    assert scene.pinned[scene.get(0, COPIES)] is Place.GPU
    assert scene.pinned[scene.get(0, COPIES | UNPACKS)] is Place.GPU
    assert scene.pinned[scene.get(0)] is Place.HOST


def test_who_copies_from_a_gpu_takes_what_lies_elsewhere_from_the_host():
    scene = disk_scene(policies=policy(promote=Promote("gpu")), gpu=100)
    ticket = scene.get(0, COPIES)
    assert scene.moving() == ["0 disk-host"]
    scene.end(0)
    assert scene.pinned[ticket] is Place.HOST


def test_what_is_read_on_a_gpu_makes_no_room_there():
    scene = lifted_scene()
    scene.get(0, COPIES)
    scene.put(1)
    scene.settle_down()
    scene.read(1)
    scene.settle_down()
    assert scene.where(1) == "host disk"
    scene.release(0, Place.GPU)
    scene.settle_down()
    assert (scene.where(0), scene.where(1)) == ("host disk", "gpu host disk")


@pytest.mark.parametrize("way", ["moved home", "deleted", "last other copy lost"])
def test_a_copy_on_a_gpu_that_is_of_no_use_goes_behind_its_reader(way):
    scene = lifted_scene()
    scene.get(0, COPIES)
    if way == "moved home":
        scene.govern(1, policy(promote=Promote("cuda:1")))
    elif way == "deleted":
        ticket = scene.delete(0)
    else:
        residents = scene.catalog.residents
        residents.drop(residents.entries[key(0)], Place.HOST)
        scene.tell(ev.Unlinked((key(0),)))
    assert "gpu" not in scene.where(0)
    assert (0, Place.GPU) not in scene.drops
    scene.release(0, Place.GPU)
    scene.settle_down()
    assert (0, Place.GPU) in scene.drops
    assert scene.on_gpus()["cuda:0"] == 0
    if way == "deleted":
        assert scene.answers[ticket] is None


def test_it_needs_no_room():
    scene = disk_scene(host=RAW)
    scene.put(1)
    scene.get(1)  # and so it stays
    assert scene.answers[scene.get(0)] == WAITS
    assert scene.answers[scene.get(0, UNPACKS)] is None


def test_it_needs_not_even_a_host_on_which_it_would_fit():
    scene = disk_scene(host=RAW - 1)
    assert scene.answers[scene.get(0)] is Reason.TOO_LARGE
    assert scene.answers[scene.get(0, UNPACKS)] is None


def test_hits_are_counted_and_bring_the_block_up_for_who_needs_it_raw():
    scene = disk_scene(policies=policy(promote=Promote(on_hit=3)))
    for _ in range(2):
        scene.get(0, UNPACKS)
        scene.release(0, Place.DISK)
    assert scene.moving() == []
    scene.read(0)
    assert scene.where(0) == "host disk", "this was the third"


def test_a_read_is_a_use():
    scene = Scene(policy(disk=DiskTier(high=1.0, low=1.0)), disk=3 * RAW)
    for number in range(3):
        scene.recover(number, nbytes=RAW)
        scene.now += 1
    scene.get(0, UNPACKS)
    scene.release(0, Place.DISK)
    scene.put(3)
    assert scene.drops[0] == (1, Place.DISK), "the one that was read is younger now"


def test_a_copy_that_is_read_makes_no_room():
    scene = Scene(policy(disk=DiskTier(high=1.0, low=1.0)), disk=2 * RAW)
    scene.recover(0, nbytes=RAW)
    scene.now += 1
    scene.recover(1, nbytes=RAW)
    scene.get(0, UNPACKS)
    scene.get(0, UNPACKS)
    scene.put(2)
    assert scene.drops == [(1, Place.DISK)]
    scene.put(3)
    scene.settle_down()
    assert (0, Place.DISK) not in scene.drops
    scene.release(0, Place.DISK)
    scene.put(4)
    scene.settle_down()
    assert (0, Place.DISK) not in scene.drops, "there is another reader"
    scene.release(0, Place.DISK)
    scene.put(5)
    scene.settle_down()
    assert (0, Place.DISK) in scene.drops


def test_a_copy_that_moves_away_stays_until_it_is_read():
    scene = Scene(policy(disk=DiskTier("evict")))
    scene.ask(lambda ticket: ev.Put(ticket, key(0), 1, 16, RAW, arrival=Arrival(PACKED, None)))
    scene.tell(ev.Filled(key(0), Place.PACKED))
    assert scene.where(0) == "packed"
    scene.get(0, UNPACKS)
    scene.settle(0, evict=True)
    scene.settle_down()
    assert scene.where(0) == "packed disk"
    scene.release(0, Place.PACKED)
    assert scene.where(0) == "disk"


@pytest.mark.parametrize("way", ["delete", "expire"])
def test_a_block_that_is_to_be_forgotten_waits_for_its_readers(way):
    scene = Scene(policy())
    scene.tell(ev.Recovered((ev.Found(key(0), 1, 16, RAW, PACKED, None, 0, 5),)))
    scene.get(0, UNPACKS)
    if way == "delete":
        ticket = scene.delete(0)
        assert scene.answers[ticket] == WAITS
    else:
        scene.now += 5
        scene.tell(ev.Tick())
        assert scene.lost == [(0, Reason.EXPIRED)]
    assert scene.where(0) == ""
    assert scene.answers[scene.get(0, UNPACKS)] is Reason.NOT_FOUND
    assert scene.drops == []
    scene.release(0, Place.DISK)
    assert scene.drops == [(0, Place.DISK)]
    if way == "delete":
        assert scene.answers[ticket] is None


def test_a_damaged_copy_is_served_no_more_and_its_bytes_go_behind_its_readers():
    scene = disk_scene()
    for _ in range(2):
        scene.get(0, UNPACKS)
    scene.release(0, Place.DISK, damaged=True)
    assert scene.lost == [(0, Reason.DAMAGED)]
    assert scene.where(0) == ""
    assert scene.answers[scene.get(0, UNPACKS)] is Reason.NOT_FOUND
    assert scene.drops == []
    scene.release(0, Place.DISK, damaged=True)
    assert scene.drops == [(0, Place.DISK)]
    assert scene.lost == [(0, Reason.DAMAGED)], "once"


def test_behind_a_damaged_copy_there_may_be_another():
    scene = packed_scene()
    scene.get(0, UNPACKS)
    scene.release(0, Place.PACKED, damaged=True)
    assert (scene.where(0), scene.lost) == ("disk", [])
    assert scene.pinned[scene.get(0, UNPACKS)] is Place.DISK


def test_a_move_that_finds_damage_leaves_the_bytes_to_those_who_read_them():
    scene = disk_scene()
    scene.get(0, UNPACKS)
    ticket = scene.get(0)
    assert scene.moving() == ["0 disk-host"]
    scene.end(0, damaged=True)
    assert scene.answers[ticket] is Reason.DAMAGED
    assert scene.drops == [(0, Place.HOST)]
    scene.release(0, Place.DISK)
    assert scene.drops == [(0, Place.HOST), (0, Place.DISK)]


def test_what_is_damaged_and_moves_proves_so_there():
    scene = disk_scene()
    scene.get(0, UNPACKS)
    scene.get(0)
    scene.release(0, Place.DISK, damaged=True)
    assert scene.where(0) == "disk"
    scene.end(0, damaged=True)
    assert scene.where(0) == ""


def test_a_file_that_is_gone_is_served_no_more_though_somebody_reads_it():
    scene = disk_scene()
    scene.get(0, UNPACKS)
    scene.tell(ev.Unlinked((key(0),)))
    assert (scene.where(0), scene.drops) == ("", [])
    scene.release(0, Place.DISK)
    assert scene.drops == [(0, Place.DISK)]


def test_who_settles_for_disk_alone_waits_until_it_is_read():
    scene = packed_scene()
    scene.get(0, UNPACKS)
    ticket = scene.settle(0, evict=True)
    assert scene.answers[ticket] == WAITS
    scene.release(0, Place.PACKED)
    assert scene.answers[ticket] is None
    assert scene.where(0) == "disk"
