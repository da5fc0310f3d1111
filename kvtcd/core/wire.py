"""Frames: many blocks in one HTTP body.

A body is a run of frames without padding or end mark; the length of the body ends it. Each frame is, little
endian::

    magic           4 bytes, ``KVTF``
    header length   u32, bytes of the header, 2 to 16,384
    body length     u64, bytes of the body, may be 0
    header          one JSON object in UTF-8
    body            raw bytes

Nothing here reads or writes a socket: `FrameParser` is told bytes as they come, in any split, and hands out
views of them, so a body is never joined and never allocated before it has arrived.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvtcd.core.errors import BadField, BadMagic, TooLarge, Truncated
from kvtcd.core.fields import json_object

MAGIC = b"KVTF"
MEDIA_TYPE = "application/vnd.kvtcd.frames"
MAX_HEADER = 16 << 10
_PREFIX = struct.Struct("<4sIQ")
PREFIX_BYTES = _PREFIX.size
_MIN_HEADER = len(b"{}")


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before the body of a frame: its header, and how many bytes follow."""

    header: dict[str, Any]
    nbytes: int


def head(header: Mapping[str, object], nbytes: int) -> bytes:
    """Write what stands before the `nbytes` bytes of a frame's body.

    Raises:
        TooLarge: the header is over 16 KiB.
    """
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_HEADER:
        raise TooLarge("frame header", len(text), MAX_HEADER)
    return _PREFIX.pack(MAGIC, len(text), nbytes) + text


def parse_prefix(data: bytes | bytearray | memoryview, max_body: int) -> tuple[int, int]:
    """Return (header length, body length) from the first `PREFIX_BYTES` bytes of a frame.

    Raises:
        BadMagic: this is not a frame.
        BadField: a length out of its range.
    """
    magic, header_bytes, body_bytes = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise BadMagic("frame", f"begins with {magic.hex()} instead of {MAGIC.hex()}")
    if not _MIN_HEADER <= header_bytes <= MAX_HEADER:
        raise BadField(
            "frame", f"a header of {header_bytes} bytes; {_MIN_HEADER} to {MAX_HEADER} are allowed"
        )
    if body_bytes > max_body:
        raise BadField("frame", f"a body of {body_bytes} bytes; the limit is {max_body}")
    return header_bytes, body_bytes


class FrameParser:
    """Takes a run of frames apart, whatever pieces it arrives in.

    Args:
        max_body: bytes of one frame's body at most.

    Example:
        >>> parser = FrameParser(max_body=100)
        >>> data = head({"key": "ab"}, 3) + b"xyz"
        >>> [bytes(e) if isinstance(e, memoryview) else e for e in parser.feed(data)]
        [Head(header={'key': 'ab'}, nbytes=3), b'xyz']
        >>> parser.finish()
    """

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._pending = bytearray()
        """The beginning of a head, never more than a prefix and a header."""
        self._body = 0
        """Bytes of the current body still to come."""

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Head | memoryview]:
        """Take the next bytes; yield each `Head`, then its body as views of `data`, never an empty one.

        The bytes of the views are the caller's: they are gone when he reuses `data`. The iterator must be
        exhausted before the next call.

        Raises:
            BadMagic, BadField: the bytes are no frames. The parser is of no more use then.
        """
        rest = memoryview(data)
        while rest:
            if self._body:
                piece, rest = rest[: self._body], rest[self._body :]
                self._body -= len(piece)
                yield piece
                continue
            while rest and (lack := self._lack()):
                self._pending += rest[:lack]
                rest = rest[lack:]
            if not self._lack():
                complete = Head(json_object(self._pending[PREFIX_BYTES:]), self._lengths()[1])
                self._pending.clear()
                self._body = complete.nbytes
                yield complete

    def finish(self) -> None:
        """Note the end of the run.

        Raises:
            Truncated: it ends within a frame.
        """
        if self._body:
            raise Truncated("frames", f"the run ends {self._body} bytes before the end of a body")
        if self._pending:
            raise Truncated("frames", "the run ends within the head of a frame")

    def _lack(self) -> int:
        """Bytes that the current head lacks, as far as is known."""
        have = len(self._pending)
        return PREFIX_BYTES - have if have < PREFIX_BYTES else PREFIX_BYTES + self._lengths()[0] - have

    def _lengths(self) -> tuple[int, int]:
        return parse_prefix(self._pending[:PREFIX_BYTES], self._max_body)
