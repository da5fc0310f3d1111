"""Which block continues which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.entry import Entry, Kind
from kvtcd.core.keys import RecordKey
from kvtcd.core.lineage import REACH, Lineage


def key(number: int) -> RecordKey:
    return RecordKey(bytes([number]) * 32)


class Tree:
    """A lineage and the blocks in it."""

    def __init__(self) -> None:
        self.entries: dict[RecordKey, Entry] = {}
        self.lineage = Lineage(self.entries)

    def add(self, number: int, tokens: int, parent: int | None) -> None:
        above = None if parent is None else key(parent)
        entry = self.entries[key(number)] = Entry(key(number), Kind(1, tokens, tokens), parent=above)
        self.lineage.add(entry)

    def remove(self, number: int) -> None:
        self.lineage.remove(self.entries.pop(key(number)))


def test_the_longest_continuation_counts() -> None:
    tree = Tree()
    for number, parent, tokens in ((1, 0, 16), (2, 1, 16), (3, 1, 5), (4, 2, 7)):
        tree.add(number, tokens, parent)

    assert [tree.lineage.after(key(n)) for n in range(5)] == [39, 23, 7, 0, 0]
    assert tree.lineage.lengths(key(1)) == {16, 5}


def test_a_branch_that_goes_is_counted_no_more() -> None:
    tree = Tree()
    tree.add(1, 16, 0)
    tree.add(2, 5, 0)
    tree.remove(1)

    assert tree.lineage.after(key(0)) == 5
    tree.remove(2)
    assert tree.lineage.lengths(key(0)) == set()


def test_a_walk_down_a_long_chain_is_bounded() -> None:
    tree = Tree()
    for number in range(250):
        tree.add(number + 1, 256, number)

    assert REACH <= tree.lineage.after(key(0)) < REACH + 256


def test_parents_and_children_share_one_copy_of_a_key() -> None:
    """A million blocks would otherwise hold a million copies."""
    tree = Tree()
    tree.add(2, 16, 1)
    tree.add(3, 16, 1)
    assert tree.entries[key(2)].parent is tree.entries[key(3)].parent
    tree.add(1, 16, 0)

    assert tree.entries[key(2)].parent is tree.entries[key(3)].parent is tree.entries[key(1)].key


@given(st.lists(st.tuples(st.integers(0, 7), st.none() | st.integers(0, 7)), max_size=40))
def test_the_tree_is_what_the_parents_say(history) -> None:
    """Each step adds a block, or removes it if it is there; parents may be unknown, and even in a circle."""
    tree = Tree()
    for number, parent in history:
        if key(number) in tree.entries:
            tree.remove(number)
        elif number != parent:
            tree.add(number, 16, parent)
        for above in range(8):
            want = {e.key for e in tree.entries.values() if e.parent == key(above)}
            assert len(list(tree.lineage.children(key(above)))) == len(want)
            assert {c.key for c in tree.lineage.children(key(above))} == want
