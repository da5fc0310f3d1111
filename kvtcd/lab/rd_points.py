"""Rate-quality points of codecs and what one gains over another, out of what was measured on documents.

Everything is paired: all codecs saw the same documents, and a resample draws the same ones for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np

from kvtcd.codec.ports import Reason
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.evaluate import Measured, Quality, reasons_of
from kvtcd.lab.statistics import Figure, Floats, Indices, at_kl, brackets, interval, mean


@dataclass(frozen=True, slots=True)
class Point:
    """A codec at one stand of its dial; the keys of `--json`.

    Attributes:
        codec, dial: as on the command line.
        bits_per_token: stored for a coded token, all layers and heads.
        ratio: of 16 bits per value to that.
        ratio_all: the same over every token of the contexts.
        kl, dnll, top1: means over documents, see `evaluate.Quality`.
        kl_lo, kl_hi: bounds of the 95 % interval.
        err_k, err_v: squared error of coded tokens relative to their energy about the mean; of documents, the
            mean.
        finer: blocks of all documents that were stored finer than asked, to keep a bound.
        refused: blocks that were stored losslessly instead.
        reasons: how many of these for which reason, by `codec.ports.Reason`.
        kl_of_documents: one after the other.
    """

    codec: str
    dial: float | None
    bits_per_token: float
    ratio: float
    ratio_all: float
    kl: float
    kl_lo: float
    kl_hi: float
    dnll: float
    top1: float
    err_k: float
    err_v: float
    finer: int
    refused: int
    kl_of_documents: tuple[float, ...]
    reasons: Mapping[Reason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Means:
    """Of `evaluate.Quality` over documents, with the bounds of the 95 % interval of the divergence."""

    kl: float
    kl_lo: float
    kl_hi: float
    dnll: float
    top1: float

    @classmethod
    def of(cls, documents: Sequence[Quality], groups: Sequence[int]) -> Means:
        """Return the means; `groups` says of each document which file it is of."""
        kl = interval(mean([one.kl for one in documents]), groups, positive=True)
        dnll, top1 = (float(np.mean([getattr(one, name) for one in documents])) for name in ("dnll", "top1"))
        return cls(kl.value, kl.lo, kl.hi, dnll, top1)


@dataclass(frozen=True, slots=True)
class EqualKl:
    """How many times the ratio of `over` the codec `of` has at the same divergence.

    Either `over` is a point and `of` a codec with several, between which its ratio at `at_kl` is
    interpolated, or the other way round. The gain is NaN where that curve does not reach around `at_kl`;
    it is then above `more_than` or below `less_than`, which its end next to it has; NaN for the other.
    """

    of: str
    over: str
    at_kl: float
    ratio_gain: float
    lo: float
    hi: float
    more_than: float = math.nan
    less_than: float = math.nan


Results = Mapping[Spec, Sequence[Measured]]
"""By codec, what was measured on each document, in the same order for all."""


def points(results: Results, groups: Sequence[int], token_bits: int) -> list[Point]:
    """Sum up what was measured.

    Args:
        results: of every codec.
        groups: by document, which file it is of.
        token_bits: of a token at 16 bits per value.
    """
    found = []
    for spec, documents in results.items():
        size = reduce(add, (one.size for one in documents))
        means = Means.of([one.quality for one in documents], groups)
        found.append(
            Point(
                codec=spec.codec,
                dial=spec.dial,
                bits_per_token=token_bits / size.ratio,
                ratio=size.ratio,
                ratio_all=size.ratio_all,
                kl=means.kl,
                kl_lo=means.kl_lo,
                kl_hi=means.kl_hi,
                dnll=means.dnll,
                top1=means.top1,
                err_k=float(np.mean([one.error.get("k", np.nan) for one in documents])),
                err_v=float(np.mean([one.error.get("v", np.nan) for one in documents])),
                finer=sum(one.finer for one in documents),
                refused=sum(one.refused for one in documents),
                reasons=reasons_of(documents),
                kl_of_documents=tuple(one.quality.kl for one in documents),
            )
        )
    return found


def equal_kl(results: Results, groups: Sequence[int]) -> list[EqualKl]:
    """Hold every codec against the one that was named first, wherever one of the two has a curve."""
    names = dict.fromkeys(spec.codec for spec in results)
    made = [_Curve.of({spec: found for spec, found in results.items() if spec.codec == n}) for n in names]
    curves = [curve for curve in made if curve]
    return [gain for other in curves[1:] for gain in _gains(other, curves[0], groups)]


@dataclass(frozen=True, slots=True)
class _Curve:
    """The points of one codec, by ascending ratio.

    Attributes:
        specs: of the points.
        kl: ``[documents, points]``.
        raw: bits of the coded tokens, ``[documents]``.
        stored: bits stored for them, ``[documents, points]``.
    """

    specs: tuple[Spec, ...]
    kl: Floats
    raw: Floats
    stored: Floats

    @classmethod
    def of(cls, results: Results) -> _Curve | None:
        """Make the curve of one codec; None for one that loses nothing, or has no tokens to code."""
        rows = list(results.values())
        kl = np.array([[one.quality.kl for one in row] for row in rows]).T
        stored = np.array([[one.size.coded for one in row] for row in rows]).T
        raw = np.array([one.size.coded_raw for one in rows[0]])
        if not (kl.mean(axis=0) > 0).all() or not raw.any():
            return None
        order = np.argsort(-stored.sum(axis=0))
        specs = list(results)
        return cls(tuple(specs[n] for n in order), kl[:, order], raw, stored[:, order])

    @property
    def name(self) -> str:
        """Of the codec; with its dial, if there is but one point."""
        return str(self.specs[0]) if len(self.specs) == 1 else self.specs[0].codec

    def at(self, documents: Indices) -> tuple[Floats, Floats]:
        """Divergence and ratio of each point over documents ``[..., n]``, both ``[..., points]``."""
        raw = self.raw[documents].sum(axis=-1)[..., None]
        return self.kl[documents].mean(axis=-2), raw / self.stored[documents].sum(axis=-2)


def _gains(of: _Curve, over: _Curve, groups: Sequence[int]) -> list[EqualKl]:
    everything = np.arange(len(groups))
    (of_kl, of_ratio), (over_kl, over_ratio) = of.at(everything), over.at(everything)

    def equal(name: str, target: Floats, curve: Floats, gain: Figure, ends: tuple[float, float]) -> EqualKl:
        """Measure a gain, or bound it where the curve does not reach around the divergence it is wanted at.

        `ends` are the gains that the curve's ends would have, if they had that divergence.
        """
        if brackets(curve, float(target)):
            found = interval(gain, groups, positive=True)
            return EqualKl(of.name, name, float(target), found.value, found.lo, found.hi)
        below = bool(target < curve[0])
        # A curve of `of` goes on to less than its first ratio and more than its last; one of `over` divides.
        bound = {"more_than" if below is (curve is over_kl) else "less_than": ends[0 if below else 1]}
        return EqualKl(of.name, name, float(target), math.nan, math.nan, math.nan, **bound)

    if len(of.specs) > 1:
        return [
            equal(
                str(spec), over_kl[n], of_kl, _over_point(of, over, n),
                (of_ratio[0] / over_ratio[n], of_ratio[-1] / over_ratio[n]),
            )
            for n, spec in enumerate(over.specs)
        ]  # fmt: skip
    if len(over.specs) > 1:
        ends = (of_ratio[0] / over_ratio[0], of_ratio[0] / over_ratio[-1])
        return [equal(over.name, of_kl[0], over_kl, _over_curve(of, over), ends)]
    return []


def _over_point(of: _Curve, over: _Curve, point: int) -> Figure:
    def gain(documents: Indices) -> Floats:
        kl, ratio = of.at(documents)
        yard_kl, yard_ratio = over.at(documents)
        return at_kl(kl, ratio, yard_kl[..., point]) / yard_ratio[..., point]

    return gain


def _over_curve(of: _Curve, over: _Curve) -> Figure:
    def gain(documents: Indices) -> Floats:
        kl, ratio = of.at(documents)
        gained: Floats = ratio[..., 0] / at_kl(*over.at(documents), kl[..., 0])
        return gained

    return gain
