"""Signs of random projections, from which inner products can be told: QJL (Zandieh et al., arXiv 2406.03482).

Of a vector k are stored ``sign(S k)`` and its norm. For normal rows S the estimate ``sqrt(pi / 2) / m * |k| *
<S q, sign(S k)>`` of ``<q, k>`` is right on average, whatever q is, with a variance of ``(pi/2 |q|^2 |k|^2 -
<q, k>^2) / m``. A store does not know q; it gives back the k that q would meet there, ``sqrt(pi / 2) / m *
|k| * S^T sign(S k)``.

The reference code makes each D rows of S orthogonal, which has a third of the variance. The constant is then
``1 / (m E|t|)`` for a coordinate t of a random unit vector times ``sqrt(D)``, .2 % away from that of normal
rows at 128 dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvtcd.codec.rivals import narrow
from kvtcd.codec.rivals.codebook import beta
from kvtcd.codec.rivals.draws import Draw
from kvtcd.codec.rivals.method import F16, F32, Field
from kvtcd.codec.rivals.rotation import orthogonalised


class Sketch:
    """The sketch of vectors.

    Args:
        rows: of S, float32 ``[m, D]``.
        constant: what the sum of rows is multiplied with.
    """

    def __init__(self, rows: Tensor, constant: float) -> None:
        self._rows, self._constant = rows, constant

    @classmethod
    def normal(cls, size: int, dim: int, draw: Draw) -> Sketch:
        """Return the paper's: independent normal rows."""
        return cls(draw.normals(size, dim).to(F32), math.sqrt(math.pi / 2) / size)

    @classmethod
    def orthogonal(cls, size: int, dim: int, draw: Draw) -> Sketch:
        """Return that of the reference code: blocks of orthogonal rows of length ``sqrt(D)``."""
        blocks = orthogonalised(draw.normals(-(-size // dim), dim, dim)) * dim**0.5
        expected = float(beta(1, dim).levels[1]) * dim**0.5
        return cls(blocks.reshape(-1, dim)[:size].to(F32), 1 / (size * expected))

    def fields(self, vectors: int) -> list[Field]:
        """Return signs, then norms ``[vectors]``."""
        return [*narrow.fields(vectors * len(self._rows), 1), Field(F16, (vectors,))]

    def encode(self, vectors: Tensor) -> list[Tensor]:
        """Return the arrays of float32 vectors ``[n, D]``."""
        signs = (vectors @ self._rows.to(vectors.device).t() > 0).to(torch.uint8)
        return [*narrow.split(signs, 1), vectors.norm(dim=1).to(F16)]

    def decode(self, arrays: Sequence[Tensor]) -> Tensor:
        """Return float32 vectors ``[n, D]``."""
        packed, norms = arrays
        rows = self._rows.to(norms.device)
        signs = narrow.join([packed], 1, len(norms) * len(rows)).view(-1, len(rows))
        lengths = norms.to(F32)[:, None] * self._constant
        decoded: Tensor = (signs.to(F32) * 2 - 1) @ rows * lengths
        return decoded
