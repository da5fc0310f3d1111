"""What a match answers: how much of a prefix is where, and the lease that keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from kvtcd.core.errors import BadRequest
from kvtcd.core.fields import Fields
from kvtcd.core.identity import MAX_BLOCK_TOKENS
from kvtcd.core.keys import EngineKey
from kvtcd.core.place import Tier


class BlockMatch(NamedTuple):
    """One block that was asked for; `tier` is the fastest that has it, None on a miss."""

    key: EngineKey
    tokens: int
    tier: Tier | None


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease: `blocks` of them stay for `seconds`, or until it is given back."""

    id: str
    seconds: float
    blocks: int

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"id": self.id, "seconds": self.seconds, "blocks": self.blocks}

    @classmethod
    def from_json(cls, body: object) -> LeaseInfo:
        """Build from the form that `to_json` writes."""
        given = Fields(body, "lease")
        return cls(given.text("id"), given.number("seconds", 0, 1 << 31), given.integer("blocks", 0, 1 << 31))


@dataclass(frozen=True, slots=True)
class Matches:
    """Answer to a match: the blocks asked for, in order.

    `partials`: tokens of each stored partial block that continues the prefix. `lease`: keeps the prefix, if
    that was asked for and there is one.
    """

    blocks: tuple[BlockMatch, ...]
    partials: tuple[int, ...] = ()
    lease: LeaseInfo | None = None

    @property
    def prefix(self) -> tuple[BlockMatch, ...]:
        """The leading blocks that are all there."""
        return tuple(takewhile(lambda block: block.tier is not None, self.blocks))

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefix."""
        return sum(block.tokens for block in self.prefix)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form, in columns; `bitmap` has one character a block, ``1`` where it is there."""
        return {
            "prefix_blocks": len(self.prefix),
            "prefix_tokens": self.prefix_tokens,
            "bitmap": "".join("0" if block.tier is None else "1" for block in self.blocks),
            "keys": [block.key.hex() for block in self.blocks],
            "tokens": [block.tokens for block in self.blocks],
            "tiers": [block.tier for block in self.blocks],
            "partials": list(self.partials),
            "lease": self.lease.to_json() if self.lease else None,
        }

    @classmethod
    def from_json(cls, body: object) -> Matches:
        """Build from the form that `to_json` writes; the rest follows from its columns and `partials`."""
        given = Fields(body, "match")
        columns = (given.keys("keys"), given.integers("tokens", 0, MAX_BLOCK_TOKENS), given.tiers("tiers"))
        if len({len(column) for column in columns}) != 1:
            raise BadRequest("tiers", "are not as many as keys and tokens")
        blocks = tuple(map(BlockMatch._make, zip(*columns, strict=True)))
        lengths = given.items("partials") if "partials" in given else ()  # older daemons have none
        lease = LeaseInfo.from_json(given.value("lease")) if "lease" in given else None
        return cls(blocks, tuple(length for length in lengths if isinstance(length, int)), lease)
