"""Checks of the bases of single heads, which `sq` cuts out of a profile: medians over heads.

They need a few times as many rows as a head has dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtcd.codec.profile import StreamProfile
from kvtcd.codec.rivals.sq import spectra
from kvtcd.lab.dimension import dimension
from kvtcd.lab.validation.check import TINY, Check, median

_ROWS_OF_HEADS = 4.0
_LIMITED = 0.8
_CAPTURED = 0.9
GAIN_DB = 1.0
"""Less is not worth a basis."""


def of_tokens(features: int, dim: int, tokens: int) -> Check:
    """Look at rows of calibration against dimensions of a head."""
    share = tokens / dim
    return Check(
        "rows of a head",
        "heads",
        "budget",
        share,
        _ROWS_OF_HEADS,
        share >= _ROWS_OF_HEADS,
        f"calibrated on {tokens:,} tokens, {share:.3g} for each dimension of a head, and "
        f"{tokens / features:.2g} for each of {features:,} features of all layers",
    )


def of_heads(profile: StreamProfile, centred: Tensor) -> list[Check]:
    """Look at the basis of each head that varies, on rows ``[n, L, H, D]`` about the mean of calibration."""
    _, layers, heads, _ = centred.shape
    bases, spectrum = spectra(profile, layers, heads)
    x = centred.movedim(0, 2)  # [L, H, n, D]
    varies = x.square().sum(dim=(2, 3)) > TINY  # a head that is constant has no components
    if not varies.any():
        return []
    x, bases, spectrum = x[varies], bases[varies], spectrum[varies]
    naive = float((spectrum.sum(dim=-1) ** 2 / spectrum.square().sum(dim=-1).clamp_min(TINY)).median())
    corrected = median([dimension(own).corrected for own in x])
    variances = (x @ bases.mT).square().mean(dim=1)
    best = torch.linalg.eigvalsh((x.mT @ x / x.shape[1]).to(torch.float64)).flip(-1).clamp_min(0)
    first = max(1, round(naive))
    shares = variances[:, :first].sum(dim=-1) / best[:, :first].sum(dim=-1).clamp_min(TINY)
    captured = float(shares.median())
    means = variances.mean(dim=-1).clamp_min(TINY).log10()
    gain = float(10 * (means - variances.clamp_min(TINY).log10().mean(dim=-1)).median())
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
            GAIN_DB,
            gain >= GAIN_DB,
            f"bits by variance within a head gain {gain:.1f} dB over equal bits",
        ),
    ]
