"""The part of the CUDA runtime that registers host memory, as a script: it does what it is told."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from support import fake_cuda

if TYPE_CHECKING:
    import pytest

OUT_OF_MEMORY = 2


@dataclass
class FakeRuntime:
    """`answer` to registering, after `good` ones that succeed: an error code of CUDA, or what is raised."""

    answer: int | Exception = 0
    good: int = 0
    registered: dict[int, int] = field(default_factory=dict)
    threads: set[str] = field(default_factory=set)
    devices: set[torch.device] = field(default_factory=set)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        """Register memory."""
        assert flags == 1, "every device is to reach it"
        self.threads.add(threading.current_thread().name)
        self.devices.add(fake_cuda.current_device())
        answer = 0 if len(self.registered) < self.good else self.answer
        if isinstance(answer, Exception):
            raise answer
        if not answer:
            assert address not in self.registered, "registered twice"
            self.registered[address] = nbytes
        return answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        """Take a registration back."""
        self.devices.add(fake_cuda.current_device())
        return 0 if self.registered.pop(address, None) else 713

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802 - CUDA's name
        """Put an error into words."""
        return {OUT_OF_MEMORY: "out of memory"}.get(code, f"error {code}")


def install(monkeypatch: pytest.MonkeyPatch, answer: int | Exception = 0) -> FakeRuntime:
    """Put it in CUDA's place until the test ends."""
    runtime = FakeRuntime(answer)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", fake_cuda.device)
    return runtime
