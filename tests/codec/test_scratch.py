"""Memory that is used again: what is taken stays apart until it is taken back."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.codec.scratch import HeapScratch


@given(st.lists(st.lists(st.integers(0, 5000), max_size=8), max_size=5))
def test_what_is_taken_for_one_block_never_overlaps_and_is_aligned(blocks):
    scratch = HeapScratch()
    for sizes in blocks:
        scratch.clear()
        taken = [scratch.take(size) for size in sizes]
        for number, part in enumerate(taken):
            part[:] = number
        assert [part.size for part in taken] == sizes
        assert all((part == number).all() for number, part in enumerate(taken))
        assert all(part.ctypes.data % 8 == 0 for part in taken)


def test_the_second_block_of_a_size_gets_the_memory_of_the_first():
    scratch = HeapScratch()
    for _ in range(2):  # grown to the size of a block
        scratch.clear()
        scratch.take(1000)
        scratch.take(3000)
    scratch.clear()
    first = [scratch.take(1000), scratch.take(3000)]
    scratch.clear()
    second = [scratch.take(1000), scratch.take(3000)]
    assert all(np.shares_memory(a, b) for a, b in zip(first, second, strict=True))
