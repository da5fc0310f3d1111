"""Every task ends once, with a result, whatever happens to it."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from support.patience import PATIENCE_S

from kvtcd.integrations.lanes import Lane

LOG = logging.getLogger("kvtcd.test")


@pytest.fixture
def ended() -> threading.Semaphore:
    return threading.Semaphore(0)


def wait(ended: threading.Semaphore, count: int = 1) -> None:
    for _ in range(count):
        assert ended.acquire(timeout=PATIENCE_S)


def test_results_are_taken_once_and_by_number(ended: threading.Semaphore) -> None:
    lane: Lane[str] = Lane("t", LOG, ended.release)
    numbers = [lane.submit(lambda text=text: text, "-") for text in "abc"]
    wait(ended, 3)

    assert len(set(numbers)) == 3
    assert lane.take(numbers[1]) == "b"
    assert lane.take(numbers[1]) is None
    assert lane.take_all() == {numbers[0]: "a", numbers[2]: "c"}
    assert lane.take_all() == {}
    lane.close()


def test_a_task_that_raises_ends_otherwise_and_the_next_goes_on(
    ended: threading.Semaphore, caplog: pytest.LogCaptureFixture
) -> None:
    lane: Lane[str] = Lane("t", LOG, ended.release)

    def fail() -> str:
        raise ValueError("broken")

    first, second = lane.submit(fail, "failed"), lane.submit(lambda: "fine", "failed")
    lane.do(lambda: fail() and None)
    third = lane.submit(lambda: "too", "failed")
    wait(ended, 3)

    assert [lane.take(number) for number in (first, second, third)] == ["failed", "fine", "too"]
    assert caplog.text.count("a task failed") == 2
    lane.close()


def test_what_waits_ends_when_the_lane_is_closed_and_what_comes_later_too(ended: threading.Semaphore) -> None:
    lane: Lane[str] = Lane("t", LOG, ended.release)
    started, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        started.set()
        assert go_on.wait(PATIENCE_S)
        return "done"

    running, waiting = lane.submit(slow, "closed"), lane.submit(lambda: "done", "closed")
    assert started.wait(PATIENCE_S)
    closer = threading.Thread(target=lane.close)
    closer.start()
    while not lane._closed:
        time.sleep(0.01)
    go_on.set()
    closer.join(PATIENCE_S)
    late = lane.submit(lambda: "done", "closed")
    wait(ended, 3)

    assert [lane.take(number) for number in (running, waiting, late)] == ["done", "closed", "closed"]
