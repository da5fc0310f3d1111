"""The sketch of what was seen: never too little, rarely too much, and fading."""

from __future__ import annotations

import hashlib
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.keys import RecordKey
from kvtcd.core.sightings import Sightings


def key(number: int) -> RecordKey:
    return RecordKey(hashlib.sha256(b"%d" % number).digest())


@given(st.lists(st.integers(0, 30), max_size=200))
def test_it_never_counts_too_little(seen) -> None:
    sightings = Sightings(width=8)  # so narrow that most keys share counters
    truth: Counter[int] = Counter()
    for number in seen:
        truth[number] += 1
        assert sightings.note(key(number)) >= min(truth[number], 63)
    for number, count in truth.items():
        assert sightings.count(key(number)) >= min(count, 63)


def test_in_a_wide_sketch_counts_are_exact() -> None:
    sightings = Sightings(width=1 << 14)
    for number in range(1000):
        for turn in range(1, number % 5 + 2):
            assert sightings.note(key(number)) == turn

    assert all(sightings.count(key(number)) == number % 5 + 1 for number in range(1000))
    assert sightings.count(key(1000)) == 0


def test_it_counts_no_further_than_its_counters_reach() -> None:
    sightings = Sightings(width=64)
    for _ in range(300):
        sightings.note(key(1))

    assert sightings.count(key(1)) == 255 / 4


def test_counts_are_halved_in_every_period_until_nothing_is_left() -> None:
    sightings = Sightings(period=100, width=64)
    for _ in range(4):
        sightings.note(key(1))
    sightings.note(key(2))

    seen = []
    for now in (99, 100, 199, 200, 300, 400):
        sightings.now = now
        seen.append((sightings.count(key(1)), sightings.count(key(2))))
    assert seen == [(4, 1), (2, 0.5), (2, 0.5), (1, 0.25), (0.5, 0), (0.25, 0)]


def test_a_long_pause_fades_as_many_short_ones_do() -> None:
    slept, awake = Sightings(period=100, width=64), Sightings(period=100, width=64)
    for sightings in (slept, awake):
        for _ in range(60):
            sightings.note(key(1))
    for now in range(50, 551, 50):
        awake.now = now
        awake.count(key(1))
    slept.now = 550

    assert slept.count(key(1)) == awake.count(key(1)) == 60 * 4 // 32 / 4
    slept.now = 10**9
    assert slept.count(key(1)) == 0
    slept.now += 99
    assert slept.note(key(1)) == 1
