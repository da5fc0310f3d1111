"""Intervals of figures over documents, and what one codec's curve says at another's point.

A figure is a function of documents: a mean, a ratio of sums, a ratio of two such. It is given as a function
of *indices*, so that resampling documents keeps everything that was measured on one of them together.

Documents are of files, which are not drawn: all that is said holds of other documents of the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtcd.core.errors import Unavailable

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Figure = Callable[[Indices], Floats]
"""From indices of documents ``[..., n]`` to values ``[...]``."""

LEVEL = 0.95
RESAMPLES = 9_999
_BATCH = 1_000
_SEED = 0
_CLOSE = 1e-12
"""Of the largest deviation of a resample, what is rounding: of few documents many resamples are the same."""
NOTHING = 1e-9
"""Nats: below that, divergences are all the same."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its confidence bounds; both NaN where documents are too few to tell."""

    value: float
    lo: float
    hi: float


def logs(divergences: Sequence[float]) -> Floats:
    """Return logarithms of divergences in nats, of none too."""
    found: Floats = np.log(np.maximum(np.asarray(divergences, np.float64), NOTHING))
    return found


def interval(figure: Figure, groups: Sequence[int], *, positive: bool = False) -> Interval:
    """Return a figure and its 95 % bootstrap interval: BCa, widened to what few documents allow to say.

    Documents are resampled within their group, and bounds are bias-corrected and accelerated (BCa; Efron and
    Tibshirani, An Introduction to the Bootstrap, chapters 8.3 and 14.3). A document that is alone in its
    group is resampled with others that are, or with those of the first group.

    Resamples of n documents vary by (n - 1) / n of what they should, group by group, and know of no
    uncertainty about that variance. So the distance of each bound from the figure is multiplied by the
    root of what is missing (rescaling: Rao and Wu, Resampling Inference with Complex Survey Data, 1988)
    and by the quantile of Student's distribution over the normal one (Hesterberg, What Teachers Should Know
    about the Bootstrap, 2015), with the degrees of freedom of groups that vary each by itself (Satterthwaite
    1946). Both are of the jackknife within groups; of one group of n documents they are
    ``(n / (n - 1)) ** .5`` and ``t / 1.96`` with n - 1 degrees of freedom.

    Of means of 2 files of 6, 4 of 3 and one of 12 it holds the truth in 95 % of cases where documents are
    normally distributed, in 93 to 95 % where their logarithms are, by .5, and in 88 to 89 % where by 1: such
    tails are not to be seen in so few. BCa alone: 86 to 91, 82 to 89 and 76 to 85 %. Of 2 files of 2 it is
    98, 96 and 91 % instead of 66, 64 and 54 %.

    Args:
        figure: of the documents, by index.
        groups: by document, which group it is of.
        positive: that the figure is above zero of whatever documents, a divergence or a ratio: distances are
            then multiplied in logarithms, so bounds are above zero too.

    Raises:
        Unavailable: scipy is not installed.
    """
    strata, everything = strata_of(groups), np.arange(len(groups))
    value = float(figure(everything))
    if any(len(stratum) < 2 for stratum in strata) or not np.isfinite(value):
        return Interval(value, np.nan, np.nan)
    parts = np.array_split(_drawn(strata), max(1, RESAMPLES // _BATCH))
    with np.errstate(divide="ignore", invalid="ignore"):  # a figure that some resamples do not have
        resampled = np.concatenate([figure(part) for part in parts])
        left_out = figure(np.stack([np.delete(everything, one) for one in everything]))
    log_scale = positive and value > 0
    low, high = _bounds(np.array([value]), resampled[:, None], left_out[:, None], strata, in_logs=log_scale)
    return Interval(value, float(low[0]), float(high[0]))


def intervals_of_means(values: Floats, groups: Sequence[int]) -> list[Interval]:
    """Return what `interval` does of the means of columns ``[documents, n]``, all at once.

    Raises:
        Unavailable: scipy is not installed.
    """
    strata, count = strata_of(groups), len(values)
    means = values.mean(axis=0)
    if any(len(stratum) < 2 for stratum in strata):
        return [Interval(float(one), np.nan, np.nan) for one in means]
    places = _drawn(strata) + count * np.arange(RESAMPLES)[:, None]
    times = np.bincount(places.ravel(), minlength=count * RESAMPLES).reshape(RESAMPLES, count)
    low, high = _bounds(means, times @ values / count, (values.sum(axis=0) - values) / (count - 1), strata)
    return [Interval(*map(float, one)) for one in zip(means, low, high, strict=True)]


def _drawn(strata: Sequence[Indices]) -> Indices:
    """Return resamples, as many of each stratum as it has: indices ``[RESAMPLES, documents]``."""
    draw = np.random.default_rng(_SEED)
    return np.concatenate([own[draw.integers(0, len(own), (RESAMPLES, len(own)))] for own in strata], axis=1)


def _bounds(
    values: Floats,
    resampled: Floats,
    left_out: Floats,
    strata: Sequence[Indices],
    *,
    in_logs: bool = False,
) -> tuple[Floats, Floats]:
    """Return lower and upper bounds of figures ``[n]``; see `interval`.

    Args:
        values: the figures.
        resampled: of resamples, ``[RESAMPLES, n]``.
        left_out: of all documents but one, ``[documents, n]``.
        strata: documents of each group.
        in_logs: that distances are of logarithms.
    """
    try:
        from scipy.special import ndtr, ndtri, stdtrit  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise Unavailable(f"intervals need {error.name}; pip install 'kvtcd[lab]'") from error
    own = [left_out[stratum].mean(axis=0) - left_out[stratum] for stratum in strata]
    kept = np.array([(len(one) - 1) / len(one) for one in own])[:, None]
    squares, cubes = (np.array([(one**power).sum(axis=0) for one in own]) for power in (2, 3))
    variances, naive = kept * squares, (kept**2 * squares).sum(axis=0)
    varies = naive > 0
    variance, naive = variances.sum(axis=0), np.where(varies, naive, 1)
    terms = (variances**2 / [[len(one) - 1] for one in own]).sum(axis=0)
    freedom = np.where(varies, variance**2 / np.where(varies, terms, 1), 1)
    tail = (1 + LEVEL) / 2
    wider = np.where(varies, (variance / naive) ** 0.5 * stdtrit(freedom, tail) / ndtri(tail), 1)
    skew = (kept**3 * cubes).sum(axis=0) / (6 * naive**1.5)
    same = _CLOSE * np.abs(resampled - values).max(axis=0)
    below = ((resampled < values - same).mean(axis=0) + (resampled <= values + same).mean(axis=0)) / 2
    bias = ndtri(np.clip(below, 1 / RESAMPLES, 1 - 1 / RESAMPLES))
    bounds = []
    for z in (bias - ndtri(tail), bias + ndtri(tail)):
        shares = ndtr(bias + z / (1 - skew * z))
        found = [np.quantile(one, share) for one, share in zip(resampled.T, shares, strict=True)]
        bounds.append(
            values * (np.maximum(found, 0) / values) ** wider
            if in_logs
            else values + wider * (found - values)
        )
    return bounds[0], bounds[1]


def mean(values: Sequence[float] | Floats) -> Figure:
    """Return the mean of one value per document, as a figure."""
    array = np.asarray(values, np.float64)
    return lambda documents: array[documents].mean(axis=-1)


def at_kl(kl: Floats, ratio: Floats, target: Floats) -> Floats:
    """Return the ratio of a curve at a divergence: log ratio is linear in log divergence between its points.

    Where noise makes a curve cross the target several times, its smallest ratio there counts. Beyond its
    ends the last two points go on as a straight line; `brackets` tells whether they had to.

    Args:
        kl: ``[..., points]``, nats per token, above zero.
        ratio: ``[..., points]``, ascending.
        target: ``[...]``.
    """
    with np.errstate(divide="ignore"):  # no divergence at all is on no curve: NaN comes of it
        x, y, t = np.log(kl), np.log(ratio), np.log(target)[..., None]
    reached = x[..., 1:] >= t
    last = x.shape[-1] - 2
    segment = np.where(reached.any(axis=-1), reached.argmax(axis=-1), last)[..., None]
    x0, x1 = (np.take_along_axis(x, segment + side, axis=-1) for side in (0, 1))
    y0, y1 = (np.take_along_axis(y, segment + side, axis=-1) for side in (0, 1))
    with np.errstate(invalid="ignore"):
        rise = x1 - x0
        share = np.where(rise > 0, (t - x0) / np.where(rise > 0, rise, 1), 0)
        exponents: Floats = (y0 + share * (y1 - y0))[..., 0]
    return np.exp(exponents)


def brackets(kl: Floats, target: float) -> bool:
    """Tell whether a curve ``[points]`` of ascending ratio has points on both sides of a divergence."""
    return len(kl) > 1 and kl[0] <= target <= kl.max()


def strata_of(groups: Sequence[int]) -> list[Indices]:
    """Return the documents of each group, those that are alone in theirs together; see `interval`."""
    names = np.asarray(groups)
    strata = [np.flatnonzero(names == name) for name in dict.fromkeys(groups)]
    several = [stratum for stratum in strata if len(stratum) > 1]
    alone = [stratum for stratum in strata if len(stratum) == 1]
    if len(alone) == 1 and several:
        several[0] = np.concatenate((several[0], *alone))
    elif alone:
        several.append(np.concatenate(alone))
    return several
