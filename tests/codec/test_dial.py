"""Reading a step off a measured curve, against straight lines in logarithms worked out here."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.codec_world import CURVE

from kvtcd.codec.dial import Curve, Point
from kvtcd.core.errors import BadField


def point(step: float, ratio: float, kl: float) -> Point:
    return Point(step, ratio, error=kl / 2, kl=kl, kl_lo=kl * 0.9, kl_hi=kl * 1.1, top1=0.9)


@pytest.mark.parametrize("measured", CURVE.points, ids=lambda p: f"{p.step:g}")
def test_a_measured_point_is_found_by_either_of_its_figures(measured):
    assert CURVE.step_for(ratio=measured.ratio) == pytest.approx(measured.step)
    assert CURVE.step_for(max_kl=measured.kl) == pytest.approx(measured.step)
    at = CURVE.at(measured.step)
    assert (at.ratio, at.kl) == pytest.approx((measured.ratio, measured.kl))


@given(share=st.floats(0.0, 1.0))
def test_between_points_logarithms_are_linear(share):
    # Rounding must not take the ends beyond what was measured.
    ratio = min(max(8.0 ** (1 - share) * 12.0**share, 8.0), 12.0)
    kl = min(max(0.01 ** (1 - share) * 0.03**share, 0.01), 0.03)
    step = 0.5 ** (1 - share)
    assert CURVE.step_for(ratio=ratio) == pytest.approx(step)
    assert CURVE.step_for(max_kl=kl) == pytest.approx(step)
    assert CURVE.at(step).error == pytest.approx(0.4 ** (1 - share) * 1.6**share)


def test_where_noise_makes_a_curve_dip_the_finer_step_counts():
    curve = Curve((point(1, 10, 0.02), point(2, 20, 0.05), point(4, 40, 0.04), point(8, 80, 0.2)), 0.001)
    assert curve.dips
    assert not CURVE.dips
    assert 1 < curve.step_for(max_kl=0.045) < 2
    assert curve.step_for(max_kl=0.05) == pytest.approx(2)
    assert 4 < curve.step_for(max_kl=0.1) < 8


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"ratio": 7.9}, "ratio 7.9 is outside of what was measured, ratio 8 to ratio 20"),
        ({"ratio": 21.0}, "ratio 21 is outside"),
        ({"max_kl": 0.009}, "a divergence of 0.009 nats per token is outside"),
        ({"max_kl": 0.009}, "0.01 nats per token to a divergence of 0.1"),
        ({}, "either"),
        ({"ratio": 10.0, "max_kl": 0.02}, "either"),
    ],
)
def test_nothing_is_extrapolated(asked, why):
    with pytest.raises(ValueError, match=why):
        CURVE.step_for(**asked)


@pytest.mark.parametrize("max_kl", [0.1001, 0.9, 1.0])
def test_a_bound_that_every_measured_step_keeps_is_met_by_the_coarsest(max_kl):
    assert CURVE.step_for(max_kl=max_kl) == CURVE.points[-1].step
    dipping = Curve((point(1, 10, 0.02), point(2, 20, 0.05), point(4, 40, 0.04)), 0.001)
    assert dipping.step_for(max_kl=max_kl) == 4


def test_beyond_its_ends_a_curve_gives_the_nearest_point():
    assert CURVE.at(0.001) == CURVE.points[0]
    assert CURVE.at(1000.0) == CURVE.points[-1]


def test_a_curve_survives_its_json():
    assert Curve.from_json(CURVE.to_json()) == CURVE
    assert Curve.from_json([]) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:2],
        lambda rows: [rows[0], *reversed(rows[1:])],
        lambda rows: [rows[0], rows[1], *rows[1:]],
        lambda rows: [*rows[:2], rows[2] | {"kl": "nan"}],
        lambda rows: [*rows[:2], rows[2] | {"step": "-1"}],
        lambda rows: [*rows[:2], rows[2] | {"error": "x"}],
        lambda rows: [*rows[:2], {"step": "3"}],
        lambda rows: rows[1:2] * 0 + [{"step": "0"}, *rows[1:]],
    ],
)
def test_a_damaged_curve_is_refused(change):
    with pytest.raises(BadField):
        Curve.from_json(change(CURVE.to_json()))


def test_the_curve_made_up_for_tests_is_one():
    assert all(math.isfinite(value) for p in CURVE.points for value in (p.step, p.ratio, p.kl))
