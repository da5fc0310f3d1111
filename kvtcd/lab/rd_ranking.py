"""Which codecs others surpass: less divergence in no more bytes, tested document by document.

Every point is held against that one of other codecs that stores no more and has the least divergence. The
unit is the document, the outcome the difference of logarithms of divergence (`ablate.paired`): interval by
BCa, Wilcoxon's signed ranks, corrected after Holm for all points. With five documents or fewer no p can be
below .06, and the interval has to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np

from kvtcd.lab.ablate.paired import holm, paired
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.evaluate import Measured
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


def surpassed(results: Mapping[Spec, Sequence[Measured]]) -> list[Surpassed]:
    """Return the points that another codec surpasses, each with the best of those that store no more."""
    sizes = {spec: reduce(add, (one.size for one in own)).coded for spec, own in results.items()}
    kl = {spec: logs([one.quality.kl for one in own]) for spec, own in results.items()}
    if len(next(iter(kl.values()), ())) < 2:
        return []
    pairs = []
    for spec, size in sizes.items():
        others = [o for o in sizes if o.codec != spec.codec and sizes[o] <= SAME_BYTES * size]
        best = min(others, key=lambda other: float(kl[other].mean()), default=None)
        if best and kl[best].mean() < kl[spec].mean():
            pairs.append((spec, best))
    if not pairs:
        return []
    tested = paired(
        np.stack([kl[by] for _, by in pairs], axis=1), np.stack([kl[of] for of, _ in pairs], axis=1)
    )
    found = [
        Surpassed(
            str(of), str(by), sizes[of] / sizes[by], own.times, math.exp(own.lo), math.exp(own.hi), own.p
        )
        for (of, by), own in zip(pairs, tested, strict=True)
    ]
    return [replace(one, p=p) for one, p in zip(found, holm([one.p for one in found]), strict=True)]
