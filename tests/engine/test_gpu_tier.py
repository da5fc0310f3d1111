"""Blocks between host and GPU: cut wherever either side is cut, and there when the move has ended."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import fake_cuda
from support.pipelines import KINDS, stream
from support.twin_memory import TwinMemory

from kvtcd.codec.foreign import Foreign
from kvtcd.codec.scratch import HeapScratch
from kvtcd.core.device_bytes import DeviceBytes
from kvtcd.core.events import Move, Moved
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place
from kvtcd.engine.lanes import on_threads
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.mover import Mover
from kvtcd.engine.streams import Gpu, Stage
from kvtcd.tiers.device import DeviceMemory
from kvtcd.tiers.disk import Put, footprint
from kvtcd.tiers.memory import GRANULE, HostMemory
from kvtcd.tiers.pinning import pin

BLOCK = 3 * GRANULE - 7


def key(number: int) -> RecordKey:
    return RecordKey(bytes([number]) * 32)


class LateMemory(DeviceMemory):
    """Copies only when the device of `fake_cuda` comes to it, as a real one does."""

    def upload(self, key, pieces) -> None:
        fake_cuda.launch(functools.partial(super().upload, key, pieces))

    def download(self, key, pieces) -> None:
        fake_cuda.launch(functools.partial(super().download, key, pieces))

    def deliver(self, key, out) -> None:
        fake_cuda.launch(functools.partial(super().deliver, key, out))


def cut_up(memory: HostMemory | DeviceMemory) -> None:
    """Leave three separate granules free."""
    for number in range(6):
        memory.allocate(key(number), GRANULE)
    for number in (0, 2, 4):
        memory.free(key(number))


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", ["host", "device", "both"])
async def test_a_block_goes_to_the_gpu_to_its_reader_and_back_whole(kind, cut, monkeypatch) -> None:
    if kind == "stand-in":
        fake_cuda.install(monkeypatch)
    made = LateMemory if kind == "stand-in" else DeviceMemory
    host = HostMemory(6 * GRANULE)
    where = torch.device("cuda:0" if kind == "cuda" else "cpu")
    device = made(6 * GRANULE, where, Foreign(where).tensor if kind == "cuda" else TwinMemory().tensor)
    pinned = pin(host.chunks, device.device) if kind == "cuda" else None
    for memory in {"host": [host], "device": [device], "both": [host, device]}[cut]:
        cut_up(memory)
    stages, copy = on_threads(), Stage("copy", stream(kind, "copy"))
    mover = Mover(
        memory=host, put_record=Put, stages=stages, scratch=HeapScratch, metrics=Metrics(),
        footprint=footprint, gpus={"cuda:0": Gpu(device, copy)},
    )  # fmt: skip
    data = np.random.default_rng(3).integers(0, 256, BLOCK, dtype=np.uint8)
    host.allocate(key(9), BLOCK)
    device.allocate(key(9), BLOCK)
    pieces = host.pieces(key(9))
    bounds = np.cumsum([piece.size for piece in pieces])[:-1]
    for piece, part in zip(pieces, np.split(data, bounds), strict=True):
        piece[:] = part
    up = await mover.move(Move(key(9), Place.HOST, Place.GPU, 0, device="cuda:0"), None, None, None)
    for piece in pieces:
        piece[:] = 0xEE
    there = torch.zeros(BLOCK, dtype=torch.uint8, device=where)
    why = await mover.deliver(key(9), None, "cuda:0", DeviceBytes(0, there.data_ptr(), BLOCK))
    down = await mover.move(Move(key(9), Place.GPU, Place.HOST, 0, device="cuda:0"), None, None, None)
    got = np.concatenate(pieces)
    for each in (*stages.streams(), copy.stream):
        await each.close()
    if pinned is not None:
        pinned.close()

    assert [outcome.event for outcome in (up, down)] == [Moved(key(9), BLOCK)] * 2
    assert why is None
    assert np.array_equal(there.cpu().numpy(), data)
    assert np.array_equal(got, data)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
)
def test_cuts_of_either_side_cut_both(host, device) -> None:
    total = min(sum(host), sum(device))
    memory = DeviceMemory(GRANULE, torch.device("cpu"), TwinMemory().tensor)
    bounds = [0, *(end for end in itertools.accumulate(device) if end < total), total]
    memory._blocks[key(1)] = tuple((at, end - at) for at, end in itertools.pairwise(bounds))
    data = np.arange(total, dtype=np.uint8)
    ends = [end for end in itertools.accumulate(host) if end < total]
    memory.upload(key(1), np.split(data.copy(), ends))
    back = np.zeros(total, np.uint8)
    memory.download(key(1), np.split(back, ends))

    assert np.array_equal(memory._slab[:total].numpy(), data)
    assert np.array_equal(back, data)
