"""Reading, promoting, fetching ahead; and what changes when something else holds for a namespace."""

from __future__ import annotations

import pytest
from support.scene import RAW, WAITS, Scene, key, policy

from kvtcd.core import events as ev
from kvtcd.core.place import Place, Tier
from kvtcd.core.policy import DiskTier, Evict, HostTier, Promote, Share
from kvtcd.core.reason import Reason

EVICT = DiskTier("evict", high=1.0, low=1.0)
BRIM = HostTier("raw", high=1.0, low=1.0)


# Promotion --------------------------------------------------------------------------------------------------


def test_on_the_first_hit_of_two_the_raw_copy_goes_after_its_reader() -> None:
    scene = Scene(policy(promote=Promote(on_hit=2)))
    scene.recover(0)
    ticket = scene.get(0)
    scene.end(0)
    during = scene.where(0)
    scene.tell(ev.Release(key(0)))

    assert scene.answers[ticket] is None
    assert (during, scene.where(0)) == ("host disk", "disk")


@pytest.mark.parametrize(("periods", "stays"), [(1, True), (2, False)])
def test_half_a_hit_is_taken_for_one(periods, stays) -> None:
    """Hits fade in halves: one is worth a half after a period, and a quarter after two."""
    scene = Scene(policy(promote=Promote(on_hit=2)))
    scene.recover(0)
    scene.read(0)
    scene.now += periods * 10**9
    scene.read(0)

    assert scene.where(0) == ("host disk" if stays else "disk")


def test_on_the_second_hit_it_stays() -> None:
    scene = Scene(policy(promote=Promote(on_hit=2)))
    scene.recover(0)
    scene.read(0)
    scene.read(0)

    assert scene.where(0) == "host disk"


@pytest.mark.parametrize("when", ["while it comes up", "while it is read"])
def test_a_second_hit_before_the_first_has_ended_counts_too(when) -> None:
    scene = Scene(policy(promote=Promote(on_hit=2)))
    scene.recover(0)
    first = scene.get(0)
    if when == "while it is read":
        scene.end(0)
        second = scene.get(0)
    else:
        second = scene.get(0)
        scene.end(0)
    scene.tell(ev.Release(key(0)), ev.Release(key(0)))

    assert [scene.answers[first], scene.answers[second]] == [None, None]
    assert scene.where(0) == "host disk"


def test_all_who_wait_for_a_block_that_will_not_stay_are_served() -> None:
    scene = Scene(policy(promote=Promote(on_hit=9)))
    scene.recover(0)
    tickets = [scene.get(0) for _ in range(3)]
    scene.end(0)
    scene.tell(ev.Release(key(0)), ev.Release(key(0)))
    during = scene.where(0)
    scene.tell(ev.Release(key(0)))

    assert [scene.answers[ticket] for ticket in tickets] == [None] * 3
    assert (during, scene.where(0)) == ("host disk", "disk")
    assert len(scene.started) == 1


def test_by_default_the_first_hit_is_enough() -> None:
    scene = Scene(policy())
    scene.recover(0)
    scene.read(0)

    assert scene.where(0) == "host disk"


def test_a_block_that_was_never_promoted_stays_raw_until_there_is_need() -> None:
    scene = Scene(policy(promote=Promote(on_hit=2)))
    scene.put(0)
    scene.settle_down()
    scene.read(0)

    assert scene.where(0) == "host disk"
    assert not scene.catalog.room.passing


def test_promotion_to_a_gpu_copies_what_is_asked_for_there_too() -> None:
    scene = Scene(policy(promote=Promote("gpu")), gpu=20)
    scene.recover(0)
    ticket = scene.get(0)
    scene.end(0)
    granted = scene.answers[ticket]
    assert scene.moving() == ["0 host-gpu"]
    scene.end(0)

    assert granted is None, "no reader waits for that"
    assert scene.where(0) == "gpu host disk"
    scene.read(0)
    assert len(scene.started) == 2


def test_with_two_hits_for_a_gpu_the_first_leaves_it_alone() -> None:
    scene = Scene(policy(promote=Promote("gpu", on_hit=2)), gpu=20)
    scene.put(0)
    scene.settle_down()
    scene.read(0)
    assert scene.moving() == []
    scene.read(0)
    scene.settle_down()

    assert scene.where(0) == "gpu host disk"


def test_without_a_gpu_the_promotion_ends_on_the_host() -> None:
    scene = Scene(policy(promote=Promote("gpu")))
    scene.recover(0)
    scene.read(0)

    assert scene.where(0) == "host disk"
    assert not scene.catalog.room.lifts


def test_a_gpu_drops_the_coldest_to_lift_others() -> None:
    scene = Scene(policy(promote=Promote("gpu")), gpu=25)
    for number in range(3):
        scene.put(number)
        scene.settle_down()
        scene.read(number)
        scene.settle_down()

    assert [scene.where(number) for number in range(3)] == ["host disk", "gpu host disk", "gpu host disk"]
    assert scene.used(Tier.GPU) == 20
    assert scene.lost == []


def test_a_copy_on_a_gpu_goes_with_the_last_other_one() -> None:
    scene = Scene(policy(host=BRIM, disk=EVICT, promote=Promote("gpu")), host=20, disk=0, gpu=20)
    scene.put(0)
    scene.read(0)
    scene.settle_down()
    assert scene.where(0) == "gpu host"
    scene.put(1)
    scene.put(2)

    assert scene.where(0) == ""
    assert scene.used(Tier.GPU) == 0
    assert scene.lost == [(0, Reason.NO_TIER)]


def test_a_block_comes_down_from_a_gpu_sooner_than_up_from_disk() -> None:
    scene = Scene(policy(host=BRIM, promote=Promote("gpu")), host=20, gpu=20)
    scene.put(0)
    scene.settle_down()
    scene.read(0)
    scene.settle_down()
    scene.put(1)
    scene.settle_down()
    scene.put(2)
    assert scene.where(0) == "gpu disk"
    scene.get(0)

    assert "0 gpu-host" in scene.moving()


def test_a_packed_copy_in_memory_is_taken_sooner_than_one_on_disk() -> None:
    scene = Scene(policy(host=HostTier(high=0.5, low=0.3), disk=EVICT))
    for number in range(6):
        scene.put(number)
    scene.settle_down()
    scene.settle(0)
    scene.settle_down()
    assert scene.where(0) == "packed disk"
    scene.get(0)

    assert scene.moving() == ["0 packed-host"]


# Prefetch ---------------------------------------------------------------------------------------------------


def test_a_prefetch_ends_when_the_block_is_raw_on_the_host() -> None:
    scene = Scene(policy())
    scene.recover(0)
    ticket = scene.prefetch(0)
    assert (scene.answers[ticket], scene.moving()) == (WAITS, ["0 disk-host"])
    scene.end(0)

    assert scene.answers[ticket] is None
    assert scene.answers[scene.prefetch(0)] is None
    assert not scene.catalog.residents.pins


def test_a_prefetch_to_a_gpu_goes_over_the_host() -> None:
    scene = Scene(policy(), gpu=20)
    scene.recover(0)
    ticket = scene.prefetch(0, Tier.GPU)
    scene.end(0)
    assert (scene.answers[ticket], scene.moving()) == (WAITS, ["0 host-gpu"])
    scene.end(0)

    assert scene.answers[ticket] is None
    assert scene.where(0) == "gpu host disk"
    assert scene.answers[scene.prefetch(0, Tier.GPU)] is None


def test_a_reader_and_a_prefetch_share_one_promotion() -> None:
    scene = Scene(policy())
    scene.recover(0)
    tickets = [scene.prefetch(0), scene.get(0), scene.prefetch(0)]
    scene.end(0)

    assert [scene.answers[ticket] for ticket in tickets] == [None] * 3
    assert len(scene.started) == 1


def test_a_prefetch_says_why_it_cannot_be() -> None:
    scene = Scene(policy(), host=100, gpu=5)
    scene.recover(0)

    assert scene.answers[scene.prefetch(7)] is Reason.NOT_FOUND
    assert scene.answers[scene.prefetch(0, Tier.DISK)] is Reason.NO_TIER
    assert scene.answers[scene.prefetch(0, Tier.GPU)] is Reason.TOO_LARGE
    none = Scene(policy())
    none.recover(0)
    assert none.answers[none.prefetch(0, Tier.GPU)] is Reason.NO_TIER
    small = Scene(policy(), host=5)
    small.recover(0)
    assert small.answers[small.prefetch(0)] is Reason.TOO_LARGE


def test_a_prefetch_is_told_when_a_move_fails() -> None:
    scene = Scene(policy(), gpu=20)
    scene.recover(0)
    up = scene.prefetch(0, Tier.GPU)
    scene.end(0, failed=True)
    lifted = scene.prefetch(0, Tier.GPU)
    scene.end(0)
    scene.end(0, failed=True)

    assert [scene.answers[up], scene.answers[lifted]] == [Reason.FAILED, Reason.FAILED]
    assert scene.where(0) == "host disk"
    assert scene.moves == []


def test_a_prefetch_to_a_gpu_brings_up_again_what_left_the_host_meanwhile() -> None:
    """There was no room on the GPU, and then the raw copy had to go."""
    scene = Scene(policy(host=BRIM), host=20, gpu=10)
    for number in (0, 1):
        scene.put(number)
        scene.settle_down()
    busy = scene.prefetch(1, Tier.GPU)
    assert scene.moving() == ["1 host-gpu"]
    waiting = scene.prefetch(0, Tier.GPU)
    assert scene.moving() == ["1 host-gpu"], "there is no room while that runs"
    scene.put(2)
    assert scene.where(0) == "disk", "a newcomer needed its room"
    scene.settle_down()

    assert [scene.answers[busy], scene.answers[waiting]] == [None, None]


def test_who_wants_a_block_that_is_just_going_waits_for_that() -> None:
    scene = Scene(policy(), gpu=10)
    scene.put(0)
    scene.settle_down()
    scene.prefetch(0, Tier.GPU)
    scene.settle_down()
    scene.lingering = True
    scene.settle(0, evict=True)
    assert scene.drops == [(0, Place.GPU), (0, Place.HOST)]
    lift, read = scene.prefetch(0, Tier.GPU), scene.get(0)
    scene.vanish()
    scene.settle_down()

    assert [scene.answers[lift], scene.answers[read]] == [None, None]
    assert scene.where(0) == "gpu host disk"


def test_a_prefetch_outlives_the_first_reader_of_a_block_that_would_not_stay() -> None:
    scene = Scene(policy(promote=Promote(on_hit=2)), gpu=10)
    scene.put(1)
    scene.settle_down()
    scene.prefetch(1, Tier.GPU)  # the GPU is busy for now
    scene.recover(0)
    scene.get(0)
    ticket = scene.prefetch(0, Tier.GPU)
    scene.end(0)
    scene.tell(ev.Release(key(0)))
    scene.settle_down()

    assert scene.answers[ticket] is None
    assert [str(move.target) for move in scene.started if move.key == key(0)] == ["host", "gpu"]


@pytest.mark.parametrize("hits", [1, 2])
def test_whoever_leaves_takes_his_wish_with_him(hits) -> None:
    scene = Scene(policy(host=BRIM, disk=EVICT, promote=Promote("gpu", on_hit=hits)), host=10, gpu=20)
    scene.put(0)
    assert scene.answers[scene.get(0)] is None
    scene.settle_down()
    scene.recover(1)
    ticket = scene.get(1)
    assert scene.answers[ticket] == WAITS
    scene.tell(ev.Cancel(ticket))
    room = scene.catalog.room

    assert not room.promotions
    assert not room.passing
    assert key(1) not in room.lifts


def test_whoever_leaves_takes_no_other_wish_with_him() -> None:
    scene = Scene(policy(host=BRIM, disk=EVICT), host=10)
    scene.put(0)
    scene.get(0)
    scene.recover(1)
    get, prefetch = scene.get(1), scene.prefetch(1)
    scene.tell(ev.Cancel(get))
    scene.tell(ev.Release(key(0)))
    scene.settle_down()

    assert (scene.answers[get], scene.answers[prefetch]) == (WAITS, None)
    assert scene.where(1) == "host disk"


def test_a_put_that_is_withdrawn_gets_no_room() -> None:
    scene = Scene(policy(host=BRIM, disk=EVICT), host=20)
    for number in range(2):
        scene.put(number)
    ticket, next_one = scene.put(2, patient=True), scene.put(3, patient=True)
    scene.tell(ev.Cancel(ticket))
    scene.settle_down()

    assert (scene.answers[ticket], scene.answers[next_one]) == (WAITS, None)
    assert scene.where(2) == ""


# Other rules ------------------------------------------------------------------------------------------------


def test_a_smaller_share_tells_those_who_wait_for_what_can_never_be() -> None:
    scene = Scene(policy(host=BRIM, disk=EVICT), host=40)
    scene.recover(7)
    for number in range(4):
        scene.put(number)
        scene.get(number)
    put, get, prefetch = scene.put(4, nbytes=20), scene.get(7), scene.prefetch(7)
    durable = scene.put(5, nbytes=1, patient=True)
    assert [scene.answers[t] for t in (put, get, prefetch)] == [WAITS] * 3
    scene.govern(1, policy(host=BRIM, disk=EVICT, share=Share(host=5)))

    assert [scene.answers[t] for t in (put, get, prefetch)] == [Reason.TOO_LARGE] * 3
    assert scene.answers[durable] == WAITS, "that one may fit"


def test_a_smaller_share_of_the_disk_tells_those_who_wait_for_durability() -> None:
    scene = Scene(policy(host=BRIM, disk=EVICT), host=40, descents=1)
    scene.put(0)
    scene.put(1)
    runs, waits = scene.settle(0), scene.settle(1)
    scene.govern(1, policy(host=BRIM, disk=EVICT, share=Share(disk=5)))
    assert [scene.answers[runs], scene.answers[waits]] == [WAITS, Reason.TOO_LARGE]
    scene.settle_down()

    assert scene.answers[runs] is None, "what runs is not broken off"


def test_a_promotion_that_runs_is_not_broken_off_by_a_smaller_share() -> None:
    scene = Scene(policy())
    scene.recover(0)
    ticket = scene.get(0)
    scene.govern(1, policy(share=Share(host=5)))
    assert scene.answers[ticket] == WAITS
    scene.end(0)

    assert scene.answers[ticket] is None


def test_what_is_here_is_read_even_if_it_would_not_fit_any_more() -> None:
    scene = Scene(policy())
    scene.put(0)
    scene.govern(1, policy(share=Share(host=5)))

    assert scene.answers[scene.get(0)] is None


def test_a_block_expires_once() -> None:
    scene = Scene(policy(disk=DiskTier(ttl=10)))
    scene.put(0)
    scene.get(0)
    scene.now += 20
    for _ in range(3):
        scene.tell(ev.Tick())

    assert scene.lost == [(0, Reason.EXPIRED)]


def test_another_policy_of_eviction_takes_over_the_order() -> None:
    lru = policy(host=BRIM, disk=EVICT)
    scene = Scene(lru, host=60)
    for number in range(6):
        scene.put(number)
    scene.read(1)
    scene.read(0)
    scene.govern(1, policy(host=BRIM, disk=EVICT, evict=Evict("s3fifo")))
    scene.govern(1, lru)
    scene.put(6, nbytes=30)

    assert scene.moving() == ["2 host-disk", "3 host-disk", "4 host-disk"]


def test_what_was_passed_over_for_its_children_is_the_coldest_under_another_policy() -> None:
    scene = Scene(policy(host=BRIM, disk=EVICT), host=50)
    for number in range(5):
        scene.put(number, number - 1 if number else None)
    scene.put(5)  # the search came by 0, 1, 2 and 3
    assert scene.moving() == ["4 host-disk"]
    scene.settle_down()
    scene.govern(1, policy(host=BRIM, disk=EVICT, evict=Evict("lru", leaves_first=False)))
    scene.put(6)

    assert scene.moving() == ["0 host-disk"]


def test_the_form_of_the_host_may_change() -> None:
    scene = Scene(policy(host=HostTier("raw", high=0.5, low=0.3), disk=EVICT))
    for number in range(6):
        scene.put(number)
    assert scene.moving()[0] == "0 host-disk"
    scene.settle_down()
    scene.govern(1, policy(host=HostTier("raw-then-packed", high=0.5, low=0.3), disk=EVICT))
    for number in range(6, 9):
        scene.put(number)

    assert scene.moving()[0] == "3 host-packed"


def test_other_marks_hold_at_once_for_the_whole_tier() -> None:
    scene = Scene(policy(host=BRIM, disk=EVICT))
    for number in range(8):
        scene.put(number)
    assert scene.started == []
    scene.tell(ev.Mark(policy(host=HostTier("raw", high=0.5, low=0.3), disk=EVICT)))

    assert scene.moving() == [f"{number} host-disk" for number in range(5)]


def test_the_marks_of_a_tenants_share_are_those_of_the_tier() -> None:
    scene = Scene(policy(host=BRIM, disk=EVICT), tenants=Share(host=0.8))
    for number in range(5):
        scene.put(number)
    scene.tell(ev.Mark(policy(host=HostTier("raw", high=0.5, low=0.25), disk=EVICT)))

    assert scene.moving() == [f"{number} host-disk" for number in range(3)], "from 50 to 20 of 80"


def test_marks_of_a_namespace_are_those_of_its_share() -> None:
    scene = Scene(
        policy(host=HostTier("raw", high=0.5, low=0.25), disk=EVICT, share=Share(host=0.8)),
        whole=policy(host=BRIM),
    )
    for number in range(5):
        scene.put(number)

    assert scene.moving() == [f"{number} host-disk" for number in range(3)]


def test_closing_a_namespace_denies_who_waits_to_store_in_it() -> None:
    rules = policy(host=BRIM, disk=EVICT)
    scene = Scene({1: rules, 2: rules}, host=20)
    for number in range(2):
        scene.put(number)
        scene.get(number)
    mine, theirs = scene.put(2), scene.put(3, namespace=2)
    scene.tell(ev.Close(1))

    assert (scene.answers[mine], scene.answers[theirs]) == (Reason.DELETED, WAITS)


def test_nothing_is_left_of_a_namespace_that_is_gone() -> None:
    rules = policy(host=HostTier(high=0.5, low=0.3))
    scene = Scene({1: rules, 2: rules}, gpu=20, owners={1: "a", 2: "b"})
    for number in range(6):
        scene.put(number, namespace=2)
    scene.settle_down()
    scene.prefetch(5, Tier.GPU)
    scene.lease(0)
    scene.settle_down()
    scene.unlease(0)
    scene.delete(*range(6))
    scene.settle_down()
    scene.tell(ev.Ungovern(2))
    residents = scene.catalog.residents

    assert not residents.entries
    assert residents.rules.keys() == {1}
    for shelf in (*residents.shelves.values(), *residents.gpus.shelves.values()):
        assert shelf.whole.used == shelf.whole.leaving == shelf.whole.dropping == 0
        assert shelf.whole.namespaces == {1}
        assert shelf._namespaces.keys() == shelf._booked.keys() == {1}
        assert shelf._tenants.keys() == {"a"}
        assert all(parts.keys() == {1} for parts in shelf.parts.values())
    assert not residents._interned._kinds
    assert not residents.lineage._orphans


def test_a_delete_waits_for_readers_and_for_moves() -> None:
    scene = Scene(policy())
    scene.put(0)
    scene.get(0)
    assert scene.moving() == ["0 host-disk"]
    ticket = scene.delete(0)
    first = scene.answers[ticket]
    scene.end(0)
    second = scene.answers[ticket]
    scene.tell(ev.Release(key(0)))

    assert (first, second, scene.answers[ticket]) == (WAITS, WAITS, None)
    assert scene.used(Tier.HOST) == scene.used(Tier.DISK) == 0


def test_a_block_that_is_evicted_by_request_leaves_all_of_memory() -> None:
    scene = Scene(policy(disk=EVICT, host=HostTier(high=0.5, low=0.3)), gpu=20)
    for number in range(6):
        scene.put(number)
    scene.settle_down()
    scene.prefetch(0, Tier.GPU)
    scene.settle_down()
    assert scene.where(0) == "gpu host packed"
    ticket = scene.settle(0, evict=True)
    scene.settle_down()

    assert scene.answers[ticket] is None
    assert scene.where(0) == "disk"
    assert Place.PACKED not in scene.catalog.residents.entries[key(0)].copies


def test_a_block_that_is_to_be_on_disk_alone_leaves_all_places_though_it_had_to_go_anyway() -> None:
    """A newcomer's need sends it down before its own turn comes."""
    scene = Scene(policy(host=BRIM, disk=EVICT), host=20, gpu=20, descents=1)
    scene.put(0)
    scene.prefetch(0, Tier.GPU)
    scene.settle_down()
    scene.put(1)
    scene.settle(1)
    ticket = scene.settle(0, evict=True)
    scene.put(2, patient=True)
    assert scene.moving() == ["1 host-disk"]
    scene.settle_down()

    assert scene.answers[ticket] is None
    assert scene.where(0) == "disk"


def test_a_block_on_disk_that_is_to_be_there_alone_leaves_memory_at_once() -> None:
    scene = Scene(policy())
    scene.put(0)
    scene.settle_down()
    ticket = scene.settle(0, evict=True)

    assert scene.answers[ticket] is None
    assert scene.where(0) == "disk"


def test_a_reader_does_not_keep_a_block_that_is_to_be_on_disk_alone() -> None:
    scene = Scene(policy(disk=EVICT))
    scene.put(0)
    ticket = scene.settle(0, evict=True)
    scene.get(0)
    scene.end(0)
    during = scene.where(0)
    scene.tell(ev.Release(key(0)))

    assert (during, scene.where(0)) == ("host disk", "disk")
    assert scene.answers[ticket] is None


def test_a_put_of_what_is_here_counts_as_a_use() -> None:
    scene = Scene(policy(host=BRIM, disk=EVICT), host=3 * RAW)
    for number in range(3):
        scene.put(number)
    assert scene.answers[scene.put(0)] is Reason.DUPLICATE
    scene.put(3)

    assert scene.moving() == ["1 host-disk"]
