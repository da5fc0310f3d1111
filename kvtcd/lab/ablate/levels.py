"""Lloyd-Max levels of a sample: what a codec fits that does not trust a law."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtcd.codec.rivals.codebook import Codebook

_POINTS = 8192
_ITERATIONS = 60
_CLOSE = 1e-4


def fitted(sample: Tensor, bits: int) -> Codebook:
    """Return the levels that lose least of a sample of any shape, or of some thousands of it."""
    count = 2**bits
    flat = sample.flatten()
    points = flat[:: max(1, len(flat) // _POINTS)].to(torch.float64).sort().values
    sums = torch.cat((torch.zeros(1, dtype=torch.float64), points.cumsum(dim=0)))
    # Cells of equal cube root of the density would be the better start; quantiles get there too.
    levels = points[((torch.arange(count, dtype=torch.float64) + 0.5) / count * len(points)).long()]
    inside = torch.ones(count)
    for _ in range(_ITERATIONS):
        edges = (levels[1:] + levels[:-1]) / 2
        ends = torch.cat(
            (torch.zeros(1).long(), torch.searchsorted(points, edges), torch.tensor([len(points)]))
        )
        inside = ends.diff()
        means = (sums[ends[1:]] - sums[ends[:-1]]) / inside.clamp_min(1)
        before, levels = levels, torch.where(inside > 0, means, levels)
        if float((levels - before).abs().max()) < _CLOSE:
            break
    distortion = 1 - float((levels.square() * inside).sum() / points.square().sum())
    return Codebook(levels.float(), ((levels[1:] + levels[:-1]) / 2).float(), distortion)
