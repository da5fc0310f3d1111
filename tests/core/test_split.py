"""Names of ranks: what is written is read, and the ranks of a model are all combinations of their parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.split import MOST, Split, all_ranks, splits

KINDS = ("tp", "pp", "cp", "dcp")


@st.composite
def parts(draw) -> list[Split]:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4, unique=True))
    sizes = [draw(st.integers(1, 6)) for _ in kinds]
    return [
        Split(kind, size, draw(st.integers(0, size - 1))) for kind, size in zip(kinds, sizes, strict=True)
    ]


@given(parts(), st.sampled_from(["", "-of-tp8", "-interleaved"]))
def test_the_ranks_of_a_model_are_all_and_say_the_same_of_each_other(found, words) -> None:
    name = "-".join(map(str, found)) + words
    assert splits(name) == tuple(found)
    ranks = all_ranks(name)
    expected = 1
    for split in found:
        expected *= split.size
    assert len(set(ranks)) == len(ranks) == expected
    assert name in ranks
    assert all(all_ranks(rank) == ranks for rank in ranks)
    assert all(rank.endswith(words) for rank in ranks)


def test_names_that_engines_give() -> None:
    assert all_ranks("canonical") == ("canonical",)
    assert all_ranks("tp2-rank1") == ("tp2-rank0", "tp2-rank1")
    assert all_ranks("tp2-rank0-pp2-rank1") == (
        "tp2-rank0-pp2-rank0", "tp2-rank0-pp2-rank1", "tp2-rank1-pp2-rank0", "tp2-rank1-pp2-rank1",
    )  # fmt: skip
    assert all_ranks("dcp2-rank0-of-tp4") == ("dcp2-rank0-of-tp4", "dcp2-rank1-of-tp4")


@pytest.mark.parametrize(
    "name",
    ["", "tp2", "tp2-rank2", "tp0-rank0", "tp2-rank01", "tp2-rank0-tp2-rank1", "kv-rank7", "rank0",
     "tp2-rank0pp2-rank0", f"tp{MOST}-rank0-pp2-rank0", "copies2-tp2-rank0"],
)  # fmt: skip
def test_what_names_no_rank_is_refused(name) -> None:
    with pytest.raises(ValueError, match="names no rank"):
        all_ranks(name)
