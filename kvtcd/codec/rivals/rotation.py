"""Random rotations, after which the coordinates of any vector look alike.

A coordinate of a unit vector of d dimensions, turned by a Haar rotation, has the density ``(1 - t^2)^((d - 3)
/ 2)``: TurboQuant (arXiv 2504.19874), lemma 1. One round of the randomised Hadamard transform, ``H diag(s)
x`` with random signs s, comes close for vectors that have many coordinates of size, and not for sparse ones:
behind one round the relative error of `tq` on a single coordinate is 0.26 at two bits where theory says
0.116. Three rounds are at theory everywhere.

All are dense matrices here: heads are small, and a product with 128 x 128 is faster than seven steps of
butterflies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtcd.codec.rivals.draws import Draw


def haar(dim: int, draw: Draw) -> Tensor:
    """Return a rotation that is uniform over all, float32 ``[D, D]``."""
    return orthogonalised(draw.normals(dim, dim)).to(torch.float32)


def hadamard(dim: int, draw: Draw, rounds: int = 1) -> Tensor:
    """Return the randomised Hadamard transform, float32 ``[D, D]``.

    Args:
        dim: a power of two.
        draw: of the signs.
        rounds: of signs and transform.
    """
    step = torch.ones((1, 1), dtype=torch.float64)
    while len(step) < dim:
        step = torch.cat((torch.cat((step, step), dim=1), torch.cat((step, -step), dim=1)))
    turned = torch.eye(dim, dtype=torch.float64)
    for signs in draw.signs(rounds, dim):
        turned = step / dim**0.5 @ (signs[:, None] * turned)
    return turned.to(torch.float32)


def orthogonalised(normals: Tensor) -> Tensor:
    """Return orthonormal columns, uniform over all, out of normal numbers ``[..., d, n]``."""
    q, r = torch.linalg.qr(normals)
    signs = r.diagonal(dim1=-2, dim2=-1).sign()
    turned: Tensor = torch.where(signs == 0, 1.0, signs)[..., None, :] * q
    return turned
