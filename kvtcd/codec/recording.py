"""CUDA graphs as recordings: captured on the stream that is current, in memory of their own.

A capture sees its own thread alone (``thread_local``), so other threads launch meanwhile as ever. What torch
asks for besides: one capture at a time in a process, and nobody has its allocator give memory back meanwhile
(`ALONE`); on a stream that is not the default one; nothing in it that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress

import torch

from kvtcd.codec.graphs import Tape, Tapes

ALONE = threading.Lock()
"""Held while something is captured, and by who empties torch's cache."""


class CudaTapes(Tapes):
    """Makes tapes for a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lane(self) -> Hashable:
        """Return the address of the current stream; None for the default one."""
        return torch.cuda.current_stream(self._device).cuda_stream or None

    def tape(self) -> CudaTape:
        """Return an empty tape."""
        return CudaTape(self._device)


class CudaTape(Tape):
    """Graphs that share memory, since they are replayed in the order in which they were captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._parts: list[torch.cuda.CUDAGraph] = []

    @property
    def nbytes(self) -> int:
        """Of the memory that captures have allocated."""
        segments = torch.cuda.memory_snapshot(self._pool)  # type: ignore[no-untyped-call]  # torch says no types
        return sum(segment["total_size"] for segment in segments)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Capture the next graph."""
        graph = torch.cuda.CUDAGraph()
        with ALONE:
            with self._abandoned():
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                with self._abandoned():
                    graph.capture_end()
        self._parts.append(graph)

    def replay(self, part: int) -> None:
        """Launch a graph."""
        self._parts[part].replay()

    @contextmanager
    def _abandoned(self) -> Iterator[None]:
        """Tell the allocator that a capture has ended where that fails.

        Torch does not, and then gives no memory back in this process any more.
        """
        try:
            yield
        except BaseException:
            index = self._device.index or 0
            with suppress(RuntimeError):  # it has not begun
                torch._C._cuda_endAllocateToPool(index, self._pool)  # noqa: SLF001 - torch has no public name
                torch._C._cuda_releasePool(index, self._pool)  # noqa: SLF001 - the same
            raise
