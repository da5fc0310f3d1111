"""The end of a call on a CUDA stream, and what the device is still to do for it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch

T = TypeVar("T")


@dataclass(slots=True)
class Launched(Generic[T]):
    """What a call returned, and the mark in its stream behind the work it launched.

    The reaper takes both away: the mark once the device has come to it, the value once it is released.
    """

    value: T
    mark: torch.cuda.Event | None = None


class CudaEvent(Future[T]):
    """Comes when the device is done; `launched` comes when the call that launches the work has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Future[Launched[T]] = Future()
        self.begun = 0.0
        """When it was launched; 0: not at all."""

    def result(self, timeout: float | None = None) -> T:
        """Return what the call did, once the device is done; not after its release."""
        super().result(timeout)
        return self.launched.result().value

    def come(self) -> None:
        """Come; the mark is needed no more."""
        self.launched.result().mark = None
        self.set_result(cast("T", None))  # it is in `launched`, from where it can be taken away

    def fail(self, error: BaseException) -> None:
        """End in an error, in place of whatever was launched."""
        if not self.launched.done():
            self.launched.set_exception(error)
        self.set_exception(error)

    def empty(self) -> None:
        """Let go of what the call returned."""
        if self.launched.exception() is None:
            self.launched.result().value = cast("T", None)
