"""Who makes room, and how: packed in place, moved down, dropped, or lost for a newcomer."""

from __future__ import annotations

import pytest
from support.scene import PACKED, RAW, WAITS, Scene, policy

from kvtcd.core import events as ev
from kvtcd.core.place import Tier
from kvtcd.core.policy import DiskTier, Evict, HostTier
from kvtcd.core.reason import Reason

EVICT = DiskTier("evict", high=1.0, low=1.0)


def packing(*, high: float = 0.5, low: float = 0.3, raw: float = 0.0, **fields: object):
    """Pack in place above the high mark; the disk gets only what the host must give up."""
    host = HostTier("raw-then-packed", raw=raw, high=high, low=low)
    return policy(host=host, **({"disk": EVICT} | fields))


def full(*, form: str = "raw", **fields: object):
    """Fill the host to the brim before anything leaves it."""
    return policy(host=HostTier(form, high=1.0, low=1.0), **({"disk": EVICT} | fields))


# Marks ------------------------------------------------------------------------------------------------------


def test_nothing_is_packed_up_to_the_high_mark() -> None:
    scene = Scene(packing(), host=100)
    for number in range(5):
        scene.put(number)

    assert scene.started == []


def test_above_the_high_mark_the_coldest_are_packed_in_place_down_to_the_low_one() -> None:
    scene = Scene(packing(), host=100)
    for number in range(6):
        scene.put(number)
    assert scene.moving() == ["0 host-packed", "1 host-packed", "2 host-packed"]
    scene.settle_down()

    assert [scene.where(number) for number in range(6)] == ["packed"] * 3 + ["host"] * 3
    assert scene.used(Tier.HOST) == 3 * PACKED + 3 * RAW
    assert scene.used(Tier.DISK) == 0


def test_the_low_mark_is_reached_although_only_a_few_are_packed_at_once() -> None:
    scene = Scene(packing(), host=1000, descents=2)
    for number in range(51):
        scene.put(number)
    assert len(scene.moves) == 2
    scene.settle_down()

    left = sum(scene.where(number) == "host" for number in range(51))
    assert left * RAW <= 300, "raw bytes alone are at the low mark"
    assert scene.used(Tier.HOST) <= 300 + 2 * RAW
    assert scene.used(Tier.HOST) > 300 - 2 * RAW


def test_no_more_is_packed_because_something_else_happens_meanwhile() -> None:
    scene = Scene(packing(), host=1000)
    for number in range(6):
        scene.put(number, nbytes=100)
    scene.get(5)
    scene.get(4)

    assert len(scene.moves) == 3


def test_a_block_that_is_used_is_packed_later() -> None:
    scene = Scene(packing(), host=100)
    for number in range(5):
        scene.put(number)
    scene.read(0)
    scene.put(5)

    assert scene.moving() == ["1 host-packed", "2 host-packed", "3 host-packed"]


def test_a_prefix_is_packed_although_others_continue_it() -> None:
    scene = Scene(packing(), host=100)
    for number in range(6):
        scene.put(number, number - 1 if number else None)

    assert scene.moving() == ["0 host-packed", "1 host-packed", "2 host-packed"]


@pytest.mark.parametrize("blocks", [100, 250])
def test_a_disk_above_its_high_mark_loses_the_coldest_down_to_the_low_one(blocks) -> None:
    """The second time it takes several passes."""
    scene = Scene(policy(disk=DiskTier(high=0.9, low=0.5)), host=100, disk=blocks * PACKED)
    high, low = blocks * 9 // 10, blocks // 2
    for number in range(high):
        scene.recover(number)
    assert scene.lost == []
    scene.recover(high)

    assert scene.lost == [(number, Reason.NO_TIER) for number in range(high + 1 - low)]
    assert scene.used(Tier.DISK) == low * PACKED


# Raw and packed ---------------------------------------------------------------------------------------------


def test_below_the_raw_share_packed_copies_go_first_to_disk() -> None:
    """When room is needed for the eighth block, 40 of 46 bytes are raw."""
    moving = {}
    for share in (0.86, 0.87):
        scene = Scene(packing(raw=share), host=100)
        for number in range(6):
            scene.put(number)
        scene.settle_down()
        assert [scene.where(number) for number in range(6)] == ["packed"] * 3 + ["host"] * 3
        scene.put(6)
        scene.put(7)
        moving[share] = scene.moving()[:3]

    assert moving == {
        0.86: ["3 host-packed", "4 host-packed", "5 host-packed"],
        0.87: ["0 packed-disk", "1 packed-disk", "2 packed-disk"],
    }


def test_packed_copies_that_are_on_disk_already_are_dropped() -> None:
    scene = Scene(packing(raw=0.95), host=100)
    for number in range(6):
        scene.put(number)
    scene.settle_down()
    scene.settle(0, 1, 2)
    scene.settle_down()
    assert [scene.where(number) for number in range(3)] == ["packed disk"] * 3
    for number in (6, 7):
        scene.put(number)

    assert [scene.where(number) for number in range(8)] == ["disk"] * 3 + ["host"] * 5
    assert scene.moving()[0] == "3 host-packed", "there is nothing packed left, and so the raw ones are next"


def test_packed_copies_stay_while_raw_ones_are_on_their_way() -> None:
    """More must go than one move frees; but the packer is at it, and what is packed is dear."""
    scene = Scene(packing(disk=DiskTier("evict")), host=100, descents=1)
    for number in range(6):
        scene.put(number)
    scene.end(0)
    scene.tell(ev.Mark(full()))
    scene.settle_down()
    scene.settle(0)
    scene.settle_down()
    assert scene.where(0) == "packed disk"
    scene.tell(ev.Mark(packing(high=0.3, low=0.1)))

    assert [move.split()[1] for move in scene.moving()] == ["host-packed"]
    assert scene.where(0) == "packed disk"


def test_without_packed_copies_raw_ones_are_packed_whatever_their_share() -> None:
    scene = Scene(packing(raw=1.0), host=100)
    for number in range(6):
        scene.put(number)

    assert scene.moving()[0] == "0 host-packed"


def test_a_promoted_block_keeps_its_packed_copy_and_is_never_packed_again() -> None:
    scene = Scene(packing(), host=100)
    for number in range(6):
        scene.put(number)
    scene.settle_down()
    scene.read(0)
    assert scene.where(0) == "host packed"
    for number in (1, 2, 3, 4, 5):
        scene.read(number)
        scene.settle_down()
    for number in range(6, 10):
        scene.put(number)
        scene.settle_down()

    assert scene.where(0) == "packed"
    packed = [move.key[0] for move in scene.started if str(move.target) == "packed"]
    assert len(packed) == len(set(packed)), "each block is packed once"


def test_a_raw_block_that_is_on_disk_is_dropped_and_its_packed_copy_comes_up_when_there_is_room() -> None:
    scene = Scene(packing(disk=DiskTier("behind", high=1.0, low=1.0)), host=100)
    for number in range(5):
        scene.put(number)
    scene.settle_down()
    assert scene.where(0) == "host disk"
    scene.put(5)
    dropped = [scene.where(number) for number in range(3)]
    scene.settle_down()

    assert dropped == ["disk"] * 3, "packing once more would cost an encoding"
    assert [scene.where(number) for number in range(3)] == ["packed disk"] * 3
    assert [str(m.target) for m in scene.started if m.key[0] == 0] == ["disk", "packed"]


def test_the_form_raw_moves_down_instead() -> None:
    scene = Scene(policy(host=HostTier("raw", high=0.5, low=0.3), disk=EVICT), host=100)
    for number in range(6):
        scene.put(number)

    assert scene.moving() == ["0 host-disk", "1 host-disk", "2 host-disk"]


def test_without_a_disk_blocks_are_packed_and_packed_ones_are_lost_only_for_newcomers() -> None:
    scene = Scene(packing(), host=40, disk=0)
    for number in range(11):
        scene.put(number)
        scene.settle_down()
    before = list(scene.lost)
    for number in range(11, 60):
        scene.put(number)
        scene.settle_down()

    assert before == [], "11 packed ones leave room to pack one more"
    assert scene.used(Tier.HOST) <= 40
    assert {reason for _, reason in scene.lost} == {Reason.NO_TIER}
    assert [number for number, _ in scene.lost] == list(range(len(scene.lost))), "the coldest"
    assert sum(scene.where(number) == "packed" for number in range(60)) > 8, "it goes on so"


def test_a_host_without_room_to_pack_in_loses_nothing_ahead_of_need() -> None:
    scene = Scene(policy(host=HostTier(high=0.95, low=0.85)), host=20, disk=0)
    scene.put(0)
    scene.put(1)
    before = list(scene.lost)
    scene.put(2)

    assert before == []
    assert scene.lost == [(0, Reason.NO_TIER)]


def test_where_nothing_can_be_packed_in_place_blocks_go_to_disk() -> None:
    scene = Scene(full(form="raw-then-packed"), host=30)
    for number in range(3):
        scene.put(number)
    ticket = scene.put(3)
    assert scene.moving() == ["0 host-disk"], "there is no room for a packed copy beside the raw one"
    scene.settle_down()

    assert scene.answers[ticket] is None


def test_a_raw_copy_that_is_on_disk_goes_when_packed_ones_cannot() -> None:
    """It counts to the share that stays raw, but nothing else is left to go."""
    scene = Scene(packing(high=0.6, low=0.6, raw=0.9), host=30)
    scene.put(0)
    scene.put(1)
    scene.end(0)
    scene.settle(0)
    scene.end(0, failed=True)  # it is not tried again, and so the lease keeps it here
    scene.lease(0)
    scene.settle(1)
    scene.settle_down()
    assert (scene.where(0), scene.where(1)) == ("packed", "host disk")
    ticket = scene.put(2, nbytes=20)

    assert scene.answers[ticket] is None
    assert scene.where(1) == "disk"


# Leaves -----------------------------------------------------------------------------------------------------


def test_a_block_that_leaves_for_the_disk_goes_after_what_continues_it() -> None:
    scene = Scene(full(), host=30)
    for number in range(3):
        scene.put(number, number - 1 if number else None)
    scene.put(9)

    assert scene.moving() == ["2 host-disk"]


def test_packed_copies_leave_leaf_first() -> None:
    scene = Scene(packing(raw=0.95), host=100)
    for number in range(6):
        scene.put(number, number - 1 if 0 < number < 3 else None)
    scene.settle_down()
    for number in (6, 7, 8):
        scene.put(number)

    assert scene.moving() == ["2 packed-disk", "1 packed-disk", "0 packed-disk"]


def test_the_disk_loses_the_end_of_a_prefix_first() -> None:
    scene = Scene(policy(disk=DiskTier(high=0.9, low=0.5)), host=100, disk=10 * PACKED)
    for number in range(9):
        scene.recover(number, number - 1 if number else None)
    scene.recover(9)

    assert [number for number, _ in scene.lost] == [8, 7, 6, 5, 4]


def test_a_gpu_drops_prefixes_without_regard_to_leaves() -> None:
    scene = Scene(policy(), host=100, gpu=20)
    for number, parent in ((0, None), (1, 0), (2, None), (3, None)):
        scene.put(number, parent)
        scene.settle_down()
    for number in (0, 2, 3):
        scene.prefetch(number, Tier.GPU)
        scene.settle_down()

    assert [scene.where(number) for number in (0, 2, 3)] == ["host disk", "gpu host disk", "gpu host disk"]


# Pressure ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pressed() -> Scene:
    """Every slot of the packer is busy with a chain's end, and the host is full."""
    scene = Scene(full(), host=50, descents=1)
    for number in range(5):
        scene.put(number)
    scene.settle(4)
    assert scene.moving() == ["4 host-disk"]
    return scene


def test_a_newcomer_has_the_coldest_lost_while_the_packer_is_behind(pressed) -> None:
    ticket = pressed.put(5)

    assert pressed.answers[ticket] is None
    assert pressed.lost == [(0, Reason.PRESSURE)]
    assert pressed.moving() == ["4 host-disk"]


def test_a_patient_newcomer_waits_for_the_packer(pressed) -> None:
    ticket = pressed.put(5, patient=True)
    assert (pressed.answers[ticket], pressed.lost) == (WAITS, [])
    pressed.settle_down()

    assert (pressed.answers[ticket], pressed.lost) == (None, [])


@pytest.mark.parametrize("form", ["raw", "raw-then-packed"])
def test_pressure_loses_leaves_first(form) -> None:
    scene = Scene(full(form=form), host=50, descents=1)
    for number in range(4):
        scene.put(number, number - 1 if number else None)
    scene.put(4)
    scene.settle(4)
    scene.put(5)

    assert scene.lost == [(3, Reason.PRESSURE)]


def test_a_newcomer_does_not_wait_for_what_is_leaving() -> None:
    scene = Scene(full(), host=50, descents=1)
    for number in range(5):
        scene.put(number)
    left = scene.put(5, patient=True)
    assert scene.moving() == ["0 host-disk"]
    scene.tell(ev.Cancel(left))
    ticket = scene.put(6)

    assert scene.answers[ticket] is None
    assert scene.lost == [(1, Reason.PRESSURE)]


def test_pressure_loses_leaves_first_while_something_leaves() -> None:
    scene = Scene(full(form="raw-then-packed"), host=60, descents=1)
    scene.put(9)
    for number in range(4):
        scene.put(number, number - 1 if number else None)
    scene.put(4)
    left = scene.put(5, patient=True)
    assert scene.moving() == ["9 host-disk"]
    scene.tell(ev.Cancel(left))
    scene.put(6)

    assert scene.lost == [(3, Reason.PRESSURE)]


def test_a_prefix_that_pressure_passed_over_is_still_the_first_to_be_packed() -> None:
    scene = Scene(packing(high=1.0, low=1.0), host=60, descents=1)
    for number in range(4):
        scene.put(number, number - 1 if number else None)
    scene.put(4)
    scene.put(5)
    scene.settle(5)
    scene.put(6)
    assert scene.lost == [(3, Reason.PRESSURE)]
    scene.settle_down()
    scene.delete(4)  # there must be room to pack in
    scene.tell(ev.Mark(packing(high=0.7, low=0.5)))
    scene.settle_down()

    packed = [move.key[0] for move in scene.started if str(move.target) == "packed"]
    assert packed[:2] == [0, 1]


def test_what_somebody_waits_for_to_be_durable_is_not_lost() -> None:
    scene = Scene(full(), host=50, descents=1)
    for number in range(5):
        scene.put(number)
    tickets = [scene.settle(4), scene.settle(0, 1), scene.settle(2, evict=True)]
    newcomer = scene.put(5)

    assert scene.answers[newcomer] is None
    assert scene.lost == [(3, Reason.PRESSURE)]
    scene.settle_down()
    assert [scene.answers[ticket] for ticket in tickets] == [None] * 3


def test_under_pressure_a_block_that_is_also_elsewhere_is_dropped_without_loss() -> None:
    scene = Scene(full(), host=50, descents=1)
    scene.recover(0)
    scene.read(0)
    for number in range(1, 5):
        scene.put(number)
    scene.settle(4)
    scene.put(5)

    assert scene.lost == []
    assert scene.where(0) == "disk"


def test_lossless_hurries_the_coldest_down_with_up_to_twice_the_slots() -> None:
    scene = Scene(full(packer_behind="lossless"), host=50, descents=1)
    for number in range(5):
        scene.put(number)
    scene.settle(4)
    first = scene.put(5)
    assert scene.moving() == ["4 host-disk", "0 host-disk"]
    assert [move.lossless for move in scene.moves] == [False, True]
    assert (scene.answers[first], scene.lost) == (WAITS, [])
    second = scene.put(6)

    assert scene.answers[second] == WAITS, "in its turn"
    scene.settle_down()
    assert [scene.answers[first], scene.answers[second]] == [None, None]


def test_when_all_hurried_slots_are_busy_too_the_coldest_is_lost() -> None:
    scene = Scene(full(packer_behind="lossless"), host=50, descents=1)
    for number in range(5):
        scene.put(number)
    scene.settle(4)
    scene.put(5, nbytes=2 * RAW)

    assert scene.moving() == ["4 host-disk", "0 host-disk"]
    assert scene.lost == [(1, Reason.PRESSURE)]


def test_no_put_loses_anything_while_the_packer_keeps_up() -> None:
    scene = Scene(full(), host=50, descents=2)
    for number in range(5):
        scene.put(number)
    ticket = scene.put(5)

    assert (scene.answers[ticket], scene.lost) == (WAITS, [])
    assert scene.moving() == ["0 host-disk"]


# Order of several places ------------------------------------------------------------------------------------


def test_lru_is_of_each_namespace_and_the_longest_idle_goes_first_between_them() -> None:
    rules = full()
    scene = Scene({1: rules, 2: rules}, host=40)
    scene.put(0, namespace=2)
    scene.put(1, namespace=1)
    scene.put(2, namespace=2)
    scene.put(3, namespace=1)
    scene.put(4, namespace=1)
    assert scene.moving() == ["0 host-disk"]


def test_a_block_whose_move_failed_is_not_tried_again_but_lost_for_newcomers() -> None:
    scene = Scene(full(evict=Evict("lru")), host=20)
    scene.put(0)
    scene.put(1)
    scene.put(2)
    scene.end(0, failed=True)

    assert scene.lost == [(0, Reason.NO_TIER)]
    assert scene.where(2) == "host"


def test_a_packed_block_is_not_lost_for_room_to_pack_in_while_every_slot_is_busy() -> None:
    scene = Scene({1: packing(low=0.5), 2: packing(disk=DiskTier("behind"))}, host=60, descents=1)
    scene.tell(ev.Govern(1, "tenant", packing(low=0.5), on_disk=False))
    scene.put(3)
    scene.put(0, nbytes=20)
    scene.put(4, nbytes=20, namespace=2)
    scene.end(3)
    assert scene.moving() == ["4 host-disk"]
    scene.get(3)

    assert scene.lost == []
    assert scene.moving() == ["4 host-disk", "3 packed-host"]


def test_packed_copies_stay_while_a_raw_one_of_another_namespace_leaves() -> None:
    scene = Scene({1: packing(low=0.5), 2: packing(high=1.0, raw=0.9)}, host=30, descents=2)
    scene.put(2)
    scene.put(7, namespace=2, patient=True)
    scene.end(2)
    assert scene.where(2) == "packed"
    scene.put(3, patient=True)
    scene.put(6, namespace=2, patient=True)

    assert scene.moving() == ["7 host-disk"]


def test_packed_copies_stay_while_the_bytes_of_another_copy_are_just_going() -> None:
    rules = {number: packing(high=high, raw=0.5) for number, high in ((1, 0.8), (2, 1.0))}
    scene = Scene(rules, host=60, descents=1)
    scene.put(4, namespace=2)
    scene.put(3, nbytes=20)
    scene.put(6, nbytes=20, namespace=2, patient=True)
    scene.end(4)
    scene.end(3)

    assert "4 packed-disk" not in [f"{m.key[0]} {m.source}-{m.target}" for m in scene.started]
    assert scene.where(4) == "packed"
