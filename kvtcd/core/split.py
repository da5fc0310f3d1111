"""How a model is split over ranks: the `parallel` of an identity.

``canonical`` is no split. ``tp4-rank0`` is the first of four tensor-parallel ranks, ``pp2-rank1-tp4-rank0``
that of the second of two pipeline stages. Engines have splits of more kinds, and may add words behind them
that say how they lay a rank out. The ranks of a model differ in nothing but their numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from math import prod

CANONICAL = "canonical"
MOST = 1 << 12
"""Ranks of a model; more are a slip of the pen."""
_SPLIT = re.compile(r"([a-z]+)([1-9][0-9]{0,3})-rank(0|[1-9][0-9]{0,3})(?:-|$)")


@dataclass(frozen=True, slots=True)
class Split:
    """One way in which a model is split, and which part this is.

    Attributes:
        kind: ``tp`` for heads, ``pp`` for layers, or a word of the engine.
        size: parts.
        rank: of this part, from 0.
    """

    kind: str
    size: int
    rank: int

    def __str__(self) -> str:
        return f"{self.kind}{self.size}-rank{self.rank}"


def splits(parallel: str) -> tuple[Split, ...]:
    """Return the splits that a `parallel` names, in its order; none for ``canonical``.

    Raises:
        ValueError: it names none, a part that there is not, one kind twice, or too many parts.
    """
    found: list[Split] = []
    end = 0
    while one := _SPLIT.match(parallel, end):
        found.append(Split(one[1], int(one[2]), int(one[3])))
        end = one.end()
    none_such = [split for split in found if split.rank >= split.size]
    twice = len({split.kind for split in found}) < len(found)
    if parallel != CANONICAL and (not found or none_such or twice or prod(s.size for s in found) > MOST):
        raise ValueError(f"{parallel!r} names no rank as tp2-rank0 and pp2-rank1-tp4-rank0 do")
    return tuple(found)


def all_ranks(parallel: str) -> tuple[str, ...]:
    """Return the `parallel` of every rank of the model that one is given of.

    Raises:
        ValueError: as `splits`.
    """
    found = splits(parallel)
    words = parallel.removeprefix("-".join(map(str, found)))
    parts = [[replace(split, rank=rank) for rank in range(split.size)] for split in found]
    return tuple("-".join(map(str, ranks)) + words for ranks in product(*parts))
