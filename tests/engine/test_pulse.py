"""Whether work goes on: who has something to do and gets nothing done is named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvtcd.engine.pulse import PATIENCE, Pulse


@dataclass(eq=False)
class Thread:
    name: str
    pending: int = 0
    ended: int = 0


@pytest.fixture
def threads() -> list[Thread]:
    return [Thread("read"), Thread("inflate")]


def test_whoever_has_nothing_to_do_is_never_stuck(threads) -> None:
    pulse = Pulse(lambda: threads)

    assert [pulse.stuck(now) for now in (0.0, PATIENCE, 10 * PATIENCE)] == [None] * 3


def test_whoever_ends_something_now_and_then_is_not_stuck(threads) -> None:
    pulse, thread = Pulse(lambda: threads), threads[1]
    thread.pending = 3
    for step in range(10):
        assert pulse.stuck(step * 0.9 * PATIENCE) is None
        thread.ended += 1


def test_whoever_has_been_at_one_call_for_too_long_is_named_until_it_ends(threads) -> None:
    pulse = Pulse(lambda: threads)
    assert pulse.stuck(0.0) is None
    threads[1].pending = 1
    assert pulse.stuck(100.0) is None
    assert pulse.stuck(99.0 + PATIENCE) is None
    assert pulse.stuck(100.0 + PATIENCE) == "inflate"
    threads[0].pending = 1
    assert pulse.stuck(105.0 + PATIENCE) == "inflate"
    threads[1].ended += 1
    threads[1].pending = 0
    assert pulse.stuck(110.0 + PATIENCE) is None
    assert pulse.stuck(105.0 + 2 * PATIENCE) == "read"


def test_time_counts_from_when_there_is_something_to_do(threads) -> None:
    pulse = Pulse(lambda: threads)
    pulse.stuck(0.0)
    pulse.stuck(5 * PATIENCE)
    threads[0].pending = 1

    assert pulse.stuck(5.5 * PATIENCE) is None


def test_who_has_gone_is_forgotten_and_who_is_new_begins_now(threads) -> None:
    pulse = Pulse(lambda: threads)
    threads[0].pending = 1
    pulse.stuck(0.0)
    gone = threads.pop(0)
    assert pulse.stuck(2 * PATIENCE) is None
    threads.append(gone)

    assert pulse.stuck(2 * PATIENCE) is None
