"""The arena against the simplest model: a byte array that says who owns each byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtcd.tiers.arena import Arena

GRANULE = 4


@settings(max_examples=300)
@given(st.integers(0, 20), st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=40))
def test_no_byte_belongs_to_two_and_room_is_never_lost(granules: int, history) -> None:
    arena = Arena(granules * GRANULE, GRANULE)
    owner = [0] * arena.capacity
    live = {}
    for number, (give_back, nbytes) in enumerate(history, start=1):
        if give_back and live:
            taken = live.pop(min(live))
            arena.release(taken)
            for offset, size in taken:
                for at in range(offset, offset + -(-size // GRANULE) * GRANULE):
                    owner[at] = 0
        elif -(-nbytes // GRANULE) * GRANULE <= arena.free_bytes:
            taken = live[number] = arena.allocate(nbytes)
            assert sum(size for _, size in taken) == nbytes
            for offset, size in taken:
                assert offset % GRANULE == 0
                for at in range(offset, offset + -(-size // GRANULE) * GRANULE):
                    assert owner[at] == 0
                    owner[at] = number
        else:
            with pytest.raises(MemoryError):
                arena.allocate(nbytes)
        assert arena.free_bytes == owner.count(0)
    for taken in live.values():
        arena.release(taken)
    if granules:
        assert arena.allocate(arena.capacity) == ((0, arena.capacity),), "freed room is joined again"


def test_equal_blocks_come_in_one_piece_whatever_was_freed() -> None:
    arena = Arena(10 * GRANULE, GRANULE)
    blocks = [arena.allocate(2 * GRANULE) for _ in range(5)]
    for freed in blocks[::2]:
        arena.release(freed)

    assert all(len(arena.allocate(2 * GRANULE)) == 1 for _ in range(3))


def test_a_scattered_arena_still_gives_all_it_has() -> None:
    arena = Arena(6 * GRANULE, GRANULE)
    singles = [arena.allocate(GRANULE) for _ in range(6)]
    for freed in singles[::2]:
        arena.release(freed)

    assert arena.allocate(3 * GRANULE - 1) == ((0, 4), (8, 4), (16, 3))


def test_a_capacity_of_broken_granules_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        Arena(5, GRANULE)
