"""Blocks on several GPUs: each namespace at home on one, each GPU with room and victims of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scene import RAW, WAITS, Scene, policy

from kvtcd.core.place import Place, Tier
from kvtcd.core.policy import HostTier, Promote, Share
from kvtcd.core.reason import Reason

ONE, TWO = "cuda:0", "cuda:1"


def lifting(to: str = "gpu"):
    return policy(host=HostTier("raw", high=1.0, low=1.0), promote=Promote(to))


def two(one: int = 40, other: int = 40, **homes: str) -> Scene:
    """Two GPUs; namespace 1 is at home on the first, namespace 2 on the second."""
    policies = {1: lifting(homes.get("first", "gpu")), 2: lifting(homes.get("second", TWO))}
    return Scene(policies, gpu={ONE: one, TWO: other})


def stored(scene: Scene, *numbers: int, namespace: int = 1) -> None:
    for number in numbers:
        scene.put(number, namespace=namespace)
        scene.settle_down()


def lifts(scene: Scene) -> list[tuple[int, str | None]]:
    """Return the blocks that were lifted, and where."""
    return [(move.key[0], move.device) for move in scene.started if move.target is Place.GPU]


@pytest.mark.parametrize(
    ("to", "home"), [("gpu", "cuda:3"), ("host", "cuda:3"), ("cuda:3", "cuda:3"), (TWO, TWO)]
)
def test_a_policy_says_where_blocks_are_at_home(to, home) -> None:
    scene = Scene(lifting(to), gpu={"cuda:3": 20, TWO: 20})
    stored(scene, 0, 1)
    scene.read(0)
    scene.settle_down()
    assert lifts(scene) == ([] if to == "host" else [(0, home)])
    ticket = scene.prefetch(1, Tier.GPU)
    scene.settle_down()

    assert scene.answers[ticket] is None
    assert lifts(scene)[-1] == (1, home)


def test_copies_are_booked_where_they_lie() -> None:
    scene = two()
    stored(scene, 0, 1)
    stored(scene, 2, namespace=2)
    for number in range(3):
        scene.read(number)
    scene.settle_down()

    assert lifts(scene) == [(0, ONE), (1, ONE), (2, TWO)]
    assert scene.on_gpus() == {ONE: 2 * RAW, TWO: RAW}


def test_a_full_gpu_drops_its_own_coldest_and_nothing_of_another() -> None:
    scene = two(one=20, other=20)
    stored(scene, 5, namespace=2)
    scene.read(5)
    scene.settle_down()
    stored(scene, 0, 1, 2)
    for number in range(3):
        scene.read(number)
        scene.settle_down()

    assert [scene.where(number) for number in (5, 0, 1, 2)] == [
        "gpu host disk", "host disk", "gpu host disk", "gpu host disk",
    ]  # fmt: skip
    assert scene.on_gpus() == {ONE: 20, TWO: 10}


def test_who_waits_for_one_gpu_holds_up_nobody_who_waits_for_another() -> None:
    scene = two(one=10, other=10)
    stored(scene, 0, 1)
    stored(scene, 2, namespace=2)
    for number in range(3):
        scene.prefetch(number, Tier.GPU)

    assert scene.moving() == ["0 host-gpu", "2 host-gpu"], "and 1 waits for the end of 0"
    assert lifts(scene) == [(0, ONE), (2, TWO)]


def test_copies_elsewhere_go_when_the_home_changes_and_later_ones_come_to_the_new_one() -> None:
    scene = two()
    stored(scene, 0, 1)
    for number in (0, 1):
        scene.read(number)
    scene.settle_down()
    scene.lingering = True
    scene.govern(1, lifting(TWO))
    assert scene.drops == [(0, Place.GPU), (1, Place.GPU)]
    assert scene.on_gpus() == {ONE: 20, TWO: 0}, "what goes takes room until it has gone"
    scene.read(0)
    assert scene.moving() == [], "its older copy is still going"
    scene.vanish()
    scene.settle_down()

    assert (scene.where(0), scene.where(1)) == ("gpu host disk", "host disk")
    assert scene.on_gpus() == {ONE: 0, TWO: 10}
    assert scene.lost == []


def test_a_policy_of_the_same_home_drops_nothing() -> None:
    scene = two()
    stored(scene, 0)
    scene.read(0)
    scene.settle_down()
    for to in ("host", ONE, "gpu"):
        scene.govern(1, lifting(to))

    assert scene.where(0) == "gpu host disk"
    assert scene.drops == []


def test_a_prefetch_whose_lift_runs_when_the_home_changes_is_served_at_the_new_one() -> None:
    scene = two()
    stored(scene, 0)
    ticket = scene.prefetch(0, Tier.GPU)
    scene.govern(1, lifting(TWO))
    assert (scene.moving(), scene.on_gpus()) == (["0 host-gpu"], {ONE: 10, TWO: 0})
    scene.end(0)
    assert scene.answers[ticket] == WAITS, "it lies where nobody wants it"
    assert (lifts(scene), scene.on_gpus()) == ([(0, ONE), (0, TWO)], {ONE: 0, TWO: 10})
    scene.end(0)

    assert scene.answers[ticket] is None
    assert scene.where(0) == "gpu host disk"


def test_a_prefetch_that_waits_for_room_when_the_home_changes_finds_it_at_the_new_one() -> None:
    scene = two(one=10)
    stored(scene, 0, 1)
    scene.prefetch(0, Tier.GPU)
    ticket = scene.prefetch(1, Tier.GPU)
    scene.govern(1, lifting(TWO))
    assert lifts(scene) == [(0, ONE), (1, TWO)]
    scene.end(1)

    assert scene.answers[ticket] is None


def test_a_lift_that_nobody_waits_for_ends_with_the_home() -> None:
    scene = two()
    stored(scene, 0)
    scene.read(0)
    scene.govern(1, lifting(TWO))
    scene.settle_down()

    assert lifts(scene) == [(0, ONE)]
    assert (scene.where(0), scene.on_gpus()) == ("host disk", {ONE: 0, TWO: 0})


def test_a_home_that_changes_back_while_a_lift_runs_was_never_another() -> None:
    scene = two()
    stored(scene, 0)
    ticket = scene.prefetch(0, Tier.GPU)
    scene.govern(1, lifting(TWO))
    scene.govern(1, lifting())
    scene.end(0)

    assert (scene.answers[ticket], lifts(scene), scene.drops) == (None, [(0, ONE)], [])
    assert scene.on_gpus() == {ONE: 10, TWO: 0}


@pytest.mark.parametrize("failed", [False, True])
def test_a_copy_that_comes_down_from_a_gpu_stays_until_that_has_ended(failed) -> None:
    scene = Scene(lifting(), host=20, gpu={ONE: 10, TWO: 10})
    stored(scene, 0)
    scene.read(0)
    scene.settle_down()
    stored(scene, 1, 2)
    assert scene.where(0) == "gpu disk"
    reading = scene.get(0)
    assert "0 gpu-host" in scene.moving()
    scene.govern(1, lifting(TWO))
    waiting = scene.prefetch(0, Tier.GPU)
    assert (0, Place.GPU) not in scene.drops
    assert (scene.answers[waiting], scene.on_gpus()) == (WAITS, {ONE: 10, TWO: 0})
    scene.end(0, failed=failed)
    scene.settle_down()

    if failed:
        assert [scene.answers[ticket] for ticket in (reading, waiting)] == [Reason.FAILED] * 2
        assert (scene.where(0), scene.on_gpus()) == ("disk", {ONE: 0, TWO: 0})
    else:
        assert [scene.answers[ticket] for ticket in (reading, waiting)] == [None] * 2
        assert (scene.where(0), scene.on_gpus()) == ("gpu host disk", {ONE: 0, TWO: 10})
        assert lifts(scene)[-1] == (0, TWO)


def test_a_prefetch_is_served_when_the_home_changes_back_while_its_copy_still_lies_there() -> None:
    """Found by a long run: the copy was busy, so it had not gone, and nothing more arrived."""
    scene = Scene(lifting(), host=20, gpu={ONE: 10, TWO: 10})
    stored(scene, 0)
    scene.read(0)
    scene.settle_down()
    stored(scene, 1, 2)
    scene.get(0)
    assert "0 gpu-host" in scene.moving()
    scene.govern(1, lifting(TWO))
    waiting = scene.prefetch(0, Tier.GPU)
    assert scene.answers[waiting] == WAITS
    scene.govern(1, lifting())

    assert scene.answers[waiting] is None
    assert not scene.catalog.room.lifts


def test_leases_and_readers_keep_no_copy_on_a_gpu_that_is_no_home_any_more() -> None:
    scene = two()
    stored(scene, 0)
    scene.read(0)
    scene.settle_down()
    lease, reading = scene.lease(0), scene.get(0)
    scene.govern(1, lifting(TWO))
    scene.settle_down()

    assert (scene.answers[lease], scene.answers[reading]) == (None, None)
    assert scene.where(0) == "host disk"
    assert scene.on_gpus() == {ONE: 0, TWO: 0}


def test_blocks_whose_policy_names_a_gpu_that_holds_none_stay_on_the_host() -> None:
    scene = two()
    stored(scene, 0, 1, 2)
    scene.read(0)
    scene.settle_down()
    running = scene.prefetch(1, Tier.GPU)
    scene.govern(1, lifting("cuda:7"))
    assert scene.answers[scene.prefetch(0, Tier.GPU)] is Reason.NO_TIER
    scene.settle_down()
    scene.read(2)
    scene.settle_down()

    assert scene.answers[running] is Reason.NO_TIER
    assert [scene.where(number) for number in range(3)] == ["host disk"] * 3
    assert scene.on_gpus() == {ONE: 0, TWO: 0}


@pytest.mark.parametrize(("to", "why"), [(TWO, Reason.TOO_LARGE), ("cuda:7", Reason.NO_TIER)])
def test_who_waits_is_told_when_the_new_home_can_never_have_the_block(to, why) -> None:
    scene = two(one=10, other=5)
    stored(scene, 0, 1)
    running = scene.prefetch(0, Tier.GPU)
    waiting = scene.prefetch(1, Tier.GPU)
    scene.govern(1, lifting(to))
    assert (scene.answers[running], scene.answers[waiting]) == (WAITS, why)
    scene.settle_down()

    assert scene.answers[running] is why
    assert scene.on_gpus() == {ONE: 0, TWO: 0}


def test_who_waits_is_told_when_the_host_that_it_must_pass_has_no_more_room_for_it() -> None:
    scene = two(one=10)
    stored(scene, 0, 1)
    running, waiting = scene.prefetch(0, Tier.GPU), scene.prefetch(1, Tier.GPU)
    scene.govern(1, replace(lifting(), share=Share(host=5)))
    scene.settle_down()

    assert (scene.answers[running], scene.answers[waiting]) == (None, Reason.TOO_LARGE)


def test_a_deleted_block_leaves_the_gpu_where_it_is_lifted_to_meanwhile() -> None:
    scene = two()
    stored(scene, 0)
    prefetch = scene.prefetch(0, Tier.GPU)
    scene.govern(1, lifting(TWO))
    deleted = scene.delete(0)
    scene.settle_down()

    assert (scene.answers[prefetch], scene.answers[deleted]) == (Reason.DELETED, None)
    assert scene.where(0) == ""
    assert scene.on_gpus() == {ONE: 0, TWO: 0}
