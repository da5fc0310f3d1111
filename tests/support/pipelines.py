"""Streams of every kind for the same tests, and slots that notice when two blocks use one."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from kvtcd.engine.cuda import CudaStream
from kvtcd.engine.lanes import Lane
from kvtcd.engine.streams import Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvtcd.engine.streams import Stream

KINDS = ["threads", "stand-in", pytest.param("cuda", marks=pytest.mark.gpu)]
"""Threads; CUDA streams on a stand-in for the device (`support.fake_cuda`), and on a real one."""


def stream(kind: str, name: str) -> Stream:
    """Make a stream."""
    return Lane(name) if kind == "threads" else CudaStream(name, torch.device("cuda"))


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
