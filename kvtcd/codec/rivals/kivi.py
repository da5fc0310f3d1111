"""`kivi`: KIVI (Liu et al., arXiv 2402.02750): keys per channel, values per token, in groups of 32.

A group of keys is 32 consecutive tokens of one channel, one of values 32 consecutive channels of one token
and head. Keys after RoPE. The paper's residual of recent tokens in full precision is the window of the
policy; in a sealed block no group waits to be filled, so the last one may be short. Published at 2 and 4
bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvtcd.codec.rivals.groups import CHANNELS, TOKENS, Groups
from kvtcd.codec.rivals.method import Field, Method, Site
from kvtcd.codec.rivals.setting import Setting

GROUP = 32


class Grouped(Method):
    """Groups and nothing else."""

    before_rope = False

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def fields(self, tokens: int) -> list[Field]:
        """Return the arrays of the groups."""
        return self._groups.fields(tokens)

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays; see `Method`."""
        return self._groups.encode(x)

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:
        """Return the values; see `Method`."""
        return self._groups.decode(arrays, tokens)


def groups(site: Site, bits: int, size: int) -> Groups:
    """Return the groups of a stream along the axis that KIVI gives them."""
    return Groups(site, bits, size, TOKENS if site.key else CHANNELS)


def make(setting: Setting, site: Site) -> Method:
    """Return the method of a stream."""
    return Grouped(groups(site, setting.bits, GROUP))
