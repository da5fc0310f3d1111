"""Blobs whose checksums are right whatever else is wrong: what someone with bad intent would write."""

from __future__ import annotations

import struct

import xxhash

_HEADER, _SECTION = 160, struct.Struct("<BBBBIIIQQQIIQ")


def resealed(data: bytes) -> bytes:
    """Return a blob with its length and the checksums of header and sections put right, if they can be."""
    blob = bytearray(data)
    if len(blob) < _HEADER:
        return data
    struct.pack_into("<Q", blob, 44, len(blob))
    (count,) = struct.unpack_from("<I", blob, 24)
    tables = _HEADER + _SECTION.size * count
    if tables > len(blob):
        return bytes(blob)
    chunks = 0
    for at in range(_HEADER, tables, _SECTION.size):
        *row, _ = _SECTION.unpack_from(blob, at)
        offset, nbytes = row[8], row[9]
        chunks += row[10]
        checksum = xxhash.xxh3_64_intdigest(bytes(blob[offset : offset + nbytes]))
        _SECTION.pack_into(blob, at, *row, checksum)
    end = -(-(tables + 4 * chunks) // 16) * 16
    state = xxhash.xxh3_64(bytes(blob[: _HEADER - 8]))
    state.update(bytes(blob[_HEADER:end]))
    struct.pack_into("<Q", blob, _HEADER - 8, state.intdigest())
    return bytes(blob)
