"""Which codecs others surpass, on made-up measurements."""

import numpy as np
import pytest

from kvtcd.lab.rd_points import Point
from kvtcd.lab.rd_ranking import surpassed as held

DOCUMENTS = 10


def point(codec, dial, bits, kl):
    return Point(
        codec, dial, bits_per_token=100 * bits, ratio=16 / bits, ratio_all=1, kl=np.mean(kl), kl_lo=0,
        kl_hi=9, dnll=0, top1=1, err_k=0, err_v=0, finer=0, refused=0, kl_of_documents=tuple(kl),
    )  # fmt: skip


FILES = [0, 1] * (DOCUMENTS // 2)


def surpassed(points):
    return held(points, FILES)


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
    assert found.p == 2 / 1024  # as sure as ten documents can be of two that store the same
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


def test_what_may_be_chance_is_not_said_to_be_sure():
    rng = np.random.default_rng(4)
    base = noisy(0.02, 0)
    others = [point("kivi", n, 4, base * np.exp(0.02 + rng.standard_normal(DOCUMENTS))) for n in (1, 2)]
    for one in surpassed([point("tq", 3, 3, base), *others]):
        assert one.hi > 1
        assert not one.surely
        assert one.p > 0.05


def test_the_best_of_many_by_luck_surpasses_nothing():
    """Twelve equal codecs: each is held against the luckiest; intervals alone say that some are worse."""
    fooled = sure = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        hard = 0.02 * np.exp(rng.standard_normal(DOCUMENTS))
        some = [point(f"c{n}", 1, 3, hard * np.exp(0.2 * rng.standard_normal(DOCUMENTS))) for n in range(12)]
        found = surpassed(some)
        fooled += any(one.hi < 1 for one in found)
        sure += any(one.surely for one in found)
    assert fooled > 10
    assert sure <= 3


def test_of_those_that_are_better_one_that_surely_is_goes_first():
    base = noisy(0.02, 0)
    wild = base * np.exp(np.where(np.arange(DOCUMENTS) < 5, -4, 3.0))
    (found,) = [
        one
        for one in surpassed(
            [
                point("tq", 3, 3, base),
                point("kivi", 2, 3, wild),
                point("kvtc", 8, 2.5, base * 0.8 * noisy(1, 2) ** 0.1),
            ]
        )
        if one.of == "tq:3"
    ]
    assert found.by == "kvtc:8"
    assert found.surely


def test_a_file_that_is_harder_for_one_is_not_taken_for_noise():
    """Times .5 on one file and .9 on the other, each to a hundredth: that is no scatter of documents."""
    base = noisy(0.02, 0)
    times = np.where(np.array(FILES) == 0, 0.5, 0.9) * noisy(1, 3) ** 0.1
    (found,) = surpassed([point("tq", 3, 3, base), point("kivi", 2, 3, base * times)])
    assert found.surely
    assert 0.64 < found.lo < found.hi < 0.7


def test_one_document_tells_nothing():
    assert not held([point("tq", 3, 3, [0.1]), point("kivi", 2, 3, [0.2])], [0])
    assert not held([], [])
