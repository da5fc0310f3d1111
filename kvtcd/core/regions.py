"""Memory that a client and the daemon share: what they say of it. The bytes themselves go through no socket.

A client makes a memfd, seals its size, and sends it over the side socket, a ``SOCK_SEQPACKET`` beside that
of the API: one message of `HELLO` with the one descriptor, answered by one JSON object, a `Grant` or problem
details. The region is the peer's, and ends with that connection: once the peer has shut down its side and
reads the end of the daemon's, nothing writes to it any more. Requests name it, and where in it a block lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from kvtcd.core.fields import Fields
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead, Found

HELLO = b"KVTM\x01\x00"
"""Magic, and the version as u16."""
MAX_ANSWER = 4096
REGION = "region"
"""What is not found when a region is not known."""
MAX_OFFSET = (1 << 62) - 1
SEALS = 0x1 | 0x2 | 0x4
"""``F_SEAL_SEAL``, ``F_SEAL_SHRINK``, ``F_SEAL_GROW``: SIGBUS kills who maps what another cuts short."""

_DECIMAL = re.compile(r"[0-9]{1,19}")


def side_socket(api_socket: str) -> str:
    """Return the path of the side socket beside that of the API."""
    return f"{api_socket}.regions"


@dataclass(frozen=True, slots=True)
class Grant:
    """A region as the daemon knows it: its id, 32 hex digits, and its size."""

    region: str
    nbytes: int

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"region": self.region, "bytes": self.nbytes}

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Build from the form that `to_json` writes."""
        given = Fields(body, "grant")
        return cls(given.text("region"), given.integer("bytes", 1, MAX_OFFSET))


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a region: the offset of its first byte, and its length."""

    offset: int
    length: int

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"offset": self.offset, "length": self.length}

    @classmethod
    def of(cls, given: Fields) -> Self:
        """Read the two fields of an object that may have others.

        Raises:
            BadRequest: one is missing or out of range.
        """
        return cls(given.integer("offset", 0, MAX_OFFSET), given.integer("length", 1, MAX_OFFSET))


SPAN_FIELDS = ("offset", "length")


@dataclass(frozen=True, slots=True)
class Placed:
    """The part of a region that a request about one block names in its query."""

    region: str
    span: Span

    FIELDS: ClassVar = ("region", *SPAN_FIELDS)

    def to_query(self) -> dict[str, str]:
        """Return it as query parameters."""
        return {"region": self.region, "offset": str(self.span.offset), "length": str(self.span.length)}

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> Self | None:
        """Build from query parameters, of which there may be others; None where there is no `region`.

        Raises:
            BadRequest: offset or length are missing, or are no numbers.
        """
        if "region" not in query:
            return None
        numbers = {name: int(query[name]) for name in SPAN_FIELDS if _DECIMAL.fullmatch(query.get(name, ""))}
        return cls(query["region"], Span.of(Fields({**query, **numbers}, "query")))


@dataclass(frozen=True, slots=True)
class RegionPut:
    """Store blocks that lie in a region."""

    region: str
    blocks: Sequence[tuple[BlockHead, Span]]

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "region": self.region,
            "blocks": [head.to_json() | span.to_json() for head, span in self.blocks],
        }

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Build from the form that `to_json` writes.

        Raises:
            BadRequest: a field is missing, unknown, of the wrong type or out of range.
        """
        given = Fields(body, "body")
        given.refuse_others("region", "blocks")
        return cls(given.text("region"), [_placed_head(row) for row in given.items("blocks")])


def _placed_head(row: object) -> tuple[BlockHead, Span]:
    span = Span.of(Fields(row, "block"))
    assert isinstance(row, dict)  # or `Fields` would have refused it
    return BlockHead.from_json({name: value for name, value in row.items() if name not in SPAN_FIELDS}), span


@dataclass(frozen=True, slots=True)
class RegionGet:
    """Read blocks into a region: each into a part that is large enough."""

    region: str
    blocks: Sequence[tuple[EngineKey, Span]]

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "region": self.region,
            "blocks": [{"key": key.hex(), **span.to_json()} for key, span in self.blocks],
        }

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Build from the form that `to_json` writes.

        Raises:
            BadRequest: a field is missing, unknown, of the wrong type or out of range.
        """
        given = Fields(body, "body")
        given.refuse_others("region", "blocks")
        blocks = []
        for item in given.items("blocks"):
            row = Fields(item, "block")
            row.refuse_others("key", *SPAN_FIELDS)
            blocks.append((row.key("key"), Span.of(row)))
        return cls(given.text("region"), blocks)


@dataclass(frozen=True, slots=True)
class Landed:
    """What was written to one part of a region; nothing for a miss."""

    found: Found
    nbytes: int = 0

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return self.found.to_json() | {"bytes": self.nbytes}

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Build from the form that `to_json` writes."""
        return cls(Found.from_json(body), Fields(body, "block").integer("bytes", 0, MAX_OFFSET))


def landed_to_json(landed: Iterable[Landed]) -> dict[str, object]:
    """Return the answer to a `RegionGet`."""
    return {"blocks": [one.to_json() for one in landed]}


def landed_from_json(body: object) -> tuple[Landed, ...]:
    """Read the answer to a `RegionGet`."""
    return tuple(Landed.from_json(row) for row in Fields(body, "answer").items("blocks"))
