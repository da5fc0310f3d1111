"""What `make soak` takes for growth, on runs whose growth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from soak.__main__ import MOST_AN_HOUR
from soak.watch import Sample, slope

MINUTES, EVERY_S = 45, 5


def run(leak: float, seed: int) -> list[Sample]:
    """Return samples of a process that fills 10 MiB, then sets records, and leaks so much an hour."""
    draw = np.random.default_rng(seed)
    peaks = np.maximum.accumulate(draw.exponential(0.5, MINUTES * 60 // EVERY_S))
    samples = []
    for number, peak in enumerate(peaks):
        minute = number * EVERY_S / 60
        busy = draw.exponential(4.0) * (draw.random() < 0.3)
        mib = 200 + 10 * (1 - math.exp(-minute / 4)) + peak + busy + leak * minute / 60
        samples.append({"minute": minute, "mib": round(mib * 256) / 256})
    return samples


@pytest.mark.parametrize("seed", range(10))
def test_records_that_are_set_more_and_more_rarely_are_no_leak(seed: int) -> None:
    found = slope(run(0.0, seed), "mib")
    assert found["lo"] <= 0 or found["an_hour"] <= MOST_AN_HOUR


@pytest.mark.parametrize("seed", range(10))
def test_one_mebibyte_an_hour_is_a_leak(seed: int) -> None:
    found = slope(run(1.0, seed), "mib")
    assert found["lo"] > 0
    assert found["an_hour"] > MOST_AN_HOUR
