"""Names for the parts of a codec's work, and when they began and ended, for `kvtcd bench codec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class Stopwatch:
    """Notes the stages of one thread while it is `running`.

    Args:
        now: what is noted: seconds, or an event of a GPU.

    Attributes:
        spans: stage, begin and end, in order.
    """

    def __init__(self, now: Callable[[], Any]) -> None:
        self.now = now
        self.spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note stages."""
        token = _STOPWATCH.set(self)
        try:
            yield
        finally:
            _STOPWATCH.reset(token)


_STOPWATCH: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


@contextmanager
def unwatched() -> Iterator[None]:
    """Note no stages: what is recorded now runs later."""
    token = _STOPWATCH.set(None)
    try:
        yield
    finally:
        _STOPWATCH.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Mark a stage. Stages do not contain each other."""
    watch = _STOPWATCH.get()
    if watch is None:
        yield
        return
    begin = watch.now()
    try:
        yield
    finally:
        watch.spans.append((name, begin, watch.now()))
