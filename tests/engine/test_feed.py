"""A ring against a list of everything: what a listener is told is all there was, or says that it is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.notices import Notice, What
from kvtcd.engine.feed import Feed

STEPS = st.lists(st.one_of(st.integers(1, 12), st.sampled_from(["take", "break"])), max_size=60)


def number(notice: Notice) -> int:
    assert notice.namespace is not None
    return int(notice.namespace)


@given(STEPS, st.integers(1, 10))
def test_notices_are_told_in_order_without_a_gap_or_an_overflow_says_so(steps, size):
    feed = Feed("boot", size)
    everything: list[int] = []
    place, last_id, told = feed.place(None), None, 0
    for step in steps:
        if isinstance(step, int):
            for _ in range(step):
                feed.publish(Notice(What.STORED, namespace=str(len(everything))))
                everything.append(len(everything))
        elif step == "break" and last_id is not None:
            place = feed.place(last_id)  # the connection is lost; the next one goes on from there
        else:
            found, place = feed.after(place)
            if found and found[0].what is What.OVERFLOW:
                assert len(found) == 1
                assert len(everything) - told > size, "nothing was lost that the ring could hold"
                told = len(everything)
            else:
                assert [number(n) for n in found] == everything[told : told + len(found)]
                assert len(found) == min(len(everything) - told, 256)
                told += len(found)
            if found:
                last_id = found[-1].id
    assert len(feed._ring) <= size


@given(st.text(max_size=40))
def test_an_id_that_is_not_of_this_daemon_is_not_known(text):
    feed = Feed("boot", 4)
    feed.publish(Notice(What.STORED))
    if text not in {"boot-0", "boot-1"}:
        assert feed.place(text) == -1
    assert feed.place("boot-1") == 1
    for never in ("boot-2", "boot-00", "boot--1", "boot-" + "9" * 5000):
        assert feed.place(never) == -1, "a number that was never given"


def test_who_was_told_before_anything_happened_that_he_missed_something_misses_nothing_from_then_on():
    feed = Feed("boot", 4)
    (overflow,), place = feed.after(feed.place("of an earlier daemon"))
    assert overflow.what is What.OVERFLOW
    assert feed.after(place) == ([], place)
    feed.publish(Notice(What.STORED, namespace="0"))  # while he is away
    found, _ = feed.after(feed.place(overflow.id))
    assert [number(n) for n in found] == [0]
