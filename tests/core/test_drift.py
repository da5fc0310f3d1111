"""When windows of blocks make a verdict: never one alone, and not at once back."""

import pytest

from kvtcd.core.drift import TURNS, Course, Drift, Reading

GOOD = {"k": Reading(1.0, 1.0, 3.0), "v": Reading(1.2, 0.8, 3.5)}
BAD = {"k": GOOD["k"], "v": Reading(1.0, 5.0, 3.0)}


def states(*windows):
    course, found = Course(), []
    for window in windows:
        course.take(window)
        found.append(course.drift.state)
    return found


def test_one_window_is_no_verdict():
    assert states(BAD) == ["unknown"]
    assert states(GOOD, BAD, GOOD, BAD, GOOD) == ["usual"] * 5


def test_windows_in_a_row_are():
    assert states(*[BAD] * TURNS)[-1] == "drifting"
    assert states(GOOD, *[BAD] * TURNS) == ["usual"] * TURNS + ["drifting"]


def test_it_takes_as_many_to_be_as_before():
    begun = [BAD] * TURNS
    assert states(*begun, GOOD)[-1] == "drifting"
    assert states(*begun, GOOD, BAD, GOOD)[-1] == "drifting"
    assert states(*begun, *[GOOD] * TURNS)[-1] == "usual"


@pytest.mark.parametrize(
    ("reading", "word"),
    [
        (Reading(1.6, 1, 3), "1.6 times the energy"),
        (Reading(0.6, 1, 3), "0.6 times the energy"),
        (Reading(1, 2.1, 3), "outside of the basis"),
        (Reading(1, 1, 9.5), "kurtosis 9.5"),
    ],
)
def test_each_figure_has_its_bound_and_its_words(reading, word):
    assert len(reading.faults) == 1
    assert word in reading.faults[0]
    assert word in Drift("drifting", 1, {"k": reading}).why


def test_figures_at_their_bounds_hold():
    assert not Reading(1.5, 2.0, 9.0).faults


def test_what_is_known_goes_through_json():
    drift = Drift("drifting", 16, BAD)
    body = drift.to_json()
    assert Drift.from_json(body) == drift
    assert body["why"] == "v: 5 times as much outside of the basis"
