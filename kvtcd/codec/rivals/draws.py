"""Random signs and normal numbers that a blob's seed brings back, on every machine and for ever.

NumPy keeps the bits of its generators stable from release to release (NEP 19), and not what its distributions
make of them; so the distributions are made here. Every use has a key of its own: no seed plus a thousand.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_FRACTION = 2.0**-53


class Draw(NamedTuple):
    """A stream of random bits: `seed` of the blob, and what `use` is made of it."""

    seed: int
    use: int

    def signs(self, *shape: int) -> Tensor:
        """Return +1 and -1, float64."""
        return torch.from_numpy((self._words(shape) >> np.uint64(63)).astype(np.float64)) * 2 - 1

    def normals(self, *shape: int) -> Tensor:
        """Return standard normal numbers, float64 (Box and Muller 1958)."""
        words = self._words((2, *shape)) >> np.uint64(11)
        # Above zero, since its logarithm is taken.
        radius, turn = (words.astype(np.float64) + 1) * _FRACTION
        return torch.from_numpy(np.sqrt(-2 * np.log(radius)) * np.cos(2 * math.pi * turn))

    def _words(self, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        bits = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(self.use,)))
        return bits.random_raw(math.prod(shape)).reshape(shape)
