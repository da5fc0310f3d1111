"""How features of a head spread on the texts of calibration, and whether those of a block still do.

The guard sums errors of all layers and heads, so one broken layer of thirty hardly shows in it, and finer
steps do not help a model whose layer is noise. What shows it is the energy of features about the mean, each
over its variance: a mean over a head and tokens is between 0.18 and 2.7 on texts of every kind, foreign ones
and random tokens included, and far from that where features are scaled, mixed up, noise or nothing.

Variances follow from a weighted basis within its components. What it leaves out varies less, in the weighted
space, than the last of them. So there are two bounds, and each is used where it cannot raise a false alarm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtcd.codec.weighted import Weighted, by_head

SAMPLE = 32
"""Tokens that are looked at, spread over a run. Runs of fewer say too little."""
MOST, LEAST = 5.0, 0.1
"""Energy over what is usual beyond which a head is broken; `codec/README.md` has the figures."""
_TO_VARIANCE = torch.pi / 2
"""The variance of a normal variable over the square of its mean magnitude."""
_FLOOR = 0.02
"""Of the mean variance of its head, what each feature has at least: rounding alone moves it."""


@dataclass(frozen=True, eq=False)
class Usual:
    """Bounds on the variance of each feature of a stream, `least` and `most`, float32 ``[L*H, D]``."""

    least: Tensor
    most: Tensor

    @classmethod
    def of(cls, weighted: Weighted, device: torch.device) -> Usual:
        """Take the bounds from a weighted basis."""
        inverse = torch.linalg.inv(weighted.root)
        by_feature = by_head(weighted.basis.to(torch.float32), inverse).square_()
        variances = _TO_VARIANCE * weighted.spread.square()
        head_dim = weighted.root.shape[-1]
        least = (variances @ by_feature).view(-1, head_dim)
        whole = inverse.square().sum(dim=-1).view(-1, head_dim)
        left_out = (whole - by_feature.sum(dim=0).view(-1, head_dim)).clamp_min(0.0)
        last = variances[-1] if len(variances) else torch.zeros(())
        least, most = (
            bound + _FLOOR * bound.mean(dim=-1, keepdim=True) for bound in (least, least + last * left_out)
        )
        return cls(least.to(device), most.to(device))

    def holds(self, centred: Tensor) -> Tensor:
        """Tell whether every head of rows ``[T, p]``, features about their mean, is as spread as usual.

        Returns:
            A bool without dimensions, on the device of the rows.
        """
        tokens = len(centred)
        if tokens < SAMPLE:
            return torch.ones((), dtype=torch.bool, device=centred.device)
        energy = centred[:: tokens // SAMPLE].to(torch.float32).square().mean(dim=0).view(self.least.shape)
        high = (energy / self.most).mean(dim=-1).max()
        low = (energy / self.least).mean(dim=-1).min()
        return (high <= MOST) & (low >= LEAST)
