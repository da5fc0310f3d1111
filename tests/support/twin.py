"""A CUDA device that is the CPU, for a whole daemon: a stand-in for each thing that it asks of CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from support import fake_cuda, fake_cudart, fake_nvcomp

from kvtcd import machine
from kvtcd.codec import fused, nvcomp
from kvtcd.codec.uniform import InTorch

if TYPE_CHECKING:
    import pytest


def install(monkeypatch: pytest.MonkeyPatch) -> fake_cudart.FakeRuntime:
    """Put it in CUDA's place until the test ends; return what has been done with the runtime."""
    fake_cuda.install(monkeypatch)
    fake_nvcomp.install(monkeypatch)
    monkeypatch.setattr(fused, "load", lambda _: InTorch())  # kernels take minutes in Triton's interpreter
    monkeypatch.setattr(nvcomp, "CROSSOVER", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(machine, "_cuda", lambda _config, _asked: torch.device("cpu"))
    return fake_cudart.install(monkeypatch)
