"""A plan: which runs of principal components are kept, and with how many bits.

Paper section 3.2: a group is a run of consecutive components that share a scale and a shift (16 bits each)
per token. Components of no group are not stored and decode to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from kvtcd.core.errors import BadField

SIZES = (1, 16, 64, 256, 1024)
"""Group sizes of the paper."""
WIDTHS = (8, 4, 2)
"""Bits per coefficient: 8 is floating point E4M3, 4 and 2 are integers."""
RANGE_BITS = 32
"""Bits of one group's scale and shift, per token."""


@dataclass(frozen=True, slots=True)
class Group:
    """Components ``start .. start + size - 1``, coded with `bits` bits each."""

    start: int
    size: int
    bits: int

    @property
    def cost(self) -> int:
        """Bits per token, range included."""
        return self.size * self.bits + RANGE_BITS


@dataclass(frozen=True, slots=True)
class Band:
    """`count` adjacent groups of one size and width: coded in one step."""

    start: int
    count: int
    size: int
    bits: int

    @property
    def stop(self) -> int:
        """First component after the band."""
        return self.start + self.count * self.size


@dataclass(frozen=True)
class Plan:
    """The groups of one stream, in order of component, without overlap."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        for group in self.groups:
            if group.start < 0 or group.size < 1 or group.bits not in WIDTHS:
                raise BadField("plan", f"{group} is not a group of components")
        for left, right in pairwise(self.groups):
            if right.start < left.start + left.size:
                raise BadField("plan", f"{right} overlaps the group before it")

    @property
    def rank(self) -> int:
        """Components the basis must have: the end of the last group."""
        return self.groups[-1].start + self.groups[-1].size if self.groups else 0

    @property
    def cost(self) -> int:
        """Bits per token before the entropy stage, ranges included."""
        return sum(group.cost for group in self.groups)

    def components(self, bits: int) -> int:
        """Number of components coded with `bits` bits."""
        return sum(group.size for group in self.groups if group.bits == bits)

    @cached_property
    def bands(self) -> tuple[Band, ...]:
        """The groups, neighbours of equal size and width taken together."""
        bands: list[Band] = []
        for group in self.groups:
            last = bands[-1] if bands else None
            if last and (last.stop, last.size, last.bits) == (group.start, group.size, group.bits):
                bands[-1] = Band(last.start, last.count + 1, last.size, last.bits)
            else:
                bands.append(Band(group.start, 1, group.size, group.bits))
        return tuple(bands)

    def to_tensor(self) -> Tensor:
        """Return the groups as int32 ``[groups, 3]``: start, size, bits."""
        rows = [(group.start, group.size, group.bits) for group in self.groups]
        return torch.tensor(rows, dtype=torch.int32).reshape(-1, 3)

    @classmethod
    def from_tensor(cls, rows: Tensor) -> Plan:
        """Build from the form that `to_tensor` makes.

        Raises:
            BadField: another shape or dtype, an unknown width, or groups that overlap.
        """
        if rows.dtype != torch.int32 or rows.ndim != 2 or rows.shape[1] != 3:
            raise BadField("plan", f"is {rows.dtype} of shape {list(rows.shape)}, not int32 [groups, 3]")
        return cls(tuple(Group(*row) for row in rows.tolist()))
