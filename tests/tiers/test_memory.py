"""Host memory: every block keeps its bytes, in however many pieces it lies."""

from __future__ import annotations

import numpy as np
import pytest

from kvtcd.core.keys import RecordKey
from kvtcd.tiers import memory as memory_module
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
    parts = np.split(data, [GRANULE, 2 * GRANULE])
    for piece, part in zip(memory.pieces(key(9)), parts, strict=True):
        piece[:] = part
    for number in (1, 3, 5):
        (piece,) = memory.pieces(key(number))
        assert piece.size == GRANULE
        piece[:] = number

    assert np.array_equal(np.concatenate(memory.pieces(key(9))), data)


def test_a_block_is_one_piece_where_there_is_room_for_it() -> None:
    memory = HostMemory(4 * GRANULE + 17)
    memory.allocate(key(1), 2 * GRANULE)
    (piece,) = memory.pieces(key(1))

    assert memory.capacity == 4 * GRANULE
    assert piece.size == 2 * GRANULE


def test_no_piece_lies_across_the_border_of_two_chunks(monkeypatch) -> None:
    monkeypatch.setattr(memory_module, "CHUNK", 2 * GRANULE)
    memory = HostMemory(7 * GRANULE)
    memory.allocate(key(1), GRANULE)
    memory.allocate(key(2), 5 * GRANULE - 9)
    pieces = memory.pieces(key(2))
    pieces[0][:], pieces[1][:], pieces[2][:] = 1, 2, 3

    assert [piece.size for piece in pieces] == [GRANULE, 2 * GRANULE, 2 * GRANULE - 9]
    assert memory.slab[GRANULE : 6 * GRANULE - 9].tolist() == [
        number for number, piece in enumerate(pieces, 1) for _ in range(piece.size)
    ]
    assert [chunk.size for chunk in memory.chunks] == [2 * GRANULE] * 3 + [GRANULE]
    assert sum(chunk.ctypes.data == memory.slab.ctypes.data for chunk in memory.chunks) == 1


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(MemoryError):
        HostMemory(GRANULE).allocate(key(1), GRANULE + 1)
