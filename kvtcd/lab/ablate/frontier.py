"""Which schemes are left when all go that another surpasses: in bits, divergence and error of the output.

Bits are counted, the two others measured over trials. A scheme is surpassed beyond noise where another takes
no more bits and is shown to be better in both, or in one where the other is the same on every trial: both of
two one-sided t-tests of differences of logarithms (an intersection-union test, Berger 1982), corrected after
Holm for all pairs of which one takes no more bits. What is surpassed by means alone is left, and marked.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from kvtcd.lab.ablate.contrasts import FIGURES, Table
from kvtcd.lab.ablate.paired import NOTHING, holm
from kvtcd.lab.simultaneous import ALPHA
from kvtcd.lab.statistics import Floats


@dataclass(frozen=True, slots=True)
class Left:
    """A scheme that no other surpasses beyond noise; `clear` where none does by means either."""

    scheme: str
    budget: int
    clear: bool


def frontier(table: Table) -> list[Left]:
    """Return what is left of a cell."""
    keys = list(product(table.schemes, table.budgets))
    bits = np.array([table.row(*key).bits for key in keys])
    logs = np.stack([[table.logs(*key, figure) for key in keys] for figure in FIGURES])
    of, by = np.nonzero((bits[:, None] >= bits) & ~np.eye(len(keys), dtype=bool))
    more = logs[:, of] - logs[:, by]  # [figures, pairs, trials]
    same: npt.NDArray[np.bool_] = (more == 0).all(axis=2)
    cheaper = bits[of] > bits[by]
    better = (more.mean(axis=2) >= 0).all(axis=0) & (cheaper | ~same.all(axis=0))
    tested = ~same.all(axis=0)
    sure = better & ~tested
    p = np.where(same[:, tested], 0, _p_above(more[:, tested])).max(axis=0)
    sure[tested] = better[tested] & (np.array(holm(p)) < ALPHA)
    gone, doubtful = set(of[sure]), set(of[better])
    return [Left(*key, clear=n not in doubtful) for n, key in enumerate(keys) if n not in gone]


def _p_above(differences: Floats) -> Floats:
    """Return p-values of means over the last axis above zero; of one trial nothing is to be said."""
    from scipy.stats import t  # noqa: PLC0415 - an extra

    trials = differences.shape[-1]
    if trials < 2:
        return np.ones(differences.shape[:-1])
    means, error = differences.mean(axis=-1), differences.std(axis=-1, ddof=1) / trials**0.5
    found: Floats = t.sf(means / np.maximum(error, NOTHING), trials - 1)
    return found
