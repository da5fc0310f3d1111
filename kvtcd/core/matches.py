"""What a match answers: how much of a prefix is where, and the lease that keeps it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, NamedTuple

from kvtcd.core.errors import BadRequest
from kvtcd.core.forms import Pattern, Range
from kvtcd.core.identity import MAX_BLOCK_TOKENS
from kvtcd.core.keys import EngineKey
from kvtcd.core.message import Answer, derived
from kvtcd.core.messages import Count
from kvtcd.core.place import Tier


class BlockMatch(NamedTuple):
    """One block that was asked for; `tier` is the fastest that has it, None on a miss."""

    key: EngineKey
    tokens: int
    tier: Tier | None


@dataclass(frozen=True, slots=True)
class LeaseInfo(Answer):
    """A lease: `blocks` of them stay for `seconds`, or until it is given back."""

    id: str
    seconds: Annotated[float, Range(0)]
    blocks: Count


@dataclass(frozen=True, slots=True)
class Matches(Answer):
    """Answer to a match: the blocks asked for, in order and in columns.

    Attributes:
        keys: of the blocks.
        tokens: in each; 0 on a miss.
        tiers: the fastest that has it; None on a miss.
        partials: tokens of each stored partial block that continues the prefix.
        lease: keeps the prefix, if that was asked for and there is one.

    Raises:
        BadRequest: the columns differ in length.
    """

    keys: tuple[EngineKey, ...]
    tokens: tuple[Annotated[int, Range(0, MAX_BLOCK_TOKENS)], ...]
    tiers: tuple[Tier | None, ...]
    partials: tuple[Count, ...] = ()  # older daemons tell none
    lease: LeaseInfo | None = None

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.tokens) == len(self.tiers):
            raise BadRequest("tiers", "are not as many as keys and tokens")

    @classmethod
    def of(cls, blocks: Iterable[BlockMatch], partials: tuple[int, ...] = ()) -> Matches:
        """Return the answer about some blocks."""
        keys, tokens, tiers = zip(*rows, strict=True) if (rows := tuple(blocks)) else ((), (), ())
        return cls(keys, tokens, tiers, partials)

    @property
    def blocks(self) -> tuple[BlockMatch, ...]:
        """The blocks asked for, one by one."""
        return tuple(map(BlockMatch._make, zip(self.keys, self.tokens, self.tiers, strict=True)))

    @property
    def prefix(self) -> tuple[BlockMatch, ...]:
        """The leading blocks that are all there."""
        return tuple(takewhile(lambda block: block.tier is not None, self.blocks))

    @property
    def here(self) -> tuple[BlockMatch, ...]:
        """Those of `prefix` that the daemon has itself, up to the first that it would have to fetch."""
        return tuple(takewhile(lambda block: block.tier is not Tier.REMOTE, self.prefix))

    @derived
    def prefix_blocks(self) -> Count:
        """How many leading blocks are all there."""
        return len(self.prefix)

    @derived
    def prefix_tokens(self) -> Count:
        """Tokens of these."""
        return sum(block.tokens for block in self.prefix)

    @derived
    def bitmap(self) -> Annotated[str, Pattern("[01]*")]:
        """One character a block, ``1`` where it is there."""
        return "".join("0" if tier is None else "1" for tier in self.tiers)
