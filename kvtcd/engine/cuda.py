"""Streams of a CUDA device: calls launch work in order, events are those of the device. And what runs there.

A thread launches, so that the event loop never touches CUDA: first launches, allocations and the end of
events can block. Another thread, the reaper, sleeps until the device has come to the end of a call; nobody
polls. Between two CUDA streams the device waits, not the launching thread; behind a call on a thread the
launching thread waits.

Memory that a call allocates for its result belongs to its stream, and is used by the next one: whoever
submits a chain keeps the events, and with them the results, until the last one has come. Then he releases
them, since results and what an error holds of them end on the reaper, too.

A device is lost when it fails and then does not run the smallest kernel any more. One that has no memory for
an event is not: there the launching thread waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from traceback import clear_frames
from typing import Any, TypeVar

import torch

from kvtcd.core.devices import DeviceName, GpuName
from kvtcd.core.errors import DeviceLost
from kvtcd.core.exhaustion import exhausted
from kvtcd.engine.cuda_event import CudaEvent, Launched
from kvtcd.engine.lanes import Lane, on_threads
from kvtcd.engine.streams import Stage, Stages, Watch

T = TypeVar("T")
U = TypeVar("U")
Lost = Callable[[DeviceLost], None]
URGENT = -1
"""Priority of what someone waits for, above the way down."""


_log = logging.getLogger(__name__)


class CudaStream:
    """One stream of a device, the thread that launches on it, and its reaper: a `Stream`.

    Args:
        name: the threads are called ``kvtcd-<name>`` and ``kvtcd-<name>-reaper``.
        device: of the stream.
        priority: as torch counts: lower numbers go first.
        lost: told, on one of the threads, when the device has failed for good; calls then end in that error.
    """

    def __init__(
        self, name: str, device: torch.device, priority: int = 0, lost: Lost = lambda _: None
    ) -> None:
        self.name = name
        self._device, self._lost = device, lost
        self._stream = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]  # torch says no types
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix=f"kvtcd-{name}")
        self._reaper = ThreadPoolExecutor(1, thread_name_prefix=f"kvtcd-{name}-reaper")
        self._running: deque[None] = deque()
        self._idle = 0.0  # since when; of the reaper
        self.ended = 0
        """Calls whose work is done."""

    @property
    def pending(self) -> int:
        """Calls submitted whose work is not done."""
        return len(self._running)

    def submit(self, call: Callable[[T], U], after: Future[T], watch: Watch | None = None) -> CudaEvent[U]:
        """Queue a call of what `after` yields; see `Stream`."""
        event: CudaEvent[U] = CudaEvent()
        self._running.append(None)
        event.add_done_callback(self._end)
        self._launcher.submit(self._launch, call, after, watch, event)
        return event

    def _end(self, _: Future[U]) -> None:
        self._running.pop()
        self.ended += 1

    def release(self, event: Future[Any]) -> None:
        """Let go of what an event yields, on the reaper; see `Stream`."""
        if isinstance(event, CudaEvent):
            self._reaper.submit(event.empty)

    async def close(self) -> None:
        """Wait for what was submitted, then end the threads."""
        for threads in (self._launcher, self._reaper):
            await asyncio.to_thread(threads.shutdown)

    def _launch(
        self, call: Callable[[T], U], after: Future[T], watch: Watch | None, event: CudaEvent[U]
    ) -> None:
        try:
            with torch.cuda.stream(self._stream):
                launched, error = self._called(call, after, event)
                mark = self._marked()
        except RuntimeError as fault:
            event.fail(self._fatal(fault))
            return
        if launched is not None:
            launched.mark = mark
            event.launched.set_result(launched)
        self._reaper.submit(self._reap, mark, error, watch, event)
        del launched, mark  # an error may keep this frame for longer

    def _called(
        self, call: Callable[[T], U], after: Future[T], event: CudaEvent[U]
    ) -> tuple[Launched[U] | None, BaseException | None]:
        """Make a call; return what it launched, or raised: frames from here on then hold what it had."""
        try:
            given = self._behind(after)
            event.begun = time.perf_counter()
            return Launched(call(given)), None
        except BaseException as fault:  # noqa: BLE001 - it ends the event, as in a thread pool
            return None, fault

    def _behind(self, after: Future[T]) -> T:
        """Let the stream wait for an event, or wait for it here; return what it yields."""
        if not isinstance(after, CudaEvent):
            return after.result()
        launched: Launched[T] = after.launched.result()
        mark = launched.mark
        if mark is not None:
            self._stream.wait_event(mark)
        return launched.value

    def _marked(self) -> torch.cuda.Event | None:
        """Return a mark behind what the stream was told; None: there was no memory for one, and it is done.

        Raises:
            RuntimeError: the stream has failed.
        """
        # Blocking: who waits for it sleeps.
        mark = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch says no types
        try:
            mark.record(self._stream)
        except RuntimeError as fault:
            if not exhausted(fault):
                raise
            _log.warning("%s has no memory for an event, kvtcd-%s waits: %s", self._device, self.name, fault)
            self._stream.synchronize()
            return None
        return mark

    def _reap(
        self,
        mark: torch.cuda.Event | None,
        error: BaseException | None,
        watch: Watch | None,
        event: CudaEvent[U],
    ) -> None:
        """Wait for the device; only then has a call ended that failed after it had launched something.

        A call is told to have begun when it was launched, but not before the one ahead of it was done.
        """
        try:
            if mark is not None:
                mark.synchronize()
        except RuntimeError as fault:
            error = self._fatal(fault)
        begin, self._idle = max(event.begun, self._idle), time.perf_counter()
        if watch is not None and event.begun:
            watch(begin, self._idle)
        if error is None:
            event.come()
        else:
            clear_frames(error.__traceback__)
            event.fail(error)

    def _fatal(self, fault: RuntimeError) -> RuntimeError | DeviceLost:
        """Return what a failure of the stream means: that the device is lost, which is told, or itself."""
        if self._answers():
            return fault.with_traceback(None)
        error = DeviceLost(str(self._device), str(fault))
        self._lost(error)
        return error

    def _answers(self) -> bool:
        """Tell whether the device still runs a kernel, the smallest, behind all that the stream was told."""
        try:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch has no other
            self._stream.synchronize()
        except RuntimeError as fault:
            return exhausted(fault)
        return True


def copies_on_each(
    devices: Mapping[GpuName, torch.device], lost: Lost = lambda _: None
) -> dict[GpuName, Stage]:
    """Return the stages that copy between the host and each GPU that holds blocks; see `CudaStream`.

    Args:
        devices: by name; the first one's threads bear plain names.
        lost: as of `CudaStream`.
    """
    return {
        name: Stage("copy", CudaStream("copy" + (_suffix(name) if number else ""), device, URGENT, lost))
        for number, (name, device) in enumerate(devices.items())
    }


def _suffix(name: DeviceName) -> str:
    return f"-{name.replace(':', '')}"


def on_cuda(device: torch.device, lost: Lost = lambda _: None, *, suffix: str = "") -> Stages:
    """Return the stages of a host whose GPU does the work of the codec.

    A stage that launches runs on a stream of its own. One that reads what the device writes into host memory
    runs on a thread, which waits for the device; behind a stream it would find bytes that are still on their
    way. `deflate` need not: `analyze` itself has waited for its symbols.

    Args:
        device: of the codec.
        lost: as of `CudaStream`.
        suffix: of the threads' names.
    """

    def thread(name: str) -> Stage:
        return Stage(name, Lane(name + suffix))

    def launched(name: str, priority: int = 0) -> Stage:
        return Stage(name, CudaStream(name + suffix, device, priority, lost))

    return Stages(
        read=thread("read"),
        check=thread("check"),
        inflate=launched("inflate", URGENT),
        synthesize=launched("synthesize", URGENT),
        scatter=thread("scatter"),
        gather=thread("gather"),
        analyze=launched("analyze"),
        deflate=launched("deflate"),
        seal=thread("seal"),
    )


def on_each(
    devices: Mapping[DeviceName, torch.device], lost: Lost = lambda _: None
) -> dict[DeviceName, Stages]:
    """Return the stages of a host with several devices for codecs, by name, and those of its CPU, ``cpu``.

    Each device has streams of its own. What reads the disk is one for all.

    Args:
        devices: of codecs, at least one; the first one's threads bear plain names.
        lost: as of `CudaStream`.
    """
    (first, device), *others = devices.items()
    main = on_cuda(device, lost)
    found = {first: main}
    for name, other in others:
        found[name] = replace(on_cuda(other, lost, suffix=_suffix(name)), read=main.read)
    return found | {"cpu": replace(on_threads("-cpu"), read=main.read)}
