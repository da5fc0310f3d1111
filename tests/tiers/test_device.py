"""Memory of a GPU: every block keeps its bytes, in however many pieces it lies on either side."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.twin_memory import TwinMemory

from kvtcd.core.device_bytes import DeviceBytes
from kvtcd.core.keys import RecordKey
from kvtcd.lab.second_device import DEVICE, SecondDevice
from kvtcd.tiers.device import GRANULE, DeviceMemory

CPU, TWIN = torch.device("cpu"), TwinMemory().tensor


def key(number: int) -> RecordKey:
    return RecordKey(bytes([number]) * 32)


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def pieces(nbytes: int, *cuts: int) -> list[np.ndarray]:
    return np.split(np.zeros(nbytes, np.uint8), cuts)


def fragmented() -> DeviceMemory:
    """Six granules, of which every other one is free; the others hold their own number."""
    memory = DeviceMemory(6 * GRANULE, CPU, TWIN)
    for number in range(6):
        memory.allocate(key(number), GRANULE)
        memory.upload(key(number), [np.full(GRANULE, number, np.uint8)])
    for number in (0, 2, 4):
        memory.free(key(number))
    return memory


@pytest.mark.parametrize("cuts", [(), (1,), (GRANULE,), (5, GRANULE - 1, GRANULE + 1, 2 * GRANULE)])
def test_a_block_in_pieces_comes_back_and_touches_no_other(cuts) -> None:
    memory, data = fragmented(), noise(3 * GRANULE - 5)
    memory.allocate(key(9), data.size)
    memory.upload(key(9), np.split(data, cuts))
    back = pieces(data.size, *reversed([data.size - cut for cut in cuts]))
    memory.download(key(9), back)

    assert np.array_equal(np.concatenate(back), data)
    for number in (1, 3, 5):
        (other,) = pieces(GRANULE)
        memory.download(key(number), [other])
        assert (other == number).all()


@pytest.mark.parametrize("start", [0, 1, 16])
def test_a_block_is_delivered_whole_to_memory_of_another_and_nothing_beside_it(start) -> None:
    memory, data = fragmented(), noise(3 * GRANULE - 5)
    memory.allocate(key(9), data.size)
    memory.upload(key(9), [data])
    there = np.full(3 * GRANULE + 64, 0xEE, np.uint8)
    memory.deliver(key(9), DeviceBytes(0, there.ctypes.data + start, data.size))

    assert np.array_equal(there[start : start + data.size], data)
    assert (np.delete(there, slice(start, start + data.size)) == 0xEE).all()


def test_what_is_uploaded_is_a_copy() -> None:
    memory, data = DeviceMemory(GRANULE, CPU, TWIN), noise(100)
    memory.allocate(key(1), data.size)
    memory.upload(key(1), [data.copy()])
    other = noise(100, seed=1)
    memory.download(key(1), [other])
    other[:] = 0
    again = np.zeros(100, np.uint8)
    memory.download(key(1), [again])

    assert np.array_equal(again, data)


def test_nobody_waits_for_a_copy_either_way() -> None:
    told = []
    with SecondDevice(told.append):
        memory, data = DeviceMemory(2 * GRANULE, DEVICE, TWIN), noise(GRANULE)
        memory.allocate(key(1), data.size)
        told.clear()
        memory.upload(key(1), np.split(data, [100]))
        memory.download(key(1), pieces(data.size, 7))
    copies = [one for one in told if one.crosses]

    assert [(one.crosses, one.to_host) for one in copies] == [
        (100, False), (GRANULE - 100, False), (7, True), (GRANULE - 7, True)
    ]  # fmt: skip
    assert not any(one.waits for one in told)


def test_freed_room_is_given_out_again() -> None:
    memory = DeviceMemory(2 * GRANULE, CPU, TWIN)
    for number in range(50):
        memory.allocate(key(number), GRANULE + 1)
        memory.free(key(number))


def test_more_than_there_is_is_refused() -> None:
    memory = DeviceMemory(2 * GRANULE + 17, CPU, TWIN)

    assert memory.capacity == 2 * GRANULE
    with pytest.raises(MemoryError):
        memory.allocate(key(1), 2 * GRANULE + 1)
