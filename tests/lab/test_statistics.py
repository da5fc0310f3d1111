"""Intervals, against scipy, a bootstrap in plain loops, and truth; curves with a known answer."""

import math
import random
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from kvtcd.lab import statistics
from kvtcd.lab.statistics import Interval, at_kl, brackets, interval, intervals_of_means, mean


@pytest.mark.parametrize("groups", [[0] * 12, [0] * 6 + [1] * 6, [n % 4 for n in range(12)]])
def test_bounds_are_scipys_own_at_the_distance_that_few_documents_ask_for(groups: list[int]) -> None:
    values = np.random.default_rng(3).lognormal(size=12)
    files = [np.flatnonzero(np.array(groups) == file) for file in dict.fromkeys(groups)]

    def of_all(*drawn: np.ndarray, axis: int) -> np.ndarray:
        return np.concatenate([values[one] for one in drawn], axis=axis).mean(axis=axis)

    want = stats.bootstrap(
        files, of_all, method="BCa", vectorized=True, rng=np.random.default_rng(0)
    ).confidence_interval
    size, variances = 12 // len(files), [np.var(values[one], ddof=1) for one in files]
    freedom = (size - 1) * sum(variances) ** 2 / sum(v * v for v in variances)
    wider = math.sqrt(size / (size - 1)) * stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975)
    value = values.mean()
    found = interval(mean(values), groups)
    assert found.value == pytest.approx(value)
    close = 0.01 * (found.hi - found.lo)  # of resamples that are the same some are less, by rounding alone
    assert found.lo == pytest.approx(value - wider * (value - want.low), abs=close)
    assert found.hi == pytest.approx(value + wider * (want.high - value), abs=close)


LAWS = {
    "normal": (lambda draw, shape: draw.normal(size=shape), 0.0),
    "skewed": (lambda draw, shape: draw.lognormal(sigma=0.5, size=shape), math.exp(0.125)),
    "very skewed": (lambda draw, shape: draw.lognormal(size=shape), math.exp(0.5)),
}


@pytest.mark.parametrize(
    ("files", "size", "held"),
    [
        (2, 6, {"normal": (0.93, 0.97), "skewed": (0.905, 0.97), "very skewed": (0.86, 0.95)}),
        (4, 3, {"normal": (0.93, 0.98), "skewed": (0.92, 0.97), "very skewed": (0.88, 0.95)}),
        (1, 12, {"normal": (0.93, 0.97), "skewed": (0.91, 0.97), "very skewed": (0.86, 0.95)}),
        (2, 2, {"normal": (0.93, 0.99), "skewed": (0.92, 0.99), "very skewed": (0.87, 0.97)}),
    ],
)
def test_so_many_of_a_hundred_intervals_hold_the_truth(
    monkeypatch: pytest.MonkeyPatch, files: int, size: int, held: dict[str, tuple[float, float]]
) -> None:
    """1,000 experiments of each; BCa as it is in books holds it in 54 to 91 %."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1999)
    groups = [file for file in range(files) for _ in range(size)]
    for law, (least, most) in held.items():
        draw, truth = LAWS[law]
        drawn = draw(np.random.default_rng(size), (files * size, 1000))
        share = np.mean([one.lo <= truth <= one.hi for one in intervals_of_means(drawn, groups)])
        assert least < share < most, law


def test_what_is_above_zero_has_bounds_above_zero_that_are_as_far_in_logarithms() -> None:
    values = [0.02, 0.03, 0.05, 0.2]
    plain, found = (interval(mean(values), [0, 0, 1, 1], positive=one) for one in (False, True))
    assert plain.lo < 0 < found.lo < found.value == plain.value < found.hi
    assert interval(mean([0.0, 0.0]), [0, 0], positive=True) == Interval(0.0, 0.0, 0.0)
    many = np.random.default_rng(1).lognormal(size=4000)
    plain, found = (interval(mean(many), [0] * 4000, positive=one) for one in (False, True))
    assert (found.lo, found.hi) == pytest.approx((plain.lo, plain.hi), rel=1e-4)


def test_a_file_that_varies_more_is_known_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that varies is in three documents of one file, and those of the other do not make up for it."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1999)
    drawn = np.random.default_rng(8).normal(size=(9, 2000))
    drawn[3:] *= 0.01
    found = intervals_of_means(drawn, [0] * 3 + [1] * 6)
    assert 0.92 < np.mean([one.lo <= 0 <= one.hi for one in found]) < 0.98


def test_means_at_once_are_the_means_one_by_one() -> None:
    drawn = np.random.default_rng(6).lognormal(size=(7, 4))
    groups = [0, 0, 1, 1, 1, 2, 3]
    for own, found in zip(drawn.T, intervals_of_means(drawn, groups), strict=True):
        want = interval(mean(own), groups)
        assert (found.value, found.lo, found.hi) == pytest.approx((want.value, want.lo, want.hi))


def test_a_skewed_mean_has_the_interval_of_efron_by_hand() -> None:
    """Bias correction from the share below, acceleration from the jackknife, percentiles of resamples."""
    values = [0.1, 0.2, 0.2, 0.3, 0.4, 0.5, 0.9, 1.6, 2.8, 6.0]
    draw, normal = random.Random(1), stats.norm()
    resamples = sorted(fmean(draw.choices(values, k=10)) for _ in range(40_000))
    value = fmean(values)
    z0 = normal.ppf(sum(r < value for r in resamples) / len(resamples))
    left_out = [fmean(values[:n] + values[n + 1 :]) for n in range(10)]
    deviations = [fmean(left_out) - one for one in left_out]
    acceleration = sum(d**3 for d in deviations) / (6 * sum(d**2 for d in deviations) ** 1.5)
    bounds = []
    for z in (normal.ppf(0.025), normal.ppf(0.975)):
        share = normal.cdf(z0 + (z0 + z) / (1 - acceleration * (z0 + z)))
        bounds.append(resamples[int(share * len(resamples))])
    wider = math.sqrt(10 / 9) * stats.t.ppf(0.975, 9) / normal.ppf(0.975)
    bounds = [value + wider * (bound - value) for bound in bounds]
    found = interval(mean(values), [0] * 10)
    assert (found.lo, found.hi) == pytest.approx(bounds, rel=0.05)
    assert found.hi - found.value > 1.4 * (found.value - found.lo)  # not a symmetric one


def test_resampling_within_files_leaves_out_what_only_differs_between_them() -> None:
    spread = np.random.default_rng(0).normal(size=20)
    values = np.concatenate((spread, 100 + spread))
    within, across = interval(mean(values), [0] * 20 + [1] * 20), interval(mean(values), [0] * 40)
    assert within.hi - within.lo < 1.1
    assert across.hi - across.lo > 20


def test_nineteen_of_twenty_intervals_hold_the_true_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 999)
    draw = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        base = draw.lognormal(sigma=0.5, size=24)
        pair = base * draw.lognormal(mean=math.log(2) - 0.02, sigma=0.2, size=24)

        def ratio(documents, pair=pair, base=base):
            return pair[documents].sum(axis=-1) / base[documents].sum(axis=-1)

        found = interval(ratio, [0] * 8 + [1] * 16)
        held += found.lo <= 2 <= found.hi
        assert found.hi - found.lo < 0.8  # pairing: either mean alone varies by more
    assert 180 <= held <= 199


def test_what_does_not_vary_has_no_width() -> None:
    assert interval(mean([0.0, 0.0, 0.0]), [0, 0, 0]) == Interval(0.0, 0.0, 0.0)


def test_one_document_says_nothing_of_others() -> None:
    found = interval(mean([3.0]), [0])
    assert found.value == 3.0
    assert math.isnan(found.lo)
    assert math.isnan(found.hi)


@pytest.mark.parametrize("groups", [[0, 1, 2, 3], [0, 0, 0, 1], [0, 0, 1, 2]])
def test_documents_that_are_alone_in_their_file_are_resampled_too(groups: list[int]) -> None:
    found = interval(mean([1.0, 2.0, 4.0, 9.0]), groups)
    assert found.lo < 4 < found.hi


def power_law(ratios: list[float], factor: float) -> np.ndarray:
    return 1e-4 * (np.array(ratios) / factor) ** 1.5


def test_interpolation_finds_a_power_law_exactly() -> None:
    ratios = np.array([10.0, 20.0, 40.0, 80.0])
    for ratio in (10.0, 13.0, 20.0, 66.0, 80.0):
        target = power_law([ratio], 2)[0]
        assert at_kl(power_law(ratios, 2), ratios, np.array(target)) == pytest.approx(ratio)


def test_interpolation_works_on_many_curves_at_once() -> None:
    ratios = np.array([[10.0, 20.0, 40.0], [20.0, 40.0, 80.0]])
    kl = np.stack([power_law(row, factor) for row, factor in zip(ratios, (1, 2), strict=True)])
    targets = np.array([power_law([30.0], 1)[0], power_law([30.0], 2)[0]])
    assert at_kl(kl, ratios, targets) == pytest.approx([30.0, 30.0])


def test_beyond_its_ends_a_curve_goes_on_straight() -> None:
    ratios = np.array([10.0, 20.0, 40.0])
    kl = power_law(ratios, 1)
    for ratio in (5.0, 100.0):
        assert at_kl(kl, ratios, np.array(power_law([ratio], 1)[0])) == pytest.approx(ratio)
        assert not brackets(kl, power_law([ratio], 1)[0])
    assert brackets(kl, kl[0])
    assert brackets(kl, kl[-1])
    assert not brackets(kl[:1], kl[0])


def test_of_several_crossings_the_smallest_ratio_counts() -> None:
    kl, ratios = np.array([0.01, 0.04, 0.02, 0.08]), np.array([10.0, 20.0, 40.0, 80.0])
    assert at_kl(kl, ratios, np.array(0.02)) == pytest.approx(math.sqrt(10 * 20))
