"""The checks of `kvtcd validate`: a profile's bases held against rows they were not fitted to."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtcd.codec.profile import StreamProfile
from kvtcd.lab.validation.check import STILL, Check, Seen
from kvtcd.lab.validation.codec import of_codec
from kvtcd.lab.validation.heads import of_heads, of_tokens
from kvtcd.lab.validation.layers import of_energy, of_gain, of_gap, of_halves
from kvtcd.lab.validation.rows import evenly
from kvtcd.lab.validation.tails import of_coordinates, of_largest


def of_profile(profile: StreamProfile, layers: int, heads: int, tokens: int) -> list[Check]:
    """Return what a profile alone tells: rows against dimensions of a head, and its spectrum."""
    features = len(profile.mean)
    return [of_tokens(features, features // (layers * heads), tokens), of_gap(profile, tokens)]


def of_rows(profile: StreamProfile, rows: Tensor) -> Seen:
    """Hold a stream's bases against rows ``[n, L, H, D]``, float32, RoPE undone, without sinks.

    Whatever n is, `rows.ROWS` of them are looked at, which it must be at least.
    """
    rows = evenly(rows)
    centred = rows.flatten(1) - profile.mean
    coefficients = centred @ profile.basis.float().t()
    # What is left of a constant when its mean is taken away is rounding.
    rounding = STILL * float(rows.square().sum(dim=(1, 2, 3)).mean())
    energy, total = (
        own if own > rounding else 0.0 for own in (float(centred.square().sum(dim=1).mean()), profile.total)
    )
    variances = coefficients.square().mean(dim=0)
    missed = _missed(profile.spectrum, total), _missed(variances, energy)
    coordinates, kurtosis = of_coordinates(rows.flatten(1))
    checks = [
        *of_energy(profile, total, energy, missed),
        of_gain(variances, energy, centred.shape[1]),
        *coordinates,
    ]
    if energy:
        checks += [
            *of_heads(profile, centred.view(rows.shape)),
            *of_halves(profile, centred, coefficients),
            of_codec(profile, rows),
            of_largest(centred),
        ]
    return Seen(tuple(checks), missed, kurtosis)


def _missed(variances: Tensor, total: float) -> Tensor:
    """Return which share of the energy is not in the first components; of no energy, none."""
    return 1 - variances.cumsum(dim=0) / total if total else torch.zeros_like(variances)
