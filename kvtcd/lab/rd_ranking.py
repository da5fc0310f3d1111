"""Which codecs others surpass: less divergence in no more bytes, tested document by document.

Every point is held against that one of other codecs that stores no more and has the least divergence. The
unit is the document, the outcome the difference of logarithms of divergence (`ablate.paired`): interval by
BCa, Wilcoxon's signed ranks, corrected after Holm for all points. With five documents or fewer no p can be
below .06, and the interval has to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvtcd.lab.ablate.paired import holm, paired
from kvtcd.lab.codec_spec import spelled
from kvtcd.lab.rd_points import Point
from kvtcd.lab.statistics import logs

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
        p: of Wilcoxon's signed ranks, corrected for all points.
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
        """Whether the interval says so; small as samples are, that is the weaker of the two tests."""
        return self.hi < 1


def surpassed(points: Sequence[Point]) -> list[Surpassed]:
    """Return the points that another codec surpasses, each with the best of those that store no more."""
    if not points or len(points[0].kl_of_documents) < 2:
        return []
    kl = [logs(point.kl_of_documents) for point in points]
    bits = [point.bits_per_token for point in points]
    pairs = []
    for of, point in enumerate(points):
        others = [
            by for by, other in enumerate(points)
            if other.codec != point.codec and bits[by] <= SAME_BYTES * bits[of]
        ]  # fmt: skip
        best = min(others, key=lambda by: float(kl[by].mean()), default=None)
        if best is not None and kl[best].mean() < kl[of].mean():
            pairs.append((of, best))
    if not pairs:
        return []
    tested = paired(
        np.stack([kl[by] for _, by in pairs], axis=1), np.stack([kl[of] for of, _ in pairs], axis=1)
    )
    names = [spelled(point.codec, point.dial) for point in points]
    found = [
        Surpassed(
            names[of], names[by], bits[of] / bits[by], own.times, math.exp(own.lo), math.exp(own.hi), own.p
        )
        for (of, by), own in zip(pairs, tested, strict=True)
    ]
    return [replace(one, p=p) for one, p in zip(found, holm([one.p for one in found]), strict=True)]
