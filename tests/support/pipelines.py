"""Streams of every kind for the same tests, and slots that notice when two blocks use one."""

from __future__ import annotations

import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from support import fake_cuda

from kvtcd.engine.cuda import CudaStream, on_cuda
from kvtcd.engine.lanes import Lane, on_threads
from kvtcd.engine.streams import Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvtcd.engine.streams import Stages, Stream

KINDS = ["threads", "stand-in", pytest.param("cuda", marks=pytest.mark.gpu)]
"""Threads; CUDA streams on a stand-in for the device (`support.fake_cuda`), and on a real one."""


def stream(kind: str, name: str) -> Stream:
    """Make a stream."""
    return Lane(name) if kind == "threads" else CudaStream(name, torch.device("cuda"))


def engine_stages(kind: str) -> Stages:
    """Make the stages of an engine."""
    return on_threads() if kind == "threads" else on_cuda(torch.device("cuda"))


def write(kind: str, data: np.ndarray, out: np.ndarray) -> None:
    """Have bytes written to host memory by whatever works behind a stream of this kind: at once, or later."""
    if kind == "threads":
        np.copyto(out, data)
    elif kind == "stand-in":
        fake_cuda.launch(lambda: (time.sleep(0.005), np.copyto(out, data)))
    else:
        there = torch.from_numpy(data).cuda()
        torch.cuda._sleep(10_000_000)
        torch.from_numpy(out).copy_(there, non_blocking=True)


@asynccontextmanager
async def stages(kind: str, *names: str) -> AsyncIterator[list[Stage]]:
    """Make stages, each on a stream of its own."""
    made = [Stage(name, stream(kind, name)) for name in names]
    try:
        yield made
    finally:
        for stage in made:
            await stage.stream.close()


@dataclass
class Slot:
    """Belongs to one block at a time."""

    owner: object = None
    clashes: list[object] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def use(self, owner: object) -> None:
        """Note who works in this slot."""
        with self._lock:
            if self.owner not in (None, owner):
                self.clashes.append((self.owner, owner))
            self.owner = owner

    def clear(self) -> None:
        """Be free."""
        self.owner = None
