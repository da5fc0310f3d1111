"""The entropy stage: bytes cut into independent raw DEFLATE chunks (RFC 1951) of 16 KiB, and back.

Written by zlib-ng with `Z_RLE` (Huffman codes and runs of one byte, no string matching), read by ISA-L; any
inflater reads what is written here, and the other way round. Codes of coefficients have no strings to match,
so matching costs time and gains nothing. Measured on real caches (SmolLM2-135M, unseen texts, blocks of 256
tokens, one core; ratio and writing speed of packed codes at ratio 16 / 8, and ratio of float16 range planes
at 16):

========================= ============= ============ =======
writer                    ratio 16 / 8  MB/s         ranges
========================= ============= ============ =======
zlib-ng Z_RLE             1.173 / 1.146 168 / 174    1.41
zlib-ng Z_HUFFMAN_ONLY    1.173 / 1.146 175 / 183    1.36
zlib-ng level 6           1.171 / 1.145 93 / 92      1.44
zlib level 6              1.164 / 1.140 46 / 52      1.44
ISA-L level 1             1.172 / 1.145 323 / 349    1.43
========================= ============= ============ =======

Statistics must not be mixed within a chunk: the four byte planes of the ranges give 1.18 in one section and
1.41 in four.
"""

from __future__ import annotations

from isal import isal_zlib
from isal.igzip_lib import IsalError
from zlib_ng import zlib_ng

from kvtcd.core.blob import CHUNK_BYTES, Blob, Chunk, Section, aligned
from kvtcd.core.errors import BadField

_RAW = -15
_MEM_LEVEL = 9
_LEVEL = 1
"""Without effect on `Z_RLE`, except that 0 would turn compression off."""


def deflate(data: memoryview) -> list[Chunk]:
    """Cut into chunks and compress each; one that does not shrink is stored as it is.

    A stored chunk refers to `data`, which must live until the blob is assembled.
    """
    chunks: list[Chunk] = []
    for start in range(0, len(data), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        writer = zlib_ng.compressobj(_LEVEL, zlib_ng.DEFLATED, _RAW, _MEM_LEVEL, zlib_ng.Z_RLE)
        packed = writer.compress(piece) + writer.flush()
        chunks.append(Chunk(packed, stored=False) if len(packed) < len(piece) else Chunk(piece, stored=True))
    return chunks


def inflate(blob: Blob, section: Section, out: memoryview) -> None:
    """Decompress a chunked section into `out`, which has exactly its `raw_bytes`.

    No chunk yields more than its declared size, whatever its stream says.

    Raises:
        BadChecksum: the section changed since it was written.
        BadField: a chunk that is no DEFLATE stream, or one of another length.
    """
    payload = blob.payload(section)
    start = 0
    for i, (nbytes, stored) in enumerate(section.chunks):
        target = out[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]
        piece = payload[start : start + nbytes]
        target[:] = piece if stored else _inflated(piece, len(target))
        start += aligned(nbytes)


def _inflated(piece: memoryview, nbytes: int) -> bytes:
    reader = isal_zlib.decompressobj(_RAW)
    try:
        data = reader.decompress(piece, nbytes + 1)
    except IsalError as fault:  # type: ignore[misc]  # the stub has an instance for the class
        raise BadField("blob", f"a chunk is no DEFLATE stream: {fault}") from None
    if len(data) != nbytes or not reader.eof or reader.unused_data:
        raise BadField("blob", f"a chunk does not inflate to its {nbytes} bytes")
    return data
