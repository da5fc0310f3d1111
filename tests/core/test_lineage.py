"""Which block continues which."""

from __future__ import annotations

from kvtcd.core.keys import RecordKey
from kvtcd.core.lineage import REACH, Lineage


def key(number: int) -> RecordKey:
    return RecordKey(bytes([number]) * 32)


def test_the_longest_continuation_counts() -> None:
    tree = Lineage()
    tree.add(key(0), key(1), 16)
    tree.add(key(1), key(2), 16)
    tree.add(key(1), key(3), 5)
    tree.add(key(2), key(4), 7)

    assert [tree.after(key(n)) for n in range(5)] == [39, 23, 7, 0, 0]
    assert tree.lengths(key(1)) == {16, 5}


def test_a_branch_that_goes_is_counted_no_more() -> None:
    tree = Lineage()
    tree.add(key(0), key(1), 16)
    tree.add(key(0), key(2), 5)
    tree.discard(key(0), key(1))

    assert tree.after(key(0)) == 5
    tree.discard(key(0), key(2))
    assert tree.lengths(key(0)) == set()


def test_a_walk_down_a_long_chain_is_bounded() -> None:
    tree = Lineage()
    for number in range(250):
        tree.add(key(number), key(number + 1), 256)

    assert REACH <= tree.after(key(0)) < REACH + 256
