"""Registering host memory: once, in chunks, off the caller's thread; and going on with what there is."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch
from support import fake_cudart

from kvtcd.tiers import memory as host_memory
from kvtcd.tiers.memory import HostMemory
from kvtcd.tiers.pinning import pin

SECOND = torch.device("cuda", 1)
"""Nothing may be done on the first."""


@pytest.mark.parametrize(
    ("chunk", "sizes"), [(64 << 30, [5]), (5 * 4096, [5]), (2 * 4096, [2, 2, 1]), (4096, [1] * 5)]
)
def test_every_chunk_is_registered_on_the_device_and_given_back_once(monkeypatch, chunk, sizes) -> None:
    monkeypatch.setattr(host_memory, "CHUNK", chunk)
    runtime, memory = fake_cudart.install(monkeypatch), HostMemory(5 * 4096 + 17)
    pinned = pin(memory.chunks, SECOND)
    held = dict(runtime.registered)
    pinned.close()

    begins = [memory.slab.ctypes.data + 4096 * sum(sizes[:number]) for number in range(len(sizes))]
    assert held == {begin: 4096 * size for begin, size in zip(begins, sizes, strict=True)}
    assert pinned.share == 1
    assert runtime.registered == {}
    assert runtime.devices == {SECOND}


def test_no_registration_is_of_more_than_drivers_take_at_once() -> None:
    assert host_memory.CHUNK <= 64 << 30


@pytest.mark.parametrize("good", range(4))
@pytest.mark.parametrize("answer", [fake_cudart.OUT_OF_MEMORY, RuntimeError("forbidden here")])
def test_what_could_be_registered_is_used(monkeypatch, caplog, good, answer) -> None:
    monkeypatch.setattr(host_memory, "CHUNK", 4096)
    runtime = fake_cudart.install(monkeypatch, answer)
    runtime.good = good
    memory = HostMemory(4 * 4096)
    pinned = pin(memory.chunks, SECOND)
    held = list(runtime.registered)
    pinned.close()

    assert held == [memory.slab.ctypes.data + 4096 * number for number in range(good)]
    assert (pinned.share, runtime.registered) == (good / 4, {})
    (record,) = caplog.records
    assert f"{(4 - good) * 4096:,} of 16,384 bytes" in record.getMessage()


def test_no_error_is_left_on_a_thread_that_goes_on(monkeypatch) -> None:
    """CUDA keeps the last error of a thread, and whoever asks next on that thread gets it."""
    runtime = fake_cudart.install(monkeypatch, fake_cudart.OUT_OF_MEMORY)
    pin([np.zeros(4096, np.uint8)], SECOND)

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
        pinned = pin([np.zeros(3 * 4096, np.uint8)], SECOND)

    assert pinned.share == 0
    assert runtime.registered == {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("12,288 bytes", why, "LimitMEMLOCK=infinity", "ulimit -l", "host.capacity"):
        assert part in record.getMessage()


def test_a_registration_that_cannot_be_taken_back_is_told(monkeypatch, caplog) -> None:
    runtime = fake_cudart.install(monkeypatch)
    pinned = pin([np.zeros(4096, np.uint8)], SECOND)
    runtime.registered.clear()
    pinned.close()

    assert "error 713" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [64 << 30, 16 << 20])
def test_a_device_copies_from_and_to_registered_memory_by_itself(monkeypatch, chunk) -> None:
    monkeypatch.setattr(host_memory, "CHUNK", chunk)
    memory = HostMemory(64 << 20)
    memory.slab[:] = np.random.default_rng(0).integers(0, 256, memory.capacity, dtype=np.uint8)
    want, chunks = memory.slab.copy(), [torch.from_numpy(each) for each in memory.chunks]
    pinned = pin(memory.chunks, torch.device("cuda", 0))
    try:
        assert pinned.share == 1
        assert all(host.is_pinned() for host in chunks)
        there = [host.to("cuda", non_blocking=True) for host in chunks]
        torch.cuda.synchronize()
        memory.slab[:] = 0
        for host, other in zip(chunks, there, strict=True):
            host.copy_(other, non_blocking=True)
        torch.cuda.synchronize()
    finally:
        pinned.close()

    assert np.array_equal(memory.slab, want)
    assert not any(host.is_pinned() for host in chunks)
