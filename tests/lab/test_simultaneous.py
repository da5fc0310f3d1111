"""Tests of many differences at once, against scipy, plain loops, and how often they are wrong."""

from itertools import product
from statistics import fmean, variance

import numpy as np
import pytest
from scipy import stats

from kvtcd.lab.simultaneous import above, reachable


def test_one_difference_is_scipys_own_test_by_turned_signs() -> None:
    drawn = np.random.default_rng(2).normal(0.4, 1, 9)
    want = stats.permutation_test(
        (drawn,), np.mean, permutation_type="samples", alternative="greater", n_resamples=np.inf
    )
    assert above(drawn[:, None], [0] * 9) == pytest.approx([want.pvalue])


def test_several_are_those_of_plain_loops_within_files() -> None:
    """The largest t of those that are not above it, sign by sign; and no p below that of a larger t."""
    groups = [0, 0, 0, 1, 1, 1]
    columns = np.random.default_rng(4).normal([0.0, 0.5, 1.5, -1.0], size=(6, 4)).T.tolist()

    def t(signs: tuple[int, ...], column: list[float]) -> float:
        turned = [s * x for s, x in zip(signs, column, strict=True)]
        files = [[x for x, g in zip(turned, groups, strict=True) if g == file] for file in (0, 1)]
        return fmean(turned) / sum((len(x) / 6) ** 2 * variance(x) / len(x) for x in files) ** 0.5

    found = [t((1,) * 6, column) for column in columns]
    shares = []
    for own in found:
        below = [column for column, other in zip(columns, found, strict=True) if other <= own]
        largest = [max(t(signs, column) for column in below) for signs in product((1, -1), repeat=6)]
        shares.append(sum(one >= own - 1e-12 for one in largest) / 64)
    want = [max(s for s, o in zip(shares, found, strict=True) if o >= own) for own in found]
    assert above(np.array(columns).T, groups) == pytest.approx(want)


@pytest.mark.parametrize(("codecs", "documents"), [(6, 6), (12, 8), (6, 20)])
def test_of_equal_codecs_hardly_ever_is_one_said_to_be_better(codecs: int, documents: int) -> None:
    """Documents are hard or easy for all of them; the best of many by luck is what each is held against."""
    draw, wrong, groups = np.random.default_rng(codecs), 0, [n % 2 for n in range(documents)]
    for _ in range(300):
        kl = 2 * draw.normal(size=(documents, 1)) + draw.normal(size=(documents, codecs))
        pairs = np.stack([kl[:, i] - kl[:, j] for i in range(codecs) for j in range(codecs) if i != j], 1)
        wrong += above(pairs, groups).min() < 0.05
    assert wrong <= 25  # of 15 expected at most; each pair for itself would be wrong in most of the 300


def test_what_is_clearly_above_is_found_among_many_that_are_not() -> None:
    draw = np.random.default_rng(1)
    drawn = draw.normal(size=(12, 50))
    drawn[:, 7] += 6
    drawn[:, 9] += 5
    found = above(drawn, [0, 1] * 6)
    assert set(np.flatnonzero(found < 0.05)) == {7, 9}
    alone = stats.ttest_1samp(drawn, 0, alternative="greater").pvalue
    assert set(np.flatnonzero(alone < 0.05)) > {7, 9}  # each for itself, others look as if they were


def test_no_p_is_below_what_so_few_documents_allow() -> None:
    for documents in (4, 6, 12, 30):
        sure = np.full((documents, 3), 0.5) + 0.01 * np.random.default_rng(1).normal(size=(documents, 3))
        assert above(sure, [0] * documents) == pytest.approx([reachable(documents)] * 3)
    assert reachable(4) > 0.05 > reachable(5)


def test_what_is_the_same_everywhere_is_certain_and_nothing_is_nothing() -> None:
    columns = np.stack([np.full(6, 0.3), np.zeros(6)], axis=1)
    assert above(columns, [0, 0, 0, 1, 1, 1]) == pytest.approx([1 / 64, 1])
    assert above(-columns, [0, 0, 0, 1, 1, 1]) == pytest.approx([1, 1])


def test_what_only_differs_between_files_does_not_hide_a_difference() -> None:
    """Both files say so, one by 1 and the other by 9; the other columns are noise."""
    apart = np.random.default_rng(3).normal(size=(8, 9))
    apart[:, 0] = [1.0, 1.1, 0.9, 1.05, 9.0, 9.1, 8.9, 9.05]
    assert above(apart, [0] * 4 + [1] * 4)[0] < 0.05 < above(apart, [0] * 8)[0]
