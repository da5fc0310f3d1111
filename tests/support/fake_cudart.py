"""The part of the CUDA runtime that registers host memory, as a script: it does what it is told."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest

OUT_OF_MEMORY = 2


@dataclass
class FakeRuntime:
    """`answer` to registering: an error code of CUDA, or what is raised."""

    answer: int | Exception = 0
    registered: dict[int, int] = field(default_factory=dict)
    threads: set[str] = field(default_factory=set)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        """Register memory."""
        assert flags == 1, "every device is to reach it"
        self.threads.add(threading.current_thread().name)
        if isinstance(self.answer, Exception):
            raise self.answer
        if not self.answer:
            assert address not in self.registered, "registered twice"
            self.registered[address] = nbytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        """Take a registration back."""
        return 0 if self.registered.pop(address, None) else 713

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802 - CUDA's name
        """Put an error into words."""
        return {OUT_OF_MEMORY: "out of memory"}.get(code, f"error {code}")


def install(monkeypatch: pytest.MonkeyPatch, answer: int | Exception = 0) -> FakeRuntime:
    """Put it in CUDA's place until the test ends."""
    runtime = FakeRuntime(answer)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime
