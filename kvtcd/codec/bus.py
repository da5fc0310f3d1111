"""Copies to host memory that run beside what a stream computes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Bus:
    """A second stream for copies. Belongs to the one thread that launches on a device's way up.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch says no types

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch copies behind all that the current stream has been told so far, and beside what follows."""
        self._follow(self._stream, torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for all copies: what it is told next may reuse their memory."""
        self._follow(torch.cuda.current_stream(self._device), self._stream)

    def _follow(self, behind: torch.cuda.Stream, ahead: torch.cuda.Stream) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
        event.record(ahead)
        behind.wait_event(event)
