"""What becomes of a block, and of those who wait for it, when moves end well, badly, or late."""

from __future__ import annotations

import pytest
from support.scene import PACKED, RAW, WAITS, Scene, key, policy

from kvtcd.core import events as ev
from kvtcd.core.place import Tier
from kvtcd.core.policy import DiskTier, HostTier, Promote
from kvtcd.core.reason import Reason

EVICT = DiskTier("evict", high=1.0, low=1.0)


@pytest.fixture
def packed() -> Scene:
    """Blocks 0, 1 and 2 are packed in place, and nowhere else; 3, 4 and 5 are raw."""
    scene = Scene(policy(host=HostTier(high=0.5, low=0.3), disk=EVICT))
    for number in range(6):
        scene.put(number)
    scene.settle_down()
    assert [scene.where(number) for number in range(6)] == ["packed"] * 3 + ["host"] * 3
    return scene


# Damage -----------------------------------------------------------------------------------------------------


def test_a_damaged_packed_copy_that_was_the_only_one_costs_its_block(packed) -> None:
    ticket = packed.get(0)
    packed.end(0, damaged=True)

    assert packed.answers[ticket] is Reason.DAMAGED
    assert packed.lost == [(0, Reason.DAMAGED)]
    assert [packed.where(number) for number in range(3)] == ["", "packed", "packed"]


def test_a_damaged_packed_copy_is_healed_from_disk(packed) -> None:
    packed.settle(0)
    packed.settle_down()
    ticket = packed.get(0)
    assert packed.moving() == ["0 packed-host"]
    packed.end(0, damaged=True)
    assert packed.moving() == ["0 disk-host"]
    packed.end(0)

    assert packed.answers[ticket] is None
    assert packed.lost == []
    assert packed.where(0) == "host disk"


@pytest.mark.parametrize("evict", [False, True])
def test_when_a_packed_copy_proves_damaged_on_its_way_to_disk_the_raw_one_is_packed(packed, evict) -> None:
    packed.read(0)
    assert packed.where(0) == "host packed"
    ticket = packed.settle(0, evict=evict)
    assert packed.moving() == ["0 packed-disk"]
    packed.end(0, damaged=True)
    assert (packed.answers[ticket], packed.moving()) == (WAITS, ["0 host-disk"])
    packed.settle_down()

    assert packed.answers[ticket] is None
    assert packed.where(0) == ("disk" if evict else "host disk")
    assert packed.lost == []


def test_a_damaged_disk_copy_under_a_raw_one_costs_nothing() -> None:
    scene = Scene(policy())
    scene.put(0)
    scene.settle_down()
    scene.catalog.room.refill_later(key(0))
    scene.tell(ev.Tick())
    assert scene.moving() == ["0 disk-packed"]
    scene.end(0, damaged=True)

    assert scene.where(0) == "host"
    assert scene.lost == []
    assert scene.used(Tier.DISK) == 0


def test_whoever_waits_for_a_block_to_be_on_disk_alone_is_told_that_it_was_damaged_there() -> None:
    scene = Scene(policy())
    scene.put(0)
    scene.settle_down()
    scene.get(0)
    ticket = scene.settle(0, evict=True)
    scene.catalog.room.refill_later(key(0))
    scene.tell(ev.Tick())
    scene.end(0, damaged=True)
    scene.tell(ev.Release(key(0)))
    scene.settle_down()

    assert scene.answers[ticket] is Reason.DAMAGED
    assert scene.where(0) != "", "the host copy was fine"


def test_a_copy_on_a_gpu_does_not_outlive_a_damaged_base() -> None:
    scene = Scene(policy(host=HostTier("raw", high=1.0, low=1.0)), host=10, gpu=20)
    scene.put(0)
    scene.settle_down()
    scene.prefetch(0, Tier.GPU)
    scene.settle_down()
    scene.put(1)
    scene.settle_down()
    scene.delete(1)
    assert scene.where(0) == "gpu disk"
    scene.catalog.room.refill_later(key(0))
    scene.tell(ev.Tick())
    scene.end(0, damaged=True)

    assert scene.where(0) == ""
    assert scene.used(Tier.GPU) == 0
    assert scene.lost == [(0, Reason.DAMAGED)]


# Failures ---------------------------------------------------------------------------------------------------


def test_a_failed_move_down_leaves_the_source_and_all_accounts_as_they_were() -> None:
    scene = Scene(policy())
    scene.put(0)
    durable = scene.settle(0)
    scene.end(0, failed=True)

    assert scene.answers[durable] is Reason.FAILED
    assert scene.where(0) == "host"
    assert (scene.used(Tier.HOST), scene.used(Tier.DISK)) == (RAW, 0)
    assert scene.moves == [], "it is not tried in a loop"
    scene.settle(0)
    assert scene.moving() == ["0 host-disk"], "but when somebody asks again"
    assert not scene.catalog.residents.failed


def test_a_block_that_could_not_leave_is_not_to_leave_any_more() -> None:
    scene = Scene(policy(host=HostTier("raw", high=1.0, low=1.0), disk=EVICT), host=20)
    for number in range(2):
        scene.put(number)
    scene.put(2, patient=True)
    scene.tell(ev.Cancel(scene.ticket))
    assert scene.moving() == ["0 host-disk"]
    scene.end(0, failed=True)
    scene.settle(0)
    scene.settle_down()

    assert scene.where(0) == "host disk"


def test_a_block_that_leaves_the_host_before_it_could_be_lifted_is_forgotten_for_that() -> None:
    scene = Scene(policy(host=HostTier("raw", high=1.0, low=1.0), promote=Promote("gpu")), host=20, gpu=10)
    for number in range(2):
        scene.put(number)
        scene.settle_down()
    scene.read(1)
    scene.read(0)
    assert scene.moving() == ["1 host-gpu"], "there is no room for both"
    scene.put(2)
    assert scene.where(0) == "disk"

    assert not scene.catalog.room.lifts
    scene.settle_down()
    assert "gpu" not in scene.where(0)


def test_a_failed_packing_leaves_the_block_raw() -> None:
    scene = Scene(policy(host=HostTier(high=0.5, low=0.3), disk=EVICT))
    for number in range(6):
        scene.put(number)
    scene.end(0, failed=True)
    scene.settle_down()
    for number in range(6, 12):
        scene.put(number)
        scene.settle_down()

    assert scene.where(0) == "host"
    assert [str(move.target) for move in scene.started if move.key == key(0)] == ["packed"]


def test_a_failed_move_up_tells_its_readers_and_leaves_the_block() -> None:
    scene = Scene(policy())
    scene.recover(0)
    tickets = [scene.get(0), scene.get(0)]
    scene.end(0, failed=True)

    assert [scene.answers[ticket] for ticket in tickets] == [Reason.FAILED] * 2
    assert scene.where(0) == "disk"
    assert scene.used(Tier.HOST) == 0
    scene.read(0)


def test_a_failed_refill_is_forgotten() -> None:
    scene = Scene(policy())
    scene.recover(0)
    scene.catalog.room.refill_later(key(0))
    scene.tell(ev.Tick())
    scene.end(0, failed=True)

    assert scene.moves == []
    assert scene.where(0) == "disk"


def test_an_abandoned_put_gives_its_room_to_the_next() -> None:
    scene = Scene(policy(host=HostTier("raw", high=1.0, low=1.0)), host=10, disk=0)
    ticket = scene.ask(lambda t: ev.Put(t, key(0), 1, 16, RAW))
    waits = scene.put(1)
    assert [scene.answers[ticket], scene.answers[waits]] == [None, WAITS]
    scene.tell(ev.Abandoned(key(0)))

    assert scene.answers[waits] is None
    assert scene.where(0) == ""


# Order of events --------------------------------------------------------------------------------------------


def test_a_block_that_is_wanted_while_it_leaves_stays() -> None:
    scene = Scene(policy(host=HostTier("raw", high=1.0, low=1.0), disk=EVICT), host=20)
    scene.put(0)
    scene.put(1)
    scene.put(2)
    assert scene.moving() == ["0 host-disk"]
    scene.get(0)
    scene.end(0)

    assert scene.where(0) == "host disk"


def test_a_block_that_is_packed_while_it_is_read_leaves_after_its_reader() -> None:
    scene = Scene(policy(host=HostTier(high=0.5, low=0.3), disk=EVICT, promote=policy().promote))
    for number in range(6):
        scene.put(number)
    assert scene.moving()[0] == "0 host-packed"
    scene.get(0)
    scene.end(0)
    assert scene.where(0) == "host packed", "it is wanted: it stays raw, and keeps what it cost to pack it"
    scene.tell(ev.Release(key(0)))

    assert scene.where(0) == "host packed"


def test_a_full_block_dooms_its_partial_sibling_once_it_is_as_safe() -> None:
    scene = Scene(policy())
    scene.put(0, tokens=5)
    scene.settle_down()
    assert scene.where(0) == "host disk"
    ticket = scene.ask(lambda t: ev.Put(t, key(1), 1, 16, RAW, supersedes=key(0)))
    scene.tell(ev.Filled(key(1)))
    before = scene.where(0)
    scene.settle_down()

    assert scene.answers[ticket] is None
    assert before == "host disk", "the sibling is durable, its successor not yet"
    assert (scene.where(0), scene.where(1)) == ("", "host disk")


def test_a_put_of_a_block_that_is_just_being_deleted_waits_for_its_end() -> None:
    scene = Scene(policy())
    scene.put(0)
    scene.get(0)
    scene.delete(0)
    ticket = scene.put(0)
    assert scene.answers[ticket] == WAITS
    scene.tell(ev.Release(key(0)))
    scene.settle_down()

    assert scene.answers[ticket] is None
    assert scene.where(0) == "host disk"


def test_packed_bytes_are_booked_as_they_are_and_freed() -> None:
    scene = Scene(policy(host=HostTier(high=0.5, low=0.3), disk=EVICT), granule=4, bound=lambda n: n + 2)
    for number in range(5):
        scene.put(number)
    assert scene.moving() == ["0 host-packed", "1 host-packed", "2 host-packed"]
    assert scene.used(Tier.HOST) == 5 * 12 + 3 * 12
    scene.settle_down()
    assert scene.used(Tier.HOST) == 2 * 12 + 3 * 4
    scene.delete(*range(5))
    assert scene.used(Tier.HOST) == 0
    assert PACKED < 4


# What follows a block ---------------------------------------------------------------------------------------


def test_a_block_is_packed_with_what_is_known_to_follow_it() -> None:
    """0 - 1 - 2 and, from 0, 3 - 4 - 5 - 6: the longest continuation counts."""
    scene = Scene(policy(disk=EVICT))
    for number, parent in ((0, None), (1, 0), (2, 1), (3, 0), (4, 3), (5, 4), (6, 5)):
        scene.put(number, parent)
    scene.settle(*range(7))
    scene.settle_down()

    after = {move.key[0]: move.after for move in scene.started}
    assert after == {0: 64, 1: 16, 2: 0, 3: 48, 4: 32, 5: 16, 6: 0}


def test_what_was_recovered_is_known_to_follow() -> None:
    scene = Scene(policy(disk=EVICT))
    scene.recover(2, parent=1)
    scene.recover(3, parent=2)
    scene.put(1)
    scene.settle(1)

    assert scene.started[0].after == 32


def test_a_block_that_was_packed_before_its_children_came_is_never_packed_again(packed) -> None:
    packed.put(6, 0)
    packed.put(7, 6)
    packed.read(0)
    packed.settle(0, evict=True)
    packed.settle_down()
    packed.read(0)
    packed.settle_down()

    encodings = [move for move in packed.started if move.key == key(0) and str(move.source) == "host"]
    assert [(str(move.target), move.after) for move in encodings] == [("packed", 0)]
    assert "disk" in packed.where(0)


def test_a_block_that_waits_for_room_on_the_gpu_may_lose_other_copies_than_that_on_the_host() -> None:
    rules = policy(promote=Promote("gpu"), disk=DiskTier("behind", high=1.0, low=1.0))
    scene = Scene(rules, disk=12, gpu=RAW)
    for number in (1, 2):
        scene.put(number)
        scene.settle_down()
    scene.get(1)
    scene.get(2)
    assert scene.moving() == ["1 host-gpu"]
    scene.put(3)
    assert scene.where(2) == "host", "the disk needs its room"
    scene.settle_down()

    assert scene.where(2) == "gpu host"
