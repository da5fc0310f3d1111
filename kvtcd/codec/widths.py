"""How many bits each component of a stream gets before the entropy stage, by how it spreads over a step.

Encoder and decoder derive the same widths from the profile and the step in the header: comparisons of float64
values that both have exactly.

Bounds are mean magnitudes in steps. Below the first a component rounds to something else than zero in one
token of 500, and is not coded at all; above, each width is where packed codes and escapes together take the
fewest bytes, measured on SmolLM2 at three steps (`codec/README.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtcd.codec.pack import packed_width

LEAST = 0.11
"""Spread, in steps, below which a component is not coded."""
_BOUNDS = ((1, LEAST), (2, 0.158), (4, 0.26), (8, 1.3))
"""Width in bits, and the least spread that gets it."""
WIDTHS = tuple(bits for bits, _ in _BOUNDS)


@dataclass(frozen=True, eq=False)
class Widths:
    """Components by width.

    Attributes:
        rank: components up to the last coded one.
        rows: width in bits -> indices of its components, int64, ascending; only widths that occur.
        every: `rows`, one after the other, and then the other indices below `rank`, which are not coded.
        most: the highest code of each coded component in that order, int32, a column.
    """

    rank: int
    rows: Mapping[int, Tensor]
    every: Tensor
    most: Tensor

    @property
    def order(self) -> Tensor:
        """Indices of the coded components, by width, int64."""
        return self.every[: len(self.most)]

    @property
    def uncoded(self) -> Tensor:
        """Indices below `rank` of those that are not coded, int64."""
        return self.every[len(self.most) :]

    def sizes(self, tokens: int) -> dict[int, int]:
        """Return the bytes that codes of so many tokens take, by width."""
        return {bits: len(rows) * packed_width(tokens, bits) for bits, rows in self.rows.items()}

    def to(self, device: torch.device) -> Widths:
        """Return the same on another device."""
        rows = {width: found.to(device) for width, found in self.rows.items()}
        return Widths(self.rank, rows, self.every.to(device), self.most.to(device))

    @classmethod
    def of(cls, spread: Tensor, step: float) -> Widths:
        """Give each component its width.

        Args:
            spread: mean magnitude of each coefficient, float32 ``[r]``.
            step: of the quantiser, as a float32 holds it.
        """
        steps = spread.to(torch.float64) / step
        bits = torch.zeros(len(steps), dtype=torch.int64)
        for width, bound in _BOUNDS:
            bits[steps >= bound] = width
        rows = {width: torch.nonzero(bits == width).flatten() for width in WIDTHS}
        coded = torch.nonzero(bits).flatten()
        rank = int(coded[-1]) + 1 if len(coded) else 0
        return cls(
            rank=rank,
            rows={width: found for width, found in rows.items() if len(found)},
            every=torch.cat([*rows.values(), torch.nonzero(bits[:rank] == 0).flatten()]),
            most=torch.cat([torch.full_like(found, (1 << width) - 1) for width, found in rows.items()]).to(
                torch.int32
            )[:, None],
        )
