"""Calls timed in turn: every round runs each of them once, so what disturbs the machine disturbs all alike.

On one thread of a CPU, seconds are those that the core has worked for it: what else the machine does in the
meantime is not counted. On several threads they are seconds of the clock on the wall; on a GPU, of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from kvtcd.codec.stages import Stopwatch

Key = TypeVar("Key", bound=Hashable)
LEAST_ROUNDS = 3
OTHER = "other"
"""What no stage has claimed of a run."""


class Clock(Protocol):
    """How a run is timed."""

    def now(self) -> Any:  # noqa: ANN401 - seconds, or an event
        """Return this moment."""
        ...

    def between(self, begin: Any, end: Any) -> float:  # noqa: ANN401 - what `now` returned
        """Return the seconds between two moments, once they have come to pass."""
        ...


class HostClock(Clock):
    """Of a CPU with so many threads; see the module."""

    def __init__(self, threads: int) -> None:
        self._now = time.thread_time if threads == 1 else time.perf_counter

    def now(self) -> float:
        """Return this moment."""
        return self._now()

    def between(self, begin: float, end: float) -> float:
        """Return the seconds between two moments."""
        return end - begin


class DeviceClock(Clock):
    """Of a GPU: events on the stream that is current, so nothing waits where it would not."""

    def now(self) -> torch.cuda.Event:
        """Return the moment at which the device has done what was launched."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no type for it
        event.record()
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two moments, once they have come to pass."""
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a call.

    Attributes:
        seconds: of all of it.
        stages: seconds by stage of a codec, and of what belongs to none; they add up to the whole.
    """

    seconds: float
    stages: Mapping[str, float]


def run(call: Callable[[], object], clock: Clock) -> Run:
    """Time one run of a call."""
    watch = Stopwatch(clock.now)
    begin = clock.now()
    with watch.running():
        call()
    seconds = clock.between(begin, clock.now())
    stages: dict[str, float] = {}
    for name, first, last in watch.spans:
        stages[name] = stages.get(name, 0.0) + clock.between(first, last)
    return Run(seconds, stages | {OTHER: seconds - sum(stages.values())})


def in_turn(
    calls: Mapping[Key, Callable[[], object]], clock: Clock, until: float, watch: Callable[[], None]
) -> dict[Key, Run]:
    """Run all calls once and forget it, then again and again; return the run of median time of each.

    Args:
        calls: what to time.
        clock: by which.
        until: no round begins after that, by `time.monotonic`, once there have been `LEAST_ROUNDS`.
        watch: told of the end of each round.
    """
    for call in calls.values():
        call()
    runs: dict[Key, list[Run]] = {key: [] for key in calls}
    rounds = 0
    while rounds < LEAST_ROUNDS or time.monotonic() < until:
        for key, call in calls.items():
            runs[key].append(run(call, clock))
        rounds += 1
        watch()
    return {key: sorted(all_, key=lambda one: one.seconds)[rounds // 2] for key, all_ in runs.items()}
