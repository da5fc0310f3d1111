"""How one record lies in the databases of an environment: pure functions over lengths and bytes.

A record is one header in `meta` (record key -> magic, blob length, envelope) and chunks in `blob` (record key
and big-endian chunk number -> at most `CHUNK_BYTES` bytes). A chunk fills 64 pages of 4 KiB with its 16-byte
page header, so freed space always fits the next chunk and the file does not fragment.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtcd.core.errors import BadField, BadMagic, TooLarge, Truncated

KEY_BYTES = 32
MAX_ENVELOPE = 4095
PAGE = 4096
CHUNK_PAGES = 64

_PAGE_HEADER = 16
CHUNK_BYTES = CHUNK_PAGES * PAGE - _PAGE_HEADER
_NODE_HEADER = 8
_NODE_INDEX = 2
_REFERENCE = 8
# A larger node has its value in pages of its own: mdb.c, `me_nodemax` for 4 KiB pages.
_NODE_MAX = 2038

_HEADER = struct.Struct("<4sQ")
_HEADER_FIELDS = np.dtype([("magic", "S4"), ("blob_bytes", "<u8")])
_MAGIC = b"kvR1"
_MAX_BLOB = 1 << 40
"""No transaction takes as many bytes; sums of sizes that are believed stay numbers of 64 bits."""

Bytes = npt.NDArray[np.uint8]
Blob = bytes | bytearray | memoryview | Bytes
Count = TypeVar("Count", int, npt.NDArray[np.int64])
Take = Callable[[int], Bytes]
"""Gives so many bytes of memory to read a blob into."""


@dataclass(frozen=True, slots=True)
class Put:
    """A record to be stored.

    Raises:
        ValueError: the key has not 32 bytes.
        TooLarge: the envelope has more than 4095 bytes.
    """

    key: bytes
    envelope: bytes
    blob: Blob
    """C-contiguous bytes; must not change or be resized until the write has returned."""

    def __post_init__(self) -> None:
        check_key(self.key)
        if len(self.envelope) > MAX_ENVELOPE:
            raise TooLarge("the envelope", len(self.envelope), MAX_ENVELOPE)

    @property
    def footprint(self) -> int:
        """Bytes this record will occupy."""
        return footprint(len(self.envelope), self.view.nbytes)

    @property
    def view(self) -> memoryview:
        """The blob as bytes, not copied."""
        view = self.blob.data if isinstance(self.blob, np.ndarray) else memoryview(self.blob)
        return view.cast("B") if view.nbytes else memoryview(b"")  # what is empty cannot be cast

    def chunks(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yield the key and a view of the bytes of every chunk."""
        view = self.view
        for index, begin in enumerate(range(0, view.nbytes, CHUNK_BYTES)):
            yield chunk_key(self.key, index), view[begin : begin + CHUNK_BYTES]


@dataclass(frozen=True, slots=True)
class Stored:
    """What is known of a stored record without reading its blob."""

    envelope: bytes
    blob_bytes: int


@dataclass(frozen=True, slots=True)
class Page:
    """The same of many records, in columns: there may be a million.

    Attributes:
        keys: of the records, in their order.
        envelopes: of each.
        footprints: bytes that each occupies, int64.
        unreadable: headers between them that cannot be read.
    """

    keys: list[bytes]
    envelopes: list[bytes]
    footprints: npt.NDArray[np.int64]
    unreadable: int

    @classmethod
    def of(cls, rows: Sequence[tuple[bytes, bytes]]) -> Page:
        """Read keys and values of the database `meta`; what `lengths` refuses is left out."""
        keys, values = [key for key, _ in rows], [value for _, value in rows]
        heads = [value[: _HEADER.size].ljust(_HEADER.size, b"\0") for value in values]
        given = np.frombuffer(b"".join(heads), _HEADER_FIELDS)
        envelopes, blobs = _lengths(values) - _HEADER.size, given["blob_bytes"]
        readable = (_lengths(keys) == KEY_BYTES) & (given["magic"] == _MAGIC) & (blobs <= _MAX_BLOB)
        readable &= (envelopes >= 0) & (envelopes <= MAX_ENVELOPE)
        return cls(
            [*compress(keys, readable)],
            [value[_HEADER.size :] for value in compress(values, readable)],
            footprint(envelopes[readable], blobs[readable].astype(np.int64)),
            int(np.count_nonzero(~readable)),
        )


def _lengths(items: Sequence[bytes]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(len, items), np.int64, len(items))


def fresh(nbytes: int) -> Bytes:
    """Give new memory."""
    return np.empty(nbytes, np.uint8)


def check_key(key: bytes) -> None:
    """Raise ValueError unless `key` has the length of a record key."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a record key has {KEY_BYTES} bytes, not {len(key)}")


def chunk_key(key: bytes, index: int) -> bytes:
    """Return the key of the `index`-th chunk: chunks of a record are neighbours, in order."""
    return key + index.to_bytes(4, "big")


def chunk_lengths(blob_bytes: int) -> Iterator[int]:
    """Yield the length of every chunk of a blob."""
    whole, rest = divmod(blob_bytes, CHUNK_BYTES)
    for _ in range(whole):
        yield CHUNK_BYTES
    if rest:
        yield rest


def pack_header(put: Put) -> bytes:
    """Return the value of `put` in the database `meta`."""
    return _HEADER.pack(_MAGIC, put.view.nbytes) + put.envelope


def unpack_header(key: bytes, value: memoryview | bytes) -> Stored:
    """Read a value of the database `meta`; the result holds copies.

    Raises:
        Corrupt: as of `lengths`.
    """
    _, blob_bytes = lengths(key, value)
    return Stored(bytes(value[_HEADER.size :]), blob_bytes)


def lengths(key: bytes, value: memoryview | bytes) -> tuple[int, int]:
    """Return the bytes of envelope and blob by a value of the database `meta`.

    Raises:
        Truncated: shorter than its fixed part.
        BadMagic: not a header, or one of a later release.
        BadField: a key, an envelope or a blob of a length that is never written.
    """
    if len(key) != KEY_BYTES:
        raise BadField("record key", f"{len(key)} bytes, not {KEY_BYTES}")
    if len(value) < _HEADER.size:
        raise Truncated("record header", f"{len(value)} bytes, fewer than {_HEADER.size}")
    magic, blob_bytes = _HEADER.unpack_from(value)
    if magic != _MAGIC:
        raise BadMagic("record header", f"begins with {magic!r}, not {_MAGIC!r}")
    if len(value) > _HEADER.size + MAX_ENVELOPE:
        raise BadField("record header", f"{len(value)} bytes, more than {_HEADER.size + MAX_ENVELOPE}")
    if blob_bytes > _MAX_BLOB:
        raise BadField("record header", f"a blob of {blob_bytes} bytes, more than {_MAX_BLOB}")
    return len(value) - _HEADER.size, blob_bytes


def footprint(envelope_bytes: Count, blob_bytes: Count) -> Count:
    """Return the bytes a record occupies in the file, in whole pages; of many records, arrays in, array out.

    Counts the pages of every value that has its own, and one and a half times the nodes in tree pages, which
    are two thirds full under random keys.
    """
    whole, rest = blob_bytes // CHUNK_BYTES, blob_bytes % CHUNK_BYTES
    pages, nodes = _occupied(KEY_BYTES, _HEADER.size + envelope_bytes)
    chunk_pages, chunk_node = _occupied(KEY_BYTES + 4, CHUNK_BYTES)
    rest_pages, rest_node = _occupied(KEY_BYTES + 4, rest)
    pages += whole * chunk_pages + rest_pages
    nodes += whole * chunk_node + (rest > 0) * rest_node
    return PAGE * (pages + _pages(nodes * 3 // 2))


def _occupied(key_bytes: int, value_bytes: Count) -> tuple[Count, Count]:
    """Return (pages of its own, bytes in a tree page) of one key and value."""
    node = _NODE_HEADER + key_bytes + value_bytes
    apart = node > _NODE_MAX
    kept = apart * (_NODE_HEADER + key_bytes + _REFERENCE) + (1 - apart) * node
    return apart * _pages(_PAGE_HEADER + value_bytes), kept + _NODE_INDEX


def _pages(nbytes: Count) -> Count:
    return -(-nbytes // PAGE)
