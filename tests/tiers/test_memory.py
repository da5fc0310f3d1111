"""Host memory: what is scattered is gathered, block by block."""

from __future__ import annotations

import numpy as np
import pytest

from kvtcd.core.keys import RecordKey
from kvtcd.tiers.memory import GRANULE, HostMemory


def key(number: int) -> RecordKey:
    return RecordKey(bytes([number]) * 32)


def test_blocks_keep_their_bytes_even_in_pieces() -> None:
    memory = HostMemory(6 * GRANULE)
    rng = np.random.default_rng(0)
    for number in range(6):
        memory.allocate(key(number), GRANULE)
    for number in (0, 2, 4):
        memory.free(key(number))
    data = rng.integers(0, 256, 3 * GRANULE - 5, dtype=np.uint8)
    memory.allocate(key(9), data.size)
    memory.scatter(key(9), data)

    assert len(memory.pieces(key(9))) == 3
    assert np.array_equal(memory.gather(key(9)), data)
    assert memory.gather(key(1)).size == GRANULE


def test_a_block_in_one_piece_is_gathered_in_place() -> None:
    memory = HostMemory(4 * GRANULE + 17)
    memory.allocate(key(1), 2 * GRANULE)
    memory.gather(key(1))[:] = 7

    assert memory.capacity == 4 * GRANULE
    assert (memory.pieces(key(1))[0] == 7).all()


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(MemoryError):
        HostMemory(GRANULE).allocate(key(1), GRANULE + 1)
