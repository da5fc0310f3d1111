"""Where the stages of a pipeline run: one interface over threads (`Lane`) and over CUDA (`CudaStream`).

A stream runs calls in the order in which they were submitted. A call follows an event, the end of a call on
the same or another stream, and its own end is an event again. So a whole chain over several streams is
submitted at once, and nobody waits on the event loop until its last event comes. An event that ends in an
exception ends every call that follows it, unrun, in the same exception; calls of other chains do not notice.

Chains that are submitted as a whole, one after the other, use every stream in the same order, so they cannot
wait for each other in a circle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from kvtcd.engine.ports import DeviceMemory

T = TypeVar("T")
U = TypeVar("U")

Watch = Callable[[float, float], None]
"""Told begin and end of a call (seconds of `time.perf_counter`), on the thread that saw it end."""


class Stream(Protocol):
    """Runs calls in order."""

    @property
    def name(self) -> str:
        """What it is called in thread listings and metrics."""

    @property
    def pending(self) -> int:
        """Calls submitted and not yet ended."""

    @property
    def ended(self) -> int:
        """Calls that have ended, ever."""

    def submit(self, call: Callable[[T], U], after: Future[T], watch: Watch | None = None) -> Future[U]:
        """Queue a call of what `after` yields; never blocks.

        On CUDA the call only launches work. What it returns may be used by the next call on a CUDA stream, in
        stream order, before that work is done; the event comes when it is.
        """

    def release(self, event: Future[Any]) -> None:
        """Let go of what an event of this stream yields, which has come and of which nobody asks any more."""

    async def close(self) -> None:
        """Wait for what was submitted, then end the threads."""


def occurred(value: T) -> Future[T]:
    """Return an event that has come: what the first call of a chain follows."""
    event: Future[T] = Future()
    event.set_result(value)
    return event


class Stage(NamedTuple):
    """A part of a block's way, and where it runs."""

    name: str
    stream: Stream


async def came(event: Future[Any]) -> None:
    """Wait until an event has come, however it ended. Who is cancelled stops waiting, and nothing else."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            loop.call_soon_threadsafe(woken.set)

    event.add_done_callback(wake)
    await woken.wait()


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of the two ways a block goes, up and down.

    Stages may share a stream.
    """

    read: Stage
    check: Stage
    inflate: Stage
    synthesize: Stage
    scatter: Stage

    gather: Stage
    analyze: Stage
    deflate: Stage
    seal: Stage

    def streams(self) -> tuple[Stream, ...]:
        """Return every stream once."""
        every = (
            self.read, self.check, self.inflate, self.synthesize, self.scatter,
            self.gather, self.analyze, self.deflate, self.seal,
        )  # fmt: skip
        return tuple(dict.fromkeys(stage.stream for stage in every))


class Gpu(NamedTuple):
    """A GPU that holds blocks: its memory for them, and the stage that copies between that and the host."""

    memory: DeviceMemory
    copy: Stage
