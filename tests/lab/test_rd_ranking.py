"""Which codecs others surpass, on made-up measurements."""

import numpy as np
import pytest
from scipy import stats

from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.evaluate import Measured, Quality, Size
from kvtcd.lab.rd_ranking import surpassed

DOCUMENTS = 10


def measured(bits, kl):
    return [Measured(Size(1600, 100 * bits, 1600, 100 * bits), Quality(one, 1, 0), {}, 0, 0) for one in kl]


def noisy(level, seed):
    return level * np.exp(0.1 * np.random.default_rng(seed).standard_normal(DOCUMENTS))


def test_less_divergence_in_no_more_bytes_surpasses():
    base = noisy(0.02, 0)
    (found,) = surpassed(
        {
            Spec("tq", 3): measured(3, base),
            Spec("kivi", 2): measured(3, 4 * base),
            Spec("fp8"): measured(8, base / 9),
        }
    )
    assert (found.of, found.by) == ("kivi:2", "tq:3")
    assert (found.times, found.lo, found.hi) == pytest.approx((0.25, 0.25, 0.25))
    assert found.p == pytest.approx(stats.wilcoxon(np.full(DOCUMENTS, -1.0) * range(1, 11)).pvalue)
    assert found.surely


def test_more_bytes_surpass_nothing_however_small_the_divergence():
    assert not surpassed(
        {Spec("tq", 3): measured(3, noisy(0.02, 0)), Spec("fp8"): measured(8, noisy(0.001, 1))}
    )


def test_stands_of_one_codec_are_not_held_against_each_other():
    assert not surpassed(
        {Spec("tq", 3): measured(3, noisy(0.02, 0)), Spec("tq", 4): measured(3, noisy(0.01, 1))}
    )


def test_of_several_the_one_with_the_least_divergence_is_named():
    found = surpassed(
        {
            Spec("kivi", 2): measured(3, noisy(0.09, 0)),
            Spec("kvtc2", 64): measured(0.3, noisy(0.03, 1)),
            Spec("kvtc2", 32): measured(0.6, noisy(0.01, 2)),
            Spec("kvtc", 16): measured(0.9, noisy(0.02, 3)),
        }
    )
    assert {(one.of, one.by) for one in found} == {("kivi:2", "kvtc2:32"), ("kvtc:16", "kvtc2:32")}
    assert {one.of: one.smaller for one in found} == pytest.approx({"kivi:2": 5, "kvtc:16": 1.5})


def test_what_may_be_chance_is_not_said_to_be_sure_and_p_is_of_all_points():
    rng = np.random.default_rng(4)
    base = noisy(0.02, 0)
    others = {
        Spec("kivi", n): measured(4, base * np.exp(0.02 + rng.standard_normal(DOCUMENTS))) for n in (1, 2)
    }
    found = surpassed({Spec("tq", 3): measured(3, base)} | others)
    for one in found:
        assert one.hi > 1
        assert not one.surely
        assert one.p > 0.05


def test_one_document_tells_nothing():
    assert not surpassed({Spec("tq", 3): measured(3, [0.1]), Spec("kivi", 2): measured(3, [0.2])})
    assert not surpassed({})
