"""Registering host memory: once, as a whole, off the caller's thread; and going on where it fails."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch
from support import fake_cudart

from kvtcd.tiers.memory import HostMemory
from kvtcd.tiers.pinning import pin


def test_the_slab_is_registered_as_a_whole_and_given_back_once(monkeypatch) -> None:
    runtime, memory = fake_cudart.install(monkeypatch), HostMemory(5 * 4096 + 17)
    pinned = pin(memory.slab)
    held = dict(runtime.registered)
    assert pinned is not None
    pinned.close()

    assert held == {memory.slab.ctypes.data: 5 * 4096}
    assert runtime.registered == {}


def test_no_error_is_left_on_a_thread_that_goes_on(monkeypatch) -> None:
    """CUDA keeps the last error of a thread, and whoever asks next on that thread gets it."""
    runtime = fake_cudart.install(monkeypatch, fake_cudart.OUT_OF_MEMORY)
    pin(np.zeros(4096, np.uint8))

    assert len(runtime.threads) == 1
    assert not runtime.threads & {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (fake_cudart.OUT_OF_MEMORY, "out of memory"),
        (801, "error 801"),
        (RuntimeError("the driver is too old"), "the driver is too old"),
    ],
)
def test_a_failure_is_one_warning_that_says_what_to_do(monkeypatch, caplog, answer, why) -> None:
    runtime = fake_cudart.install(monkeypatch, answer)
    with caplog.at_level(logging.DEBUG):
        pinned = pin(np.zeros(3 * 4096, np.uint8))

    assert pinned is None
    assert runtime.registered == {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("12,288 bytes", why, "LimitMEMLOCK=infinity", "ulimit -l", "host.capacity"):
        assert part in record.getMessage()


def test_a_registration_that_cannot_be_taken_back_is_told(monkeypatch, caplog) -> None:
    runtime = fake_cudart.install(monkeypatch)
    pinned = pin(np.zeros(4096, np.uint8))
    runtime.registered.clear()
    pinned.close()

    assert "error 713" in caplog.text


@pytest.mark.gpu
def test_a_device_copies_from_and_to_registered_memory_by_itself() -> None:
    memory = HostMemory(64 << 20)
    memory.slab[:] = np.random.default_rng(0).integers(0, 256, memory.capacity, dtype=np.uint8)
    want, host = memory.slab.copy(), torch.from_numpy(memory.slab)
    pinned = pin(memory.slab)
    assert pinned is not None
    try:
        assert host.is_pinned()
        there = torch.empty_like(host, device="cuda")
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        memory.slab[:] = 0
        host.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
    finally:
        pinned.close()

    assert np.array_equal(memory.slab, want)
    assert not host.is_pinned()
