"""The checks of `kvtcd validate`: a profile's bases held against rows they were not fitted to.

There are two kinds of bases. Those of single heads, which `sq` cuts out of a profile, need a few times as
many rows as a head has dimensions. That of all layers, of `kvtc` and `kvtc2`, has fewer rows than features in
every published run and works all the same, so what counts is the energy it misses: calibrated on 504, 1,016,
2,040, 4,080, 12,240, 28,560 and 57,120 tokens, SmolLM2's first 256 components of keys miss 14, 6, 4, 1.8,
1.4, 1.3 and 1.3 times what calibration promised, and `kvtcd eval budget` shows what that costs.

Tails are those of each coordinate, about its mean. All coordinates pooled have a kurtosis of 5 to 120 on
every real model, since their variances differ, which says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvtcd.codec.profile import StreamProfile
from kvtcd.codec.rivals.sq import spectra
from kvtcd.codec.watch import first_components
from kvtcd.core.drift import ENERGY, KURTOSIS, MISSED
from kvtcd.lab.dimension import dimension

Kind = Literal["budget", "tails", "gain", "drift"]
"""What is wrong where a check fails: too few tokens, tails, nothing to gain, or other texts."""
_ROWS_OF_HEADS = 4.0
_LIMITED = 0.8
_CAPTURED = 0.9
Basis = Literal["layers", "heads", "both"]
_HILL = 3.0
_TAIL = 0.01
"""Share of the rows that Hill's index is of."""
_GAIN_DB = 1.0
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Check:
    """One figure of a stream, and whether it is as it should be.

    Attributes:
        name: what it is.
        basis: that of all layers, those of heads, or both.
        kind: what is wrong if not.
        value, bound: the figure, and what it must not pass.
        holds: whether it does not.
        meaning: for people.
    """

    name: str
    basis: Basis
    kind: Kind
    value: float
    bound: float
    holds: bool
    meaning: str


@dataclass(frozen=True, eq=False)
class Seen:
    """What held-out rows show of one stream, to be drawn.

    Attributes:
        checks: in their order.
        missed: shares of energy that are not in the first components, calibrated and held out, ``[r]``.
        kurtosis: of each coordinate.
    """

    checks: tuple[Check, ...]
    missed: tuple[Tensor, Tensor]
    kurtosis: Tensor


def of_profile(profile: StreamProfile, layers: int, heads: int, tokens: int) -> list[Check]:
    """Return what a profile alone tells: rows against dimensions of a head."""
    dim = len(profile.mean) // (layers * heads)
    share = tokens / dim
    return [
        Check(
            "rows of a head",
            "heads",
            "budget",
            share,
            _ROWS_OF_HEADS,
            share >= _ROWS_OF_HEADS,
            f"calibrated on {tokens:,} tokens, {share:.3g} for each dimension of a head, and "
            f"{tokens / len(profile.mean):.2g} for each of {len(profile.mean):,} features of all layers",
        )
    ]


def of_rows(profile: StreamProfile, rows: Tensor) -> Seen:
    """Hold a stream's bases against rows ``[n, L, H, D]``, float32, RoPE undone, without sinks."""
    _, layers, heads, _ = rows.shape
    flat = rows.flatten(1) - profile.mean
    coefficients = flat @ profile.basis.to(torch.float32).t()
    energy = float(flat.square().sum(dim=1).mean())
    variances = coefficients.square().mean(dim=0)
    missed = (
        1 - profile.spectrum.cumsum(dim=0) / profile.total,
        1 - variances.cumsum(dim=0) / energy,
    )
    own, kurtosis = _tails(flat - flat.mean(dim=0))
    checks = [
        *_heads(profile, flat.view(rows.shape), layers, heads),
        _energy(profile, missed),
        _gain(variances, energy, flat.shape[1]),
        *own,
        _drift(energy / profile.total),
    ]
    return Seen(tuple(checks), missed, kurtosis)


def _heads(profile: StreamProfile, centred: Tensor, layers: int, heads: int) -> list[Check]:
    """Look at the basis of each head; medians over heads."""
    bases, spectrum = spectra(profile, layers, heads)
    x = centred.movedim(0, 2)  # [L, H, n, D]
    naive = float((spectrum.sum(dim=-1) ** 2 / spectrum.square().sum(dim=-1)).median())
    corrected = _median([dimension(own).corrected for own in x.flatten(0, 1)])
    variances = (x @ bases.mT).square().mean(dim=2)
    best = torch.linalg.eigvalsh((x.mT @ x / x.shape[2]).to(torch.float64)).flip(-1)
    first = max(1, round(naive))
    captured = float((variances[..., :first].sum(dim=-1) / best[..., :first].sum(dim=-1)).median())
    gain = float(
        10 * (variances.mean(dim=-1).log10() - variances.clamp_min(_TINY).log10().mean(dim=-1)).median()
    )
    return [
        Check(
            "dimensions of a head",
            "heads",
            "budget",
            naive,
            _LIMITED * corrected,
            naive >= _LIMITED * corrected,
            f"{naive:.1f} dimensions by the profile, {corrected:.1f} by held-out rows, bias corrected",
        ),
        Check(
            "energy of a head",
            "heads",
            "budget",
            captured,
            _CAPTURED,
            captured >= _CAPTURED,
            f"the first {first} components of a head hold {captured:.0%} of what its best {first} would hold",
        ),
        Check(
            "gain of a head",
            "heads",
            "gain",
            gain,
            _GAIN_DB,
            gain >= _GAIN_DB,
            f"bits by variance within a head gain {gain:.1f} dB over equal bits",
        ),
    ]


def _energy(profile: StreamProfile, missed: tuple[Tensor, Tensor]) -> Check:
    """Compare what is missed where calibration has nine tenths of the energy."""
    promised, found = missed
    rank = first_components(profile.spectrum, profile.total) - 1
    times = float(found[rank] / promised[rank].clamp_min(_TINY))
    return Check(
        "energy of all layers",
        "layers",
        "budget",
        times,
        MISSED,
        times <= MISSED,
        f"the first {rank + 1} components of all layers miss {float(found[rank]):.1%} of held-out energy, "
        f"{times:.2f} times what calibration promised",
    )


def _gain(variances: Tensor, energy: float, features: int) -> Check:
    """Compare means of the variances of all components; what was trimmed is taken to be even."""
    rest = max(energy - float(variances.sum()), 0.0)
    trimmed = features - len(variances)
    logs = float(variances.clamp_min(_TINY).log10().sum())
    if trimmed:
        logs += trimmed * math.log10(max(rest / trimmed, _TINY))
    gain = 10 * (math.log10(max(energy, _TINY) / features) - logs / features)
    return Check(
        "gain of all layers",
        "layers",
        "gain",
        gain,
        _GAIN_DB,
        gain >= _GAIN_DB,
        f"bits by variance over all layers gain {gain:.1f} dB over equal bits",
    )


def _tails(x: Tensor) -> tuple[list[Check], Tensor]:
    """Look at each coordinate ``[n, p]``, about its mean."""
    variance = x.square().mean(dim=0).clamp_min(_TINY)
    kurtosis = (x**4).mean(dim=0) / variance**2
    count = max(2, int(_TAIL * len(x)))
    largest = x.abs().topk(count + 1, dim=0).values.clamp_min(_TINY)
    hill = float((1 / (largest[:-1] / largest[-1]).log().mean(dim=0).clamp_min(_TINY)).median())
    share = float(x.square().sum(dim=1).max() / x.square().sum()) * len(x)
    typical, wide = float(kurtosis.median()), float((kurtosis > KURTOSIS).float().mean())
    return [
        Check(
            "kurtosis",
            "both",
            "tails",
            typical,
            KURTOSIS,
            typical <= KURTOSIS,
            f"kurtosis of a coordinate {typical:.1f} (normal: 3; above {KURTOSIS:g} in {wide:.1%} of them); "
            f"the largest token has {share:.1f} times the mean energy",
        ),
        Check(
            "Hill index",
            "both",
            "tails",
            hill,
            _HILL,
            hill >= _HILL,
            f"the largest {count} values of a coordinate fall off with exponent {hill:.1f}",
        ),
    ], kurtosis


def _drift(times: float) -> Check:
    return Check(
        "drift",
        "both",
        "drift",
        times,
        ENERGY,
        1 / ENERGY <= times <= ENERGY,
        f"held-out rows have {times:.2f} times the energy of calibration about its mean",
    )


def _median(values: Sequence[float]) -> float:
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[len(finite) // 2] if finite else math.inf
