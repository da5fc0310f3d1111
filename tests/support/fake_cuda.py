"""A device of threads in place of CUDA: streams that work through queues, events in them.

It shows that launching, waiting and reaping fit together, without a GPU; not that CUDA does what it says.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

_current = threading.local()
_numbers = itertools.count(1)
FIRST = torch.device("cuda", 0)


def launch(kernel: Callable[[], object]) -> None:
    """Let the device run a function in the current stream, later."""
    _current.stream.work.put(kernel)


def here() -> torch.device:
    """Return the device of the current stream."""
    device: torch.device = _current.stream.device
    return device


class _AtOnce:
    @staticmethod
    def put(kernel: Callable[[], object]) -> None:
        kernel()


class _Default:
    """The stream that is current where none was entered: what it is told is done when that returns."""

    cuda_stream = 0
    work = _AtOnce


class _Stream:
    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.waiting, self.awaited = threading.Event(), threading.Event()
        """Set once the device has come to an event in this stream, and once a thread waits for the stream."""
        self.cuda_stream = next(_numbers)
        self.work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=_device_loop, args=(self.work,), daemon=True).start()
        weakref.finalize(self, self.work.put, None)

    def wait_event(self, event: _Event) -> None:
        self.work.put(lambda: (self.waiting.set(), event.flag.wait()))

    def synchronize(self) -> None:
        done = threading.Event()
        self.work.put(done.set)
        self.awaited.set()
        assert done.wait(PATIENCE_S)


class _Event:
    def __init__(self, *, blocking: bool = False) -> None:
        self._blocking = blocking
        self.flag, self.awaited = threading.Event(), threading.Event()

    def record(self, stream: _Stream) -> None:
        stream.work.put(self.flag.set)

    def synchronize(self) -> None:
        assert self._blocking, "who waits for it must sleep"
        self.awaited.set()
        assert self.flag.wait(PATIENCE_S)


def _device_loop(work: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (kernel := work.get()) is not None:
        kernel()


@contextmanager
def _stream(stream: _Stream) -> Iterator[None]:
    outer = getattr(_current, "stream", None)
    _current.stream = stream
    try:
        yield
    finally:
        if outer is None:
            del _current.stream
        else:
            _current.stream = outer


@contextmanager
def device(device: torch.device) -> Iterator[None]:
    """What is current on this thread meanwhile: of `torch.cuda`."""
    outer, _current.device = current_device(), device
    try:
        yield
    finally:
        _current.device = outer


def current_device() -> torch.device:
    """The device that is current on this thread; on a new one the first."""
    return getattr(_current, "device", FIRST)


def _current_stream(device: torch.device) -> _Stream | type[_Default]:
    """The stream that was entered, if it is one of that device."""
    found = getattr(_current, "stream", _Default)
    return found if found is _Default or found.device == device else _Default


def _sleep(_cycles: int) -> None:
    """The smallest kernel."""
    launch(lambda: None)


ILLEGAL = "CUDA error: an illegal memory access was encountered"


def break_down(
    monkeypatch: pytest.MonkeyPatch, call: str, why: str = ILLEGAL, kernels: str = ILLEGAL
) -> None:
    """From now on let `record` or `synchronize` of every event fail, as after an illegal access.

    Args:
        monkeypatch: until the end of the test.
        call: which of them.
        why: what it says.
        kernels: what each kernel says that is launched; empty: they run.
    """

    def fail(error: str) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(_Event, call, lambda *_: fail(why))
    if kernels:
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _: fail(kernels))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put it in CUDA's place until the test ends."""
    stand_ins = {
        "Stream": _Stream, "Event": _Event, "stream": _stream, "current_stream": _current_stream,
        "device": device, "_sleep": _sleep,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
