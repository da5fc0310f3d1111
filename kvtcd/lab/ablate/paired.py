"""Paired tests of one scheme against another: the unit is the trial, which both have seen.

The outcome is ``delta``, the difference of logarithms: ``exp(delta)`` times the divergence, or the error of
the output. Intervals are those of `statistics`. Ranks are signed (Wilcoxon 1945), their effect size the
matched-pairs rank-biserial correlation (Kerby 2014); that of Mann and Whitney, which forgets the pairs, is
there to be compared with arXiv 2605.08114. Families of tests, those of equality too, are corrected after Holm
(1979). Equality is shown, if at all, by two one-sided tests (Schuirmann 1987): a difference that is not
significant is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtcd.core.errors import Unavailable
from kvtcd.lab.statistics import Floats, intervals_of_means

SAME = math.log(1.05)
"""Margin within which two implementations are one codec."""
NOTHING = 1e-12
"""Standard error below which differences are all the same."""
ALIKE = math.log(1.25)
"""Margin within which a difference is of no practical use."""


@dataclass(frozen=True, slots=True)
class Paired:
    """What the trials say of a difference.

    Attributes:
        delta, lo, hi: mean difference of logarithms, and its interval.
        p: of Wilcoxon's signed ranks, two-sided; 1 where no trial differs.
        signed, unsigned: rank-biserial correlations, of signed ranks and of Mann and Whitney.
        dz: mean over standard deviation of the differences.
        spread: the latter.
        p_alike: of the two one-sided tests that the mean lies within `ALIKE`.
        p_same: the same for `SAME`.
    """

    delta: float
    lo: float
    hi: float
    p: float
    signed: float
    unsigned: float
    dz: float
    spread: float
    p_alike: float
    p_same: float

    @property
    def times(self) -> float:
        """The ratio of the geometric means."""
        return math.exp(self.delta)


def paired(first: Floats, second: Floats) -> list[Paired]:
    """Compare logarithms ``[trials, comparisons]``, each column for itself.

    Raises:
        Unavailable: scipy is not installed.
    """
    try:
        from scipy import stats  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise Unavailable(f"tests need {error.name}; pip install 'kvtcd[lab]'") from error
    found = []
    bounds = intervals_of_means(first - second, [0] * len(first))
    for own, other, bound in zip(first.T, second.T, bounds, strict=True):
        differences = own - other
        delta, spread = float(differences.mean()), float(differences.std(ddof=1))
        found.append(
            Paired(
                delta=delta,
                lo=bound.lo,
                hi=bound.hi,
                p=float(stats.wilcoxon(differences).pvalue) if differences.any() else 1.0,
                signed=_signed(differences),
                unsigned=_unsigned(own, other),
                dz=delta / spread if spread else math.copysign(math.inf, delta) if delta else 0.0,
                spread=spread,
                p_alike=equivalence(differences, ALIKE),
                p_same=equivalence(differences, SAME),
            )
        )
    return found


def equivalence(differences: Floats, margin: float) -> float:
    """Return the p-value of two one-sided t-tests that the mean lies within plus and minus `margin`."""
    from scipy.stats import t  # noqa: PLC0415 - an extra

    error = differences.std(ddof=1) / len(differences) ** 0.5
    room = margin - abs(differences.mean())  # of the nearer of the two bounds, whose test decides
    if error < NOTHING:
        return float(room <= 0)
    return float(t.sf(room / error, len(differences) - 1))


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values that hold for all tests together."""
    order = np.argsort(p, kind="stable")
    left = len(p) - np.arange(len(p))
    found = np.empty(len(p))
    found[order] = np.minimum(np.maximum.accumulate(np.asarray(p, np.float64)[order] * left), 1)
    return [float(value) for value in found]


def least_p(trials: int) -> float:
    """Return the smallest p-value of Wilcoxon's signed ranks, two-sided: all signs are the same."""
    return 2.0 ** (1 - trials)


def _signed(differences: Floats) -> float:
    """Positive ranks less negative ones, over all; pairs without a difference have none."""
    from scipy.stats import rankdata  # noqa: PLC0415 - an extra

    own = differences[differences != 0]
    if not len(own):
        return 0.0
    ranks = rankdata(np.abs(own))
    return float((ranks * np.sign(own)).sum() / ranks.sum())


def _unsigned(first: Floats, second: Floats) -> float:
    """How much more often one of the first is above one of the second than below."""
    return float(np.sign(first[:, None] - second).mean())
