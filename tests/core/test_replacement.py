"""Orders of replacement against the simplest model: a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.keys import RecordKey
from kvtcd.core.replacement import Lru

KEYS = [RecordKey(bytes([n]) * 32) for n in range(5)]
steps = st.lists(st.tuples(st.sampled_from(["insert", "touch", "discard"]), st.sampled_from(KEYS)))


@given(steps)
def test_lru_is_a_list_whose_used_entries_move_to_the_end(history) -> None:
    lru, model = Lru(), []
    for step, key in history:
        getattr(lru, step)(key)
        known = key in model
        if known:
            model.remove(key)
        if step == "insert" or (step == "touch" and known):
            model.append(key)

        assert list(lru.coldest()) == model
        assert len(lru) == len(model)
