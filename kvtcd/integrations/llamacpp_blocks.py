"""A slot file as blocks: a head that says how long it is, and the bytes of the file in pieces.

The head is named by *all* tokens of its file. Of a prompt every beginning has such a name, and the longest
whose head is there is the longest saved prefix. Pieces are named by the digest of the file, so that those of
two files never meet. In the chain the head comes last: it is stored last and evicted first, so where it is,
the file was whole.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from kvtcd.client import BlockHead
from kvtcd.core.errors import BadMagic, BadVersion
from kvtcd.core.keys import EngineKey, tokens_to_bytes

HASH_SCHEME = "kvtcd-llamacpp-v1"
UNIT = 1024
"""Bytes of what the daemon counts as a token: blocks are whole ones."""
BLOCK_UNITS = 4096
_PIECE = UNIT * BLOCK_UNITS
_HEAD = struct.Struct("<8sIQ32s")
_MAGIC, _VERSION = b"kvtcdslt", 1


@dataclass(frozen=True, slots=True)
class Head:
    """Length and SHA-256 of a file."""

    nbytes: int
    digest: bytes

    @classmethod
    def of(cls, data: memoryview) -> Self:
        """Return the head of a file."""
        return cls(len(data), hashlib.sha256(data).digest())

    def to_bytes(self) -> bytes:
        """Return it as a block of one unit."""
        return _HEAD.pack(_MAGIC, _VERSION, self.nbytes, self.digest).ljust(UNIT, b"\0")

    @classmethod
    def from_bytes(cls, data: memoryview) -> Self:
        """Read what `to_bytes` wrote.

        Raises:
            BadMagic, BadVersion: it is none, or of a later release.
        """
        magic, version, nbytes, digest = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise BadMagic("head of a slot file", "does not begin like one")
        if version != _VERSION:
            raise BadVersion("head of a slot file", f"has version {version}; this release reads {_VERSION}")
        return cls(nbytes, digest)

    def keys(self) -> list[EngineKey]:
        """Return the keys of the file's pieces."""
        return [
            EngineKey(hashlib.blake2b(self.digest + struct.pack("<I", number), digest_size=32).digest())
            for number in range(-(-self.nbytes // _PIECE))
        ]


def prefix_keys(namespace: bytes, tokens: array[int]) -> Iterator[EngineKey]:
    """Yield the key of the head of every prefix, from that of one token on."""
    running = hashlib.blake2b(HASH_SCHEME.encode() + namespace, digest_size=32)
    data = memoryview(tokens_to_bytes(tokens))
    for end in range(0, len(data), tokens.itemsize):
        running.update(data[end : end + tokens.itemsize])
        yield EngineKey(running.copy().digest())


def head_key(namespace: bytes, tokens: array[int]) -> EngineKey:
    """Return the key of the head of a file: BLAKE2b-256(scheme ‖ namespace ‖ tokens as LE u32)."""
    data = HASH_SCHEME.encode() + namespace + tokens_to_bytes(tokens)
    return EngineKey(hashlib.blake2b(data, digest_size=32).digest())


def chained(keys: Sequence[EngineKey], nbytes: int) -> Iterator[BlockHead]:
    """Yield what the daemon is told of each piece of a file of so many bytes."""
    units = -(-nbytes // UNIT)
    for number, key in enumerate(keys):
        parent = keys[number - 1] if number else None
        yield BlockHead(key, min(BLOCK_UNITS, units - number * BLOCK_UNITS), parent=parent)


def pieces(data: memoryview) -> Iterator[memoryview | bytes]:
    """Yield a file in pieces, the last one filled up to whole units with zeros."""
    for first in range(0, len(data), _PIECE):
        piece = data[first : first + _PIECE]
        short = -len(piece) % UNIT
        yield bytes(piece) + bytes(short) if short else piece
