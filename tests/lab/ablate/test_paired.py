"""Tests and intervals, against scipy, the lab's own interval, and arithmetic by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from kvtcd.lab.ablate.cells import Row
from kvtcd.lab.ablate.contrasts import Table, contrasts
from kvtcd.lab.ablate.frontier import Left, frontier
from kvtcd.lab.ablate.paired import equivalence, holm, least_p, paired
from kvtcd.lab.ablate.spread import split, systematic
from kvtcd.lab.statistics import interval, mean

DRAW = np.random.default_rng(0)


def column(*values):
    return np.array(values, dtype=float)[:, None]


def test_bounds_are_those_of_the_intervals_that_eval_prints():
    first, second = DRAW.lognormal(size=(2, 12, 3))
    for own, difference in zip(paired(first, second), (first - second).T, strict=True):
        want = interval(mean(difference), [0] * 12)
        assert (own.delta, own.lo, own.hi) == pytest.approx((want.value, want.lo, want.hi))


def test_what_does_not_differ_has_no_width_and_no_effect():
    (found,) = paired(column(1, 2, 3), column(1, 2, 3))
    assert (found.delta, found.lo, found.hi, found.p, found.signed, found.dz) == (0, 0, 0, 1, 0, 0)
    assert found.p_alike == 0


def test_a_difference_that_is_the_same_everywhere_is_certain():
    (found,) = paired(column(2, 3, 4), column(1, 2, 3))
    assert (found.delta, found.lo, found.hi, found.signed, found.dz) == (1, 1, 1, 1, math.inf)
    assert found.times == pytest.approx(math.e)
    assert found.p_alike == 1


def test_ranks_are_those_of_wilcoxon_and_of_mann_and_whitney():
    first, second = DRAW.normal(size=25), DRAW.normal(size=25) + 0.4
    (found,) = paired(first[:, None], second[:, None])
    assert found.p == pytest.approx(stats.wilcoxon(first, second).pvalue)
    above = stats.mannwhitneyu(first, second).statistic
    assert found.unsigned == pytest.approx(2 * above / 25**2 - 1)
    ranks = stats.rankdata(np.abs(first - second))
    assert found.signed == pytest.approx(np.sum(ranks * np.sign(first - second)) / ranks.sum())
    assert found.dz == pytest.approx((first - second).mean() / (first - second).std(ddof=1))


def test_equality_has_to_be_shown_on_both_sides():
    near, wide = DRAW.normal(size=40) * 0.02, DRAW.normal(size=40)
    margin = math.log(1.25)
    assert equivalence(near, margin) < 1e-6
    assert equivalence(near + 0.3, margin) > 0.9
    assert equivalence(near - 0.3, margin) > 0.9
    assert equivalence(wide, margin) > 0.05  # no significant difference, and no equality


def test_families_of_tests_are_corrected_as_in_the_books():
    p = [0.01, 0.04, 0.03, 0.005]
    assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]


def test_variance_is_split_into_what_it_was_made_of():
    trials = DRAW.normal(size=(400, 1)) * 2
    columns = np.array([0.0, 0.5, 1.0, 1.5])
    y = trials + columns + DRAW.normal(size=(400, 4)) * 0.1
    found = split({str(n): y[:, n] for n in range(4)})
    assert found.sigma == pytest.approx(columns.std(ddof=1), rel=0.05)
    assert found.rest == pytest.approx(0.1, rel=0.1)
    assert found.delta == pytest.approx(0.1 * 2**0.5, rel=0.1)
    assert found.p_same > 0.9


def test_a_difference_within_the_noise_of_a_seed_is_not_systematic():
    assert systematic(0.2, 0.4, [0.08, 0.0])
    assert systematic(-0.4, -0.2, [0.08])
    assert not systematic(0.05, 0.4, [0.08, 0.0])


def rows(scheme, bits, kl, output=(1.0, 1.0)):
    return [
        Row(scheme, budget, at, {"kl": tuple(own), "output": tuple(output)})
        for budget, at, own in zip((2, 4), bits, kl, strict=True)
    ]


def test_schemes_are_compared_at_the_bits_of_the_first():
    """The other one loses e^-1 a bit: moved by half a bit, a scheme that seemed equal is worse."""
    other = rows("tq-kv", (2.0, 4.0), ([1.0, 2.0], [math.exp(-2), 2 * math.exp(-2)]))
    dear = rows("dear", (2.5, 4.5), ([1.0, 2.0], [math.exp(-2), 2 * math.exp(-2)]))
    found = {(one.budget, one.figure): one for one in contrasts([Table("cell", [*other, *dear])])}
    assert found[2, "kl"].found.delta == pytest.approx(0.5)
    assert found[4, "kl"].found.delta == pytest.approx(0.5)  # beyond the last budget, on the same line
    assert found[2, "kl"].moved == pytest.approx(0.5)
    assert found[2, "output"].found.delta == 0
    assert all(one.p_holm >= one.q >= one.found.p for one in found.values())


def test_the_smallest_p_of_so_many_trials_is_that_of_signed_ranks():
    for trials in (6, 8, 12):
        (found,) = paired(1 + DRAW.random((trials, 1)), np.zeros((trials, 1)))
        assert found.p == pytest.approx(least_p(trials))


def test_equality_is_corrected_for_all_comparisons_too():
    """Of forty comparisons with what is the same, some show it, each alone; none does when all are asked."""
    draw = np.random.default_rng(2)

    def some(*shape):
        return draw.lognormal(0, 0.25, shape)

    reference = rows("tq-kv", (2.0, 4.0), np.ones((2, 8)), np.ones(8))
    others = [row for n in range(10) for row in rows(f"s{n}", (2.0, 4.0), some(2, 8), some(8))]
    found = contrasts([Table("cell", [*reference, *others])])
    assert len(found) == 40
    assert any(one.found.p_alike < 0.05 for one in found)
    assert not any(one.p_alike < 0.05 for one in found)
    assert [one.p_alike for one in found] == holm([one.found.p_alike for one in found])


TRIALS = 12


@pytest.fixture
def noisy():
    draw = np.random.default_rng(3)
    return lambda level: level * np.exp(0.05 * draw.normal(size=TRIALS))


def test_only_what_nothing_surpasses_is_left(noisy):
    flat = np.ones(TRIALS)
    table = Table(
        "cell",
        [
            *rows("a", (2.0, 4.0), (noisy(1.0), noisy(0.1)), flat),
            *rows("c", (1.9, 4.1), (noisy(2.0), noisy(0.2)), 2 * flat),  # worse, but less at two bits
        ],
    )
    assert frontier(table) == [Left("a", 2, True), Left("a", 4, True), Left("c", 2, True)]


def test_what_is_surpassed_by_means_alone_is_left_with_a_mark(noisy):
    one, other = noisy(1.0), noisy(1.0)
    better, worse = sorted((one, other), key=lambda kl: np.log(kl).mean())
    table = Table(
        "cell",
        [
            *rows("a", (2.0, 4.0), (better, 0.01 * better), np.ones(TRIALS)),
            *rows("b", (2.0, 4.0), (worse, 0.02 * better), np.ones(TRIALS)),
        ],
    )
    assert frontier(table) == [Left("a", 2, True), Left("a", 4, True), Left("b", 2, False)]


def test_what_is_the_same_in_every_trial_goes_for_its_bits(noisy):
    kl = noisy(1.0), noisy(0.1)
    table = Table(
        "cell", [*rows("a", (2.0, 4.0), kl, np.ones(TRIALS)), *rows("b", (2.0, 4.1), kl, np.ones(TRIALS))]
    )
    assert frontier(table) == [Left("a", 2, True), Left("a", 4, True), Left("b", 2, True)]


def test_of_equal_schemes_none_is_said_to_be_surpassed(noisy):
    """Twenty of them, each better than some by chance in one figure, in the other, and in both."""
    gone = 0
    for _ in range(40):
        own = [
            Row(f"s{n}", 2, 2.0, {"kl": tuple(noisy(1.0)), "output": tuple(noisy(1.0))}) for n in range(20)
        ]
        gone += len(frontier(Table("cell", own))) < 20
    assert gone <= 4
