"""Memory that a client and the daemon share: what they say of it. The bytes themselves go through no socket.

A client makes a memfd, seals its size, and sends it over the side socket, a ``SOCK_SEQPACKET`` beside that
of the API: one message of `HELLO` with the one descriptor, answered by one JSON object, a `Grant` or problem
details. The region is the peer's, and ends with that connection: once the peer has shut down its side and
reads the end of the daemon's, nothing writes to it any more. Requests name it, and where in it a block lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvtcd.core.forms import Range
from kvtcd.core.keys import EngineKey
from kvtcd.core.message import INLINE, Answer, Name, Request
from kvtcd.core.messages import MAX_BLOCKS, BlockHead, Found

HELLO = b"KVTM\x01\x00"
"""Magic, and the version as u16."""
MAX_ANSWER = 4096
REGION = "region"
"""What is not found when a region is not known."""
MAX_OFFSET = (1 << 62) - 1
SEALS = 0x1 | 0x2 | 0x4
"""``F_SEAL_SEAL``, ``F_SEAL_SHRINK``, ``F_SEAL_GROW``: SIGBUS kills who maps what another cuts short."""

Offset = Annotated[int, Range(0, MAX_OFFSET)]


def side_socket(api_socket: str) -> str:
    """Return the path of the side socket beside that of the API."""
    return f"{api_socket}.regions"


@dataclass(frozen=True, slots=True)
class Grant(Answer):
    """A region as the daemon knows it: its id, 32 hex digits, and its size."""

    region: str
    nbytes: Annotated[int, Range(1, MAX_OFFSET), Name("bytes")]


@dataclass(frozen=True, slots=True)
class Span(Request):
    """A part of a region.

    Attributes:
        offset: of its first byte.
        length: in bytes.
    """

    offset: Offset
    length: Annotated[int, Range(1, MAX_OFFSET)]


@dataclass(frozen=True, slots=True)
class Placed(Request):
    """The part of a region that a request about one block names in its query.

    Attributes:
        region: id of the region.
    """

    region: str
    span: Annotated[Span, INLINE]

    def to_query(self) -> dict[str, str]:
        """Return it as query parameters."""
        return {name: str(value) for name, value in self.to_json().items()}


@dataclass(frozen=True, slots=True)
class PlacedHead(Request):
    """A block to store that lies in a region."""

    head: Annotated[BlockHead, INLINE]
    span: Annotated[Span, INLINE]


@dataclass(frozen=True, slots=True)
class RegionPut(Request):
    """Store blocks that lie in a region."""

    region: str
    blocks: Annotated[tuple[PlacedHead, ...], Range(0, MAX_BLOCKS)]


@dataclass(frozen=True, slots=True)
class PlacedKey(Request):
    """A block to read into a part of a region that is large enough."""

    key: EngineKey
    span: Annotated[Span, INLINE]


@dataclass(frozen=True, slots=True)
class RegionGet(Request):
    """Read blocks into a region."""

    region: str
    blocks: Annotated[tuple[PlacedKey, ...], Range(0, MAX_BLOCKS)]


@dataclass(frozen=True, slots=True)
class Landed(Answer):
    """What was written to one part of a region; nothing for a miss."""

    found: Annotated[Found, INLINE]
    nbytes: Annotated[Offset, Name("bytes")] = 0


@dataclass(frozen=True, slots=True)
class AllLanded(Answer):
    """The answer to a `RegionGet`."""

    blocks: tuple[Landed, ...]
