"""How a model is split over ranks: the `parallel` of an identity.

``canonical`` is no split. ``tp4-rank0`` is the first of four tensor-parallel ranks, ``pp2-rank1-tp4-rank0``
that of the second of two pipeline stages. Engines have splits of more kinds, and may add words that say how
they lay a rank out; both are part of the name, and ranks differ in nothing but their numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

CANONICAL = "canonical"
_SPLIT = re.compile(r"([a-z]+)([1-9][0-9]{0,3})-rank(0|[1-9][0-9]{0,3})")
_MOST = 1 << 12
"""Ranks of a model; more are a slip of the pen."""


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
    if parallel == CANONICAL:
        return ()
    found = tuple(Split(kind, int(size), int(rank)) for kind, size, rank in _SPLIT.findall(parallel))
    ranks = 1
    for split in found:
        ranks *= split.size
        if split.rank >= split.size:
            raise ValueError(f"{split} is none of {split.size} parts")
    if not found or len({split.kind for split in found}) < len(found) or ranks > _MOST:
        raise ValueError(f"{parallel!r} is not for instance tp2-rank0 or pp2-rank1-tp4-rank0")
    return found


def all_ranks(parallel: str) -> tuple[str, ...]:
    """Return the `parallel` of every rank of a model, of which one is given; in the order of their numbers.

    Raises:
        ValueError: as `splits`.
    """
    parts = [[f"{kind}{size}-rank{rank}" for rank in range(size)] for kind, size in ...]
