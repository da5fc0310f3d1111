"""Budgets compared on measurements that were made up, so that the answers are known."""

import numpy as np
import pytest

from kvtcd.codec.ports import Reason
from kvtcd.lab.budget_points import Dimension, Pair, advise, rows
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.evaluate import Measured, Quality, Size

GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
HARDNESS = [0.5, 1.0, 2.0, 0.8, 1.1, 3.0, 0.7, 1.4]
SPEC = Spec("kvtc2", 32)
FOUND = {"k": Dimension(100, 20.0)}


def pair(worse: float, ratios: tuple[float, float]) -> Pair:
    """A profile whose divergence grows with the square of the ratio, `worse` times that of the best."""
    return Pair.of(
        [
            [
                Measured(
                    Size(coded_raw=16_000, coded=16_000 / ratio, all_raw=20_000, all=5_000),
                    Quality(kl=1e-5 * worse * hardness * ratio**2, top1=1, dnll=0), {}, 0, 0,
                )
                for hardness in HARDNESS
            ]
            for ratio in ratios
        ]
    )  # fmt: skip


def compared(worse: dict[int, float], ratios: dict[int, tuple[float, float]]):
    pairs = {(tokens, SPEC): pair(own, ratios[tokens]) for tokens, own in worse.items()}
    return rows(pairs, dict.fromkeys(pairs, FOUND), GROUPS)


def test_divergences_are_compared_at_the_bytes_of_the_largest_budget() -> None:
    """Whatever ratios the others were measured at, above, around or below, and in whatever order."""
    worse = {4096: 1.0, 1024: 3.0, 2048: 1.5}
    found = compared(worse, {4096: (30, 45), 1024: (40, 28), 2048: (20, 29)})
    assert [row.tokens for row in found] == [1024, 2048, 4096]
    for row in found:
        assert row.ratio == pytest.approx(30)
        assert row.kl == pytest.approx(1e-5 * worse[row.tokens] * np.mean(HARDNESS) * 900)
        assert row.times == pytest.approx(worse[row.tokens])
        assert (row.times_lo, row.times_hi) == pytest.approx((row.times, row.times))  # every document says so
        assert row.kl_lo < row.kl < row.kl_hi
        assert (row.codec, row.dial, row.dimension) == ("kvtc2", 32, FOUND)


def test_the_smallest_budget_within_the_interval_of_the_largest_is_advised() -> None:
    ratios = dict.fromkeys((1024, 2048, 4096, 8192), (30, 45))
    found = compared({1024: 3.0, 2048: 1.1, 4096: 1.02, 8192: 1.0}, ratios)
    assert found[1].kl < found[-1].kl_hi < found[0].kl
    assert [(one.codec, one.dial, one.tokens) for one in advise(found)] == [("kvtc2", 32, 2048)]
    found = compared({1024: 30.0, 2048: 20.0, 4096: 10.0, 8192: 1.0}, ratios)
    assert [one.tokens for one in advise(found)] == [8192]


def test_one_document_advises_nothing() -> None:
    pairs = {(tokens, SPEC): pair(1.0, (30, 45)) for tokens in (1024, 2048)}
    alone = {key: Pair(own.kl[:1], own.raw[:1], own.stored[:1]) for key, own in pairs.items()}
    found = rows(alone, dict.fromkeys(alone, FOUND), [0])
    assert all(np.isnan(row.kl_lo) for row in found)
    assert [one.tokens for one in advise(found)] == [None]


def test_what_was_stored_losslessly_is_on_no_curve_and_advises_nothing() -> None:
    """A guard that refuses all has no divergence, in so many bytes as it is."""
    exact = Measured(Size(16, 16, 16, 16), Quality(0.0, 1.0, 0.0), {}, 0, 2, {Reason.UNUSUAL: 2})
    refused = Pair.of([[exact] * len(HARDNESS)] * 2)
    assert refused.reasons == {Reason.UNUSUAL: 4 * len(HARDNESS)}
    pairs = {(1024, SPEC): refused, (2048, SPEC): pair(1.0, (30, 45))}
    found = rows(pairs, dict.fromkeys(pairs, FOUND), GROUPS)
    assert np.isnan(found[0].kl)
    assert found[0].reasons == refused.reasons
    assert [one.tokens for one in advise(found)] == [2048]
    pairs = {(1024, SPEC): pair(1.0, (30, 45)), (2048, SPEC): refused}
    assert [one.tokens for one in advise(rows(pairs, dict.fromkeys(pairs, FOUND), GROUPS))] == [None]


def test_a_codec_with_options_is_another_codec() -> None:
    bare = Spec("kvtc2", 32, ("no-guard",))
    pairs = {(tokens, spec): pair(1.0, (30, 45)) for tokens in (1024, 2048) for spec in (SPEC, bare)}
    found = rows(pairs, dict.fromkeys(pairs, FOUND), GROUPS)
    assert [one.codec for one in advise(found)] == ["kvtc2", "kvtc2,no-guard"]


def test_each_codec_is_advised_for_itself() -> None:
    pairs = {
        (1024, SPEC): pair(9.0, (30, 45)), (2048, SPEC): pair(1.0, (30, 45)),
        (1024, Spec("kvtc", 16)): pair(1.0, (16, 32)), (2048, Spec("kvtc", 16)): pair(1.0, (16, 32)),
    }  # fmt: skip
    found = rows(pairs, dict.fromkeys(pairs, FOUND), GROUPS)
    assert {(one.codec, one.tokens) for one in advise(found)} == {("kvtc2", 2048), ("kvtc", 1024)}
