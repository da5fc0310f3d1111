"""Intervals of figures over documents, and what one codec's curve says at another's point.

A figure is a function of documents: a mean, a ratio of sums, a ratio of two such. It is given as a function
of *indices*, so that resampling documents keeps everything that was measured on one of them together.
"""

from __future__ import annotations

import warnings
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
_NOTHING = 1e-9
"""Nats: below that, divergences are all the same."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its confidence bounds; both NaN where documents are too few to tell."""

    value: float
    lo: float
    hi: float


def logs(divergences: Sequence[float]) -> Floats:
    """Return logarithms of divergences in nats, of none too."""
    found: Floats = np.log(np.maximum(np.asarray(divergences, np.float64), _NOTHING))
    return found


def interval(figure: Figure, groups: Sequence[int]) -> Interval:
    """Return a figure and its 95 % bootstrap interval, bias-corrected and accelerated (BCa).

    Documents are resampled within their group (Efron and Tibshirani, An Introduction to the Bootstrap,
    chapters 8.3 and 14.3). A document that is alone in its group is resampled with others that are, or with
    those of the first group.

    Args:
        figure: of the documents, by index.
        groups: by document, which group it is of.

    Raises:
        Unavailable: scipy is not installed.
    """
    try:
        from scipy.stats import bootstrap  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise Unavailable(f"intervals need {error.name}; pip install 'kvtcd[lab]'") from error
    value = float(figure(np.arange(len(groups))))
    strata = _strata(groups)
    if any(len(stratum) < 2 for stratum in strata) or not np.isfinite(value):
        return Interval(value, np.nan, np.nan)

    def resampled(*drawn: npt.NDArray[np.number], axis: int) -> Floats:
        return figure(np.concatenate(drawn, axis=axis).astype(np.intp))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of figures that do not vary: handled below
        found = bootstrap(
            strata, resampled, n_resamples=RESAMPLES, batch=_BATCH, confidence_level=LEVEL, method="BCa",
            vectorized=True, axis=-1, rng=np.random.default_rng(_SEED),
        )  # fmt: skip
    bounds = found.confidence_interval
    if np.isfinite([bounds.low, bounds.high]).all():
        return Interval(value, float(bounds.low), float(bounds.high))
    # All resamples on one side of the value, or all the same: BCa is not defined, percentiles are.
    low, high = np.quantile(found.bootstrap_distribution, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high))


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


def _strata(groups: Sequence[int]) -> list[Indices]:
    names = np.asarray(groups)
    strata = [np.flatnonzero(names == name) for name in dict.fromkeys(groups)]
    several = [stratum for stratum in strata if len(stratum) > 1]
    alone = [stratum for stratum in strata if len(stratum) == 1]
    if len(alone) == 1 and several:
        several[0] = np.concatenate((several[0], *alone))
    elif alone:
        several.append(np.concatenate(alone))
    return several
