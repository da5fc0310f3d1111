"""Which codecs others surpass: less divergence in no more bytes, tested document by document.

Every point is held against all of other codecs that store no more. The unit is the document, the outcome the
difference of logarithms of divergence. All these pairs are one family (`simultaneous`), so the p of the one
that is named holds although it was picked; its interval is of that pair alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtcd.lab.codec_spec import spelled
from kvtcd.lab.rd_points import Point
from kvtcd.lab.simultaneous import ALPHA, above
from kvtcd.lab.statistics import interval, logs, mean

SAME_BYTES = 1.02
"""Times the bytes of a point that another may store and still be held against it."""


@dataclass(frozen=True, slots=True)
class Surpassed:
    """A point, and what has less divergence in no more bytes.

    Attributes:
        of, by: codecs and dials.
        smaller: bytes of `of` over those of `by`.
        times: divergence of `by` over that of `of`, geometric means over documents.
        lo, hi: its interval.
        p: that it is less by chance, corrected for all pairs of all points.
    """

    of: str
    by: str
    smaller: float
    times: float
    lo: float
    hi: float
    p: float

    @property
    def surely(self) -> bool:
        """Whether it is beyond noise, that of having picked it too."""
        return self.p < ALPHA


def surpassed(points: Sequence[Point], groups: Sequence[int]) -> list[Surpassed]:
    """Return the points that another codec surpasses, and which that is.

    Of those that do so beyond noise it is the one with the least divergence; where none does, that of all.

    Args:
        points: of one set of documents.
        groups: by document, which file it is of.
    """
    if not points or len(groups) < 2:
        return []
    kl = [logs(point.kl_of_documents) for point in points]
    bits = [point.bits_per_token for point in points]
    pairs = [
        (of, by)
        for of, point in enumerate(points)
        for by, other in enumerate(points)
        if other.codec != point.codec and bits[by] <= SAME_BYTES * bits[of]
    ]
    if not pairs:
        return []
    more = np.stack([kl[of] - kl[by] for of, by in pairs], axis=1)
    p = dict(zip(pairs, above(more, groups), strict=True))
    found = []
    for of, point in enumerate(points):
        better = [by for own, by in pairs if own == of and kl[by].mean() < kl[of].mean()]
        if not better:
            continue
        best = min(better, key=lambda by: (p[of, by] >= ALPHA, float(kl[by].mean())))
        times = interval(mean(kl[best] - kl[of]), groups)
        found.append(
            Surpassed(
                spelled(point.codec, point.dial), spelled(points[best].codec, points[best].dial),
                bits[of] / bits[best], math.exp(times.value), math.exp(times.lo), math.exp(times.hi),
                float(p[of, best]),
            )
        )  # fmt: skip
    return found
