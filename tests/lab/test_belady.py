"""The optimum against all that could be kept."""

from __future__ import annotations

from functools import cache
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.keys import RecordKey
from kvtcd.lab.belady import most_hits
from kvtcd.lab.trace import Request


def trace(sequences) -> list[Request]:
    """Return requests whose blocks are the prefixes of each sequence, so that chains share beginnings."""
    return [
        Request(float(at), 512 * len(text), tuple(RecordKey(bytes(text[: i + 1])) for i in range(len(text))))
        for at, text in enumerate(sequences)
    ]


def best_of_all(requests: list[Request], capacity: int) -> int:
    """Try every set of blocks that could be kept after each request."""

    @cache
    def best(number: int, kept: frozenset[RecordKey]) -> int:
        if number == len(requests):
            return 0
        blocks = requests[number].blocks
        hits = next((n for n, key in enumerate(blocks) if key not in kept), len(blocks))
        known = sorted(kept | set(blocks))
        size = min(capacity, len(known))
        return hits + max(best(number + 1, frozenset(some)) for some in combinations(known, size))

    return best(0, frozenset())


texts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), max_size=7)


@given(sequences=texts, capacity=st.integers(1, 4))
def test_no_choice_of_what_to_keep_finds_more(sequences, capacity) -> None:
    requests = trace(sequences)

    assert most_hits(requests, capacity) == best_of_all(requests, capacity)


def test_a_block_that_is_never_used_again_takes_no_room() -> None:
    requests = trace([(0,), (1,), (2,), (0,)])

    assert most_hits(requests, 1) == 1
