"""Tests of many differences at once: what is picked among them because it looks best may be picked.

Each test asks whether a mean over documents is above zero, one-sided. Were it not, a document's differences
would be as likely to have the other sign, all of them together; turning signs therefore gives the
distribution of the largest t of all, and the share of turns in which that is as large as the t found is a
p-value that holds for the whole family: whichever of its members is picked afterwards, by whatever it
shows, was one of those compared. That what all documents share moves differences together is in it.

This is the step-down procedure of Westfall and Young (Resampling-Based Multiple Testing, 1993, algorithm
2.8) and of Romano and Wolf (2005), with signs for resamples. t is the mean over its error within files,
so what only differs between files is no error. No p is below one in two to
the power of documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtcd.lab.statistics import Floats, strata_of

ALPHA = 0.05
_EXACT = 12
"""Documents up to which all turns are looked at; of more, as many turns are drawn."""
_CLOSE = 1e-9
"""Relative difference of two t that are the same, but for rounding."""


def reachable(documents: int) -> float:
    """Return the smallest p-value that `above` can give."""
    return 2.0 ** -min(documents, _EXACT)


def above(differences: Floats, groups: Sequence[int]) -> Floats:
    """Return, for columns ``[documents, tests]``, p-values of means above zero that hold for all together.

    Args:
        differences: of logarithms, each row of one document.
        groups: by document, which file it is of.
    """
    turns = _turns(len(groups))
    t = _t(np.ones((1, len(groups))), differences, groups)[0]
    order = np.argsort(t)
    largest = np.maximum.accumulate(_t(turns, differences[:, order], groups), axis=1)
    shares = (largest >= t[order] - _CLOSE * np.abs(t[order])).mean(axis=0)
    found = np.empty(len(t))
    found[order] = np.maximum.accumulate(shares[::-1])[::-1]
    return found


def _turns(documents: int) -> Floats:
    """Return signs ``[turns, documents]``, the first row all plus."""
    count = 1 << min(documents, _EXACT)
    if documents <= _EXACT:
        bits = np.arange(count)[:, None] >> np.arange(documents) & 1
    else:
        bits = np.random.default_rng(0).integers(0, 2, (count, documents))
        bits[0] = 0
    return np.where(bits == 1, -1.0, 1.0)


def _t(turns: Floats, differences: Floats, groups: Sequence[int]) -> Floats:
    """Return means over their errors ``[turns, tests]``, documents varying within files."""
    total, square = np.zeros((2, len(turns), differences.shape[1]))
    for own in strata_of(groups):
        count = len(own)
        sums = turns[:, own] @ differences[own]
        total += sums
        rest = np.square(differences[own]).sum(axis=0) - sums**2 / count  # signs do not change squares
        square += count / (count - 1) * np.maximum(rest, 0)
    # What is the same on all documents has no error, and what is nothing on all of them no t.
    floor = (_CLOSE * np.abs(differences).sum(axis=0)) ** 2 + np.finfo(np.float64).tiny
    found: Floats = total / np.sqrt(np.maximum(square, floor))
    return found
