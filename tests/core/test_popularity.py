"""The sketch of prefixes against exact counts: what the paper promises of it, whatever comes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.keys import EngineKey
from kvtcd.core.popularity import Popularity

SIZE = 5
MATCHES = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from([b"", b"s"]), st.integers(1, 9)), max_size=200
)


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number] * 32))


@given(MATCHES)
def test_no_count_is_too_low_or_further_off_than_it_says_and_no_frequent_prefix_is_missing(stream):
    popularity, exact = Popularity(SIZE), Counter()
    for number, salt, blocks in stream:
        popularity.found(key(number), salt, blocks)
        exact[key(number), salt] += 1
    found = {(each.key, each.salt): each for each in popularity.most(100)}
    assert len(found) == min(SIZE, len(exact))
    for name, each in found.items():
        assert each.matches - each.over <= exact[name] <= each.matches
    assert sum(each.matches for each in found.values()) == len(stream), "lemma 3.1"
    assert {name for name, count in exact.items() if count > len(stream) / SIZE} <= set(found), "theorem 3.5"


@given(MATCHES)
def test_few_prefixes_are_counted_exactly_the_most_matched_first(stream):
    popularity, exact, longest = Popularity(100), Counter(), Counter()
    for number, salt, blocks in stream:
        popularity.found(key(number), salt, blocks)
        exact[key(number), salt] += 1
        longest[key(number), salt] = max(longest[key(number), salt], blocks)
    found = popularity.most(3)
    assert [each.matches for each in found] == sorted(exact.values(), reverse=True)[:3]
    for each in found:
        assert (each.over, each.matches) == (0, exact[each.key, each.salt])
        assert each.blocks == longest[each.key, each.salt]


def test_a_salt_is_shown_where_there_is_one():
    popularity = Popularity()
    popularity.found(key(1), b"", 2)
    popularity.found(key(1), b"\xff", 3)
    popularity.found(key(1), b"\xff", 1)
    salted, plain = (each.info("n").to_json() for each in popularity.most(2))
    assert plain == {"namespace": "n", "key": "01" * 32, "matches": 1, "over": 0, "blocks": 2}
    assert salted == {
        "namespace": "n",
        "key": "01" * 32,
        "salt": "_w==",
        "matches": 2,
        "over": 0,
        "blocks": 3,
    }
