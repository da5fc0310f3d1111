"""Principal components of a stream, fitted while the rows go by.

The paper takes a randomized SVD (Halko, Martinsson, Tropp 2011) of the centred rows ``X [n, p]`` with eight
power iterations. Here the rows are never kept: `Moments` gathers mean and covariance, and `principal` does
the same subspace iteration on the covariance, since ``(X^T X)^q`` applied to a random block spans what the
power iterations on ``X`` span, and its Rayleigh-Ritz values are the squared singular values. Memory is ``4
p^2`` bytes whatever ``n`` is (132 MB for p = 5,760; 6.7 GB for p = 40,960, which a GPU or a host holds), and
passes over the rows are one.

Keys of some models carry up to 99 % of their energy in a constant offset. Rows are therefore shifted by the
mean of the first batch before they are multiplied, which keeps float32 sums free of cancellation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Moments:
    """Count, sum and second moment of rows, relative to `shift`.

    Four plain tensors on one device, so a checkpoint is those tensors.

    Attributes:
        count: sum of the weights of rows, float64 scalar: their number where none has any.
        shift: ``[p]`` float32.
        total: weighted sum of ``x - shift``, ``[p]`` float64.
        outer: weighted sum of ``(x - shift)(x - shift)^T``, ``[p, p]`` float32.
    """

    count: Tensor
    shift: Tensor
    total: Tensor
    outer: Tensor

    @classmethod
    def from_rows(cls, rows: Tensor, weights: Tensor | None = None) -> Moments:
        """Start from a first batch, float32 ``[n, p]`` with n >= 1; see `add`."""
        features = rows.shape[1]
        moments = cls(
            count=torch.zeros((), dtype=torch.float64, device=rows.device),
            shift=rows.mean(dim=0),
            total=torch.zeros(features, dtype=torch.float64, device=rows.device),
            outer=torch.zeros((features, features), device=rows.device),
        )
        moments.add(rows, weights)
        return moments

    def add(self, rows: Tensor, weights: Tensor | None = None) -> None:
        """Take in a batch, float32 ``[n, p]``, and how often each row counts, ``[n]``: once without."""
        centred = rows - self.shift
        if weights is None:
            weighted = centred
            self.count += len(rows)
        else:
            weighted = centred * weights[:, None]
            self.count += weights.sum(dtype=torch.float64)
        self.total += weighted.sum(dim=0, dtype=torch.float64)
        self.outer.addmm_(weighted.t(), centred)

    def merge(self, other: Moments) -> None:
        """Take in what another instance has seen, in another process perhaps."""
        offset = (other.shift - self.shift).to(torch.float64)
        n = float(other.count)
        cross = torch.outer(other.total, offset)
        self.outer += other.outer
        self.outer += (cross + cross.t() + n * torch.outer(offset, offset)).to(torch.float32)
        self.total += other.total + n * offset
        self.count += other.count

    def weighted(self, weigh: Callable[[Tensor], Tensor]) -> Moments:
        """Return the moments of rows mapped by a symmetric linear map of rows ``[n, p]``."""
        return Moments(
            count=self.count,
            shift=weigh(self.shift[None])[0],
            total=weigh(self.total[None].to(torch.float32))[0].to(torch.float64),
            outer=weigh(weigh(self.outer).t().contiguous()),
        )

    @property
    def mean(self) -> Tensor:
        """``[p]`` float32."""
        return (self.shift + self.total / self.count).to(torch.float32)

    def covariance(self) -> Tensor:
        """Second moment about the mean, ``[p, p]`` float32, divided by the count."""
        offset = (self.total / self.count).to(torch.float32)
        return (self.outer / self.count).addr_(offset, offset, alpha=-1)


def principal(
    moments: Moments, rank: int, *, iterations: int = 8, oversample: int = 32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the leading principal components and their variances.

    Args:
        moments: of the stream's rows.
        rank: components wanted, ``r``; at most p.
        iterations: power iterations; the paper's number.
        oversample: further columns of the random block, dropped at the end. With rank + oversample >= p the
            block spans everything and the result is that of an exact eigendecomposition.
        seed: of the random block.

    Returns:
        Basis ``[r, p]`` float32 with orthonormal rows, the largest entry of each positive; and spectrum
        ``[r]`` float32, variances per component, descending.
    """
    covariance = moments.covariance()
    features = len(covariance)
    width = min(features, rank + oversample)
    if width < features:
        block = torch.randn((features, width), generator=torch.Generator().manual_seed(seed))
        block = torch.linalg.qr(covariance @ block.to(covariance.device)).Q
        for _ in range(iterations):
            block = torch.linalg.qr(covariance @ block).Q
        reduced = block.t() @ (covariance @ block)
        variances, vectors = torch.linalg.eigh((reduced + reduced.t()) / 2)
        vectors = block @ vectors
    else:
        variances, vectors = torch.linalg.eigh(covariance)
    basis = vectors.flip(1)[:, :rank].t()
    peak = basis.gather(1, basis.abs().argmax(dim=1, keepdim=True))
    return (basis * peak.sign()).contiguous(), variances.flip(0)[:rank].clamp_min(0.0)
