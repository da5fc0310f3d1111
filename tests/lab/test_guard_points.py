"""Sums and rank correlation over cases that were made up; Spearman's coefficient against scipy's."""

import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from kvtcd.lab.guard_points import Case, points, rank


def case(name: str, error: float, kl_bare: float, **changes: object) -> Case:
    return Case(
        **{"name": name, "blocks": 4, "finer": 1, "refused": 2, "error": error, "ratio": 30.0, "kl": 0.01}
        | {"kl_bare": kl_bare}
        | changes
    )


def test_documents_of_one_name_are_summed_up_in_order() -> None:
    found = points(
        [case("b", 1.0, 0.2), case("a", 3.0, 0.4, kl=0.5), case("b", 2.0, 0.4, kl=0.03, refused=0)]
    )
    assert [point.name for point in found] == ["b", "a"]
    first = found[0]
    assert (first.documents, first.blocks, first.finer, first.refused) == (2, 8, 2, 2)
    assert (first.error, first.ratio, first.kl, first.kl_most, first.kl_bare) == pytest.approx(
        (1.5, 30.0, 0.02, 0.03, 0.3)
    )


def test_a_divergence_that_cannot_be_had_is_none() -> None:
    (point,) = points([case("a", 1.0, math.nan, kl=math.nan), case("a", 1.0, 0.1)])
    assert math.isnan(point.kl)
    assert math.isnan(point.kl_most)


def test_the_rank_correlation_is_spearmans_over_what_could_be_coded() -> None:
    draw = np.random.default_rng(0)
    error = draw.integers(0, 8, 30) / 4  # with ties
    kl = np.exp(error + draw.normal(size=30))
    cases = [case("ab"[n % 2], e, k) for n, (e, k) in enumerate(zip(error, kl, strict=True))]
    found = rank([*cases, case("c", math.inf, 0.1), case("c", 1.0, math.nan)])
    assert found.documents == 30
    assert found.value == pytest.approx(spearmanr(error, kl).statistic)
    assert -1 <= found.lo < found.value < found.hi <= 1
