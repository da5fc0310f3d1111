"""Names for the parts of a codec's work, and how long each takes, for whoever asks (`kvtcd bench codec`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Stopwatch:
    """Adds up what the stages of one thread take while it is `running`.

    Args:
        clock: seconds; on a GPU, once the device has done what was launched.

    Attributes:
        seconds: by stage, in order of first appearance.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take the time of stages."""
        token = _STOPWATCH.set(self)
        try:
            yield
        finally:
            _STOPWATCH.reset(token)


_STOPWATCH: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Mark a stage. Stages do not contain each other."""
    watch = _STOPWATCH.get()
    if watch is None:
        yield
        return
    begin = watch.clock()
    try:
        yield
    finally:
        watch.seconds[name] = watch.seconds.get(name, 0.0) + watch.clock() - begin
