"""Which codecs others surpass, on made-up measurements."""

import numpy as np
import pytest
from scipy import stats

from kvtcd.lab.rd_points import Point
from kvtcd.lab.rd_ranking import surpassed

DOCUMENTS = 10


def point(codec, dial, bits, kl):
    return Point(
        codec, dial, bits_per_token=100 * bits, ratio=16 / bits, ratio_all=1, kl=np.mean(kl), kl_lo=0,
        kl_hi=9, dnll=0, top1=1, err_k=0, err_v=0, finer=0, refused=0, kl_of_documents=tuple(kl),
    )  # fmt: skip


def noisy(level, seed):
    return level * np.exp(0.1 * np.random.default_rng(seed).standard_normal(DOCUMENTS))


def test_less_divergence_in_no_more_bytes_surpasses():
    base = noisy(0.02, 0)
    (found,) = surpassed(
        [
            point("tq", 3, 3, base),
            point("kivi", 2, 3, 4 * base),
            point("fp8", None, 8, base / 9),
        ]
    )
    assert (found.of, found.by) == ("kivi:2", "tq:3")
    assert (found.times, found.lo, found.hi) == pytest.approx((0.25, 0.25, 0.25))
    assert found.p == pytest.approx(stats.wilcoxon(np.full(DOCUMENTS, -1.0) * range(1, 11)).pvalue)
    assert found.surely


def test_more_bytes_surpass_nothing_however_small_the_divergence():
    assert not surpassed([point("tq", 3, 3, noisy(0.02, 0)), point("fp8", None, 8, noisy(0.001, 1))])


def test_stands_of_one_codec_are_not_held_against_each_other():
    assert not surpassed([point("tq", 3, 3, noisy(0.02, 0)), point("tq", 4, 3, noisy(0.01, 1))])


def test_of_several_the_one_with_the_least_divergence_is_named():
    found = surpassed(
        [
            point("kivi", 2, 3, noisy(0.09, 0)),
            point("kvtc2", 64, 0.3, noisy(0.03, 1)),
            point("kvtc2", 32, 0.6, noisy(0.01, 2)),
            point("kvtc", 16, 0.9, noisy(0.02, 3)),
        ]
    )
    assert {(one.of, one.by) for one in found} == {("kivi:2", "kvtc2:32"), ("kvtc:16", "kvtc2:32")}
    assert {one.of: one.smaller for one in found} == pytest.approx({"kivi:2": 5, "kvtc:16": 1.5})


def test_what_may_be_chance_is_not_said_to_be_sure_and_p_is_of_all_points():
    rng = np.random.default_rng(4)
    base = noisy(0.02, 0)
    others = [point("kivi", n, 4, base * np.exp(0.02 + rng.standard_normal(DOCUMENTS))) for n in (1, 2)]
    found = surpassed([point("tq", 3, 3, base), *others])
    for one in found:
        assert one.hi > 1
        assert not one.surely
        assert one.p > 0.05


def test_one_document_tells_nothing():
    assert not surpassed([point("tq", 3, 3, [0.1]), point("kivi", 2, 3, [0.2])])
    assert not surpassed([])
