"""Points and gains out of measurements that were made up, so that the answers are known."""

import math

import numpy as np
import pytest

from kvtcd.codec.ports import Reason
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.evaluate import Measured, Quality, Size
from kvtcd.lab.rd_points import Means, equal_kl, points

GROUPS = [0, 0, 0, 1, 1, 1]
HARDNESS = [0.5, 1.0, 2.0, 0.8, 1.1, 3.0]
"""How much a document diverges, with any codec."""


def measured(kl: float, ratio: float, refused: int = 0) -> Measured:
    size = Size(coded_raw=16_000, coded=16_000 / ratio, all_raw=20_000, all=16_000 / ratio + 4_000)
    return Measured(
        size, Quality(kl=kl, top1=1 - kl, dnll=kl / 2), {"k": kl / 4, "v": kl / 8}, 3 * refused, refused,
        {Reason.ERROR: refused} if refused else {},
    )  # fmt: skip


def codec(ratio: float, factor: float = 1.0) -> list[Measured]:
    """A codec whose divergence grows with the square of its ratio, `factor` times as good as the other."""
    return [measured(1e-4 * hardness * (ratio / factor) ** 2, ratio) for hardness in HARDNESS]


def test_a_point_sums_up_its_documents() -> None:
    rows = [measured(0.1, 10, refused=1), measured(0.3, 30, refused=2)]
    (point,) = points({Spec("kvtc", 16): rows}, [0, 0], token_bits=4_000)
    assert (point.codec, point.dial) == ("kvtc", 16)
    stored = 1_600 + 16_000 / 30
    assert point.ratio == pytest.approx(32_000 / stored)
    assert point.ratio_all == pytest.approx(40_000 / (stored + 8_000))
    assert point.bits_per_token == pytest.approx(stored / 8)  # 32,000 bits are 8 tokens of 4,000
    assert (point.kl, point.top1, point.dnll) == pytest.approx((0.2, 0.8, 0.1))
    assert (point.err_k, point.err_v) == pytest.approx((0.05, 0.025))
    assert (point.finer, point.refused, point.reasons) == (9, 3, {Reason.ERROR: 3})
    assert point.kl_of_documents == (0.1, 0.3)


def test_twice_the_ratio_at_any_divergence_is_a_gain_of_two() -> None:
    results = {Spec("kvtc", ratio): codec(ratio) for ratio in (16, 32)}
    results |= {Spec("kvtc2", ratio): codec(ratio, 2) for ratio in (16, 24, 48, 96)}
    gains = [gain for gain in equal_kl(results, GROUPS) if gain.of == "kvtc2"]
    assert [(gain.of, gain.over) for gain in gains] == [("kvtc2", "kvtc:16"), ("kvtc2", "kvtc:32")]
    hardness = np.mean(HARDNESS)
    for gain, ratio in zip(gains, (16, 32), strict=True):
        assert gain.at_kl == pytest.approx(1e-4 * hardness * ratio**2)
        assert gain.ratio_gain == pytest.approx(2)
        assert (gain.lo, gain.hi) == pytest.approx((2, 2))  # every document says so


def test_documents_that_disagree_make_a_gain_uncertain() -> None:
    """Half of them gain 1.5, half 3; the mean of their divergences decides."""
    results = {Spec("kvtc", 16): codec(16)}
    for ratio in (16, 24, 48, 96):
        rows = [
            measured(1e-4 * hardness * (ratio / (1.5 if n % 2 else 3)) ** 2, ratio)
            for n, hardness in enumerate(HARDNESS)
        ]
        results[Spec("kvtc2", ratio)] = rows
    (gain,) = equal_kl(results, GROUPS)
    weights = [1 / 1.5**2 if n % 2 else 1 / 3**2 for n in range(6)]
    want = math.sqrt(sum(HARDNESS) / sum(h * w for h, w in zip(HARDNESS, weights, strict=True)))
    assert gain.ratio_gain == pytest.approx(want, rel=1e-9)
    assert 1 < gain.lo < 1.5 < want < 3 < gain.hi < 4  # of so few, beyond what was seen


def test_one_point_is_held_against_the_curve_of_the_first() -> None:
    results = {Spec("kvtc", ratio): codec(ratio) for ratio in (8, 16, 32, 64)}
    results |= {Spec("kvtc2", 40): codec(40, 2)}
    (gain,) = equal_kl(results, GROUPS)
    assert (gain.of, gain.over) == ("kvtc2:40", "kvtc")
    assert gain.at_kl == pytest.approx(1e-4 * np.mean(HARDNESS) * 20**2)
    assert gain.ratio_gain == pytest.approx(2)


@pytest.mark.parametrize(
    ("first", "other", "more", "less"),
    [  # kvtc 16 has the divergence of kvtc2 32, and kvtc 20 that of kvtc2 40
        ((16,), (40, 80), None, 40 / 16),
        ((16,), (8, 24), 24 / 16, None),
        ((24, 48), (40,), 40 / 24, None),
        ((8, 16), (40,), None, 40 / 16),
    ],
)
def test_what_a_curve_does_not_reach_is_bounded_by_its_end(
    first: tuple[int, ...], other: tuple[int, ...], more: float | None, less: float | None
) -> None:
    results = {Spec("kvtc", ratio): codec(ratio) for ratio in first}
    results |= {Spec("kvtc2", ratio): codec(ratio, 2) for ratio in other}
    (gain,) = equal_kl(results, GROUPS)
    assert gain.at_kl > 0
    assert math.isnan(gain.ratio_gain)
    assert math.isnan(gain.lo)
    for found, want in ((gain.more_than, more), (gain.less_than, less)):
        assert found == (pytest.approx(want) if want else pytest.approx(math.nan, nan_ok=True))


def test_points_alone_and_codecs_without_loss_are_not_compared() -> None:
    exact = [measured(0.0, 1.5) for _ in HARDNESS]
    results = {Spec("lossless"): exact, Spec("kvtc", 16): codec(16)}
    assert equal_kl(results, GROUPS) == []
    assert points(results, GROUPS, 4_000)[0].kl_hi == 0
    assert equal_kl({Spec("lossless"): exact}, GROUPS) == []


def test_noise_is_summed_up_like_divergence() -> None:
    found = Means.of([Quality(kl, 1 - kl, kl) for kl in (0.001, 0.002, 0.003)], [0, 0, 0])
    assert (found.kl, found.dnll, found.top1) == pytest.approx((0.002, 0.002, 0.998))
    assert 0 < found.kl_lo < 0.001  # of three documents, beyond what was seen
    assert 0.003 < found.kl_hi < 0.01
