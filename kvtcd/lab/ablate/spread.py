"""Where differences come from: the codec, its implementation, or the seed.

Trials are crossed with implementations, and with seeds, of one codec; logarithms are split into trial, column
and remainder (two-way analysis of variance, one figure in each place). The spread between schemes is that of
their means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtcd.lab.ablate.paired import SAME, equivalence
from kvtcd.lab.statistics import Floats


@dataclass(frozen=True, slots=True)
class Split:
    """The figures of one codec, or of several, over trials.

    Attributes:
        columns: what was crossed with trials.
        sigma: standard deviation between columns, that of chance taken out; zero at least.
        rest: standard deviation of what neither trial nor column explains.
        delta: standard deviation, over trials, of the difference of two columns: the floor of any one trial.
        p_same: of the tests that columns differ by less than 5 %, the largest.
    """

    columns: tuple[str, ...]
    sigma: float
    rest: float
    delta: float
    p_same: float


def split(columns: Mapping[str, Floats]) -> Split:
    """Split the variance of logarithms, one array over trials for each column; two columns at least."""
    y = np.stack(list(columns.values()), axis=1)
    trials, count = y.shape
    means, rows = y.mean(axis=0), y.mean(axis=1, keepdims=True)
    rest = y - rows - means + y.mean()
    mean_square = float(np.square(rest).sum() / ((trials - 1) * (count - 1)))
    between = float(trials * np.square(means - y.mean()).sum() / (count - 1))
    pairs = [y[:, i] - y[:, j] for i in range(count) for j in range(i)]
    return Split(
        columns=tuple(columns),
        sigma=max(0.0, (between - mean_square) / trials) ** 0.5,
        rest=mean_square**0.5,
        delta=float(np.sqrt(np.mean([np.square(own - own.mean()).sum() / (trials - 1) for own in pairs]))),
        p_same=max(equivalence(own, SAME) for own in pairs),
    )


def systematic(lo: float, hi: float, floors: Sequence[float]) -> bool:
    """Tell whether an interval of a difference lies beyond the largest of the floors, on either side."""
    floor = max(floors)
    return lo > floor or hi < -floor
