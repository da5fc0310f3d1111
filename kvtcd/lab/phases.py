"""Seconds and progress bars of the phases that long work goes through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from rich.progress import Progress

from kvtcd import terminal

Advance = Callable[[int], None]
"""Says how many steps of a phase are done, all in all."""
T = TypeVar("T")


class Phases:
    """Times named phases and shows each as a bar.

    Args:
        progress: where bars are shown; nowhere without.

    Attributes:
        seconds: by name, in the order the phases began; those of a phase entered again add up.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress or terminal.silent()
        self.seconds: dict[str, float] = {}

    def note(self, text: str) -> None:
        """Say a line, above the bars."""
        self._progress.console.print(text, markup=False, highlight=False)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time until the end of the block, kernels on a GPU included, to a phase."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def bar(self, text: str, steps: int | None = None) -> Iterator[Advance]:
        """Show a bar until the end of the block, a moving one where the number of steps is not known."""
        task = self._progress.add_task(text, total=steps)
        yield lambda done: self._progress.update(task, completed=done)
        self._progress.update(task, total=steps or 1, completed=steps or 1)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase and show it, when it is not known how long it takes."""
        with self.timed(name), self.bar(name):
            yield


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return what a call returns, and the seconds it took."""
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started
