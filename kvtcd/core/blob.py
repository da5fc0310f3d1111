"""The content of a packed block: one fixed header, a section table, a chunk table, then the sections.

Little endian throughout::

    fixed header    `_HEADER`, 160 bytes: magic and version first, checksum last
    section table   `section_count` x `_SECTION`, 56 bytes each
    chunk table     one u32 for each chunk of each section: stored length, top bit = stored as is
    sections        each at a multiple of 16 bytes from the start, its chunks at multiples of 16 too

A section is a run of tokens in one kind of coding. A chunked section is cut into pieces of `chunk_bytes`
uncompressed bytes, each an independent raw DEFLATE stream (RFC 1951) or, when that does not shrink it, the
bytes themselves. The header checksum covers header and both tables; every section has its own checksum
(xxh3-64), which finds faults introduced after the record's MAC was checked.

Nothing here is believed: `parse` checks length, magic, version, checksum, ranges and sums, in this order,
before a caller sees a field. It allocates nothing in proportion to a claimed size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from kvtcd.core.errors import BadChecksum, BadField, BadMagic, BadVersion, Truncated
from kvtcd.core.layout import Dtype

MAGIC = b"KVTB"
VERSION = 1
ALIGN = 16
CHUNK_BYTES = 16 * 1024
ALL_STREAMS = 255
MAX_RAW_BYTES = 1 << 36
"""Bound on the raw size of one block, 64 GiB."""

_HEADER = struct.Struct("<4sHBBBBBBIfIIQQQ32s32s36sQ")
_SECTION = struct.Struct("<BBBBIIIQQQIIQ")
_STORED = 1 << 31
_MAX_SECTIONS = 4096
_DTYPES = (Dtype.F32, Dtype.BF16, Dtype.F16)


class CodecId(IntEnum):
    """Codecs by their number in the header. A number is never given to another codec."""

    RAW = 0
    LOSSLESS = 1
    KVTC = 2
    KVTC2 = 3
    TQ = 4
    TQ_PROD = 5
    QJL = 6
    SQ = 7
    KIVI = 8
    GEAR = 9
    XKV = 10
    CACHEGEN = 11
    FP8 = 12


class BasisId(IntEnum):
    """Which basis of the profile was used."""

    NONE = 0
    PLAIN = 1
    WEIGHTED = 2


class Kind(IntEnum):
    """What a section holds."""

    RAW = 0
    """All streams of the token run as they are, not chunked."""
    PLANE = 1
    """One byte plane (`part`) of one stream's token run: exact."""
    CODES = 2
    """Quantised coefficients of one stream in codes of `part` bits."""
    RANGES = 3
    """Scales and shifts (float16) of the groups of one stream."""
    CLASSES = 4
    """Step class of each token, one byte, for all streams; `part` is that of the run."""
    ESCAPES = 5
    """What is beyond the codes of one stream: low bytes, then high bytes."""
    ARRAY = 6
    """An array of one stream that its codec numbers `part`: chunks stored as they are, none deflated."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a blob says of itself.

    `plan` names the plan in the profile (0: none), or holds options and seed; `step` is the quantiser's, or
    another dial; `token_classes` counts step classes of tokens (0: none). `first_token` is None when unknown.
    """

    codec: CodecId
    codec_version: int
    dtype: Dtype
    layout: bytes
    tokens: int
    raw_bytes: int
    first_token: int | None = None
    basis: BasisId = BasisId.NONE
    plan: int = 0
    step: float = 0.0
    token_classes: int = 0
    profile: bytes = bytes(32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a section: its bytes, and whether they are stored as they are."""

    data: bytes | memoryview
    stored: bool


@dataclass(frozen=True, slots=True)
class Run:
    """A section to be written. `chunks` is empty for an unchunked section, whose bytes are `data`."""

    kind: Kind
    stream: int
    part: int
    token_start: int
    token_count: int
    raw_bytes: int
    chunks: Sequence[Chunk] = ()
    data: bytes | memoryview = b""


@dataclass(frozen=True, slots=True)
class Section:
    """A section found in a blob; `chunks` holds (stored length, stored as is) of each chunk."""

    kind: Kind
    stream: int
    part: int
    token_start: int
    token_count: int
    raw_bytes: int
    chunk_bytes: int
    offset: int
    nbytes: int
    chunks: tuple[tuple[int, bool], ...]
    checksum: int


@dataclass(frozen=True, slots=True)
class Blob:
    """A parsed blob: header, sections, and the bytes they lie in."""

    header: Header
    sections: tuple[Section, ...]
    data: memoryview

    def payload(self, section: Section) -> memoryview:
        """Return the stored bytes of a section after comparing its checksum.

        Raises:
            BadChecksum: the bytes changed since they were written.
        """
        stored = self.data[section.offset : section.offset + section.nbytes]
        if xxhash.xxh3_64_intdigest(stored) != section.checksum:
            raise BadChecksum("blob", f"section at {section.offset} does not match its checksum")
        return stored


def assemble(header: Header, runs: Sequence[Run]) -> bytearray:
    """Write a blob. The caller vouches for the contents; `parse` accepts what this writes."""
    chunk_count = sum(len(run.chunks) for run in runs)
    offset = aligned(_HEADER.size + _SECTION.size * len(runs) + 4 * chunk_count)
    tables_end = offset
    bodies: list[tuple[int, int]] = []
    for run in runs:
        nbytes = sum(aligned(len(c.data)) for c in run.chunks) if run.chunks else aligned(len(run.data))
        bodies.append((offset, nbytes))
        offset += nbytes
    out = bytearray(offset)
    at, table = _HEADER.size, _HEADER.size + _SECTION.size * len(runs)
    for run, (start, nbytes) in zip(runs, bodies, strict=True):
        position = start
        for piece in run.chunks or (Chunk(run.data, stored=True),):
            out[position : position + len(piece.data)] = piece.data
            position += aligned(len(piece.data))
        for piece in run.chunks:
            struct.pack_into("<I", out, table, len(piece.data) | (_STORED if piece.stored else 0))
            table += 4
        with memoryview(out) as view:
            checksum = xxhash.xxh3_64_intdigest(view[start : start + nbytes])
        _SECTION.pack_into(
            out, at, run.kind, run.stream, run.part, 0, run.token_start, run.token_count,
            CHUNK_BYTES if run.chunks else 0, run.raw_bytes, start, nbytes, len(run.chunks), 0, checksum,
        )  # fmt: skip
        at += _SECTION.size
    _HEADER.pack_into(out, 0, *_header_fields(header, len(runs), len(out)), 0)
    struct.pack_into("<Q", out, _HEADER.size - 8, _header_checksum(memoryview(out)[:tables_end]))
    return out


def parse(data: memoryview) -> Blob:
    """Check a blob in full, apart from the section checksums, which `Blob.payload` compares.

    Args:
        data: the whole blob, flat bytes.

    Raises:
        Truncated, BadMagic, BadVersion, BadChecksum, BadField: the first rule that is broken.
    """
    if len(data) < _HEADER.size:
        raise Truncated("blob", f"{len(data)} bytes, the header alone has {_HEADER.size}")
    (magic, version, codec, codec_version, flags, dtype, basis, classes, plan, step, tokens, section_count,
     first_token, raw_bytes, blob_bytes, profile, layout, reserved, checksum,
    ) = _HEADER.unpack_from(data)  # fmt: skip
    if magic != MAGIC:
        raise BadMagic("blob", f"begins with {magic.hex()}, not {MAGIC.hex()}")
    if version != VERSION:
        raise BadVersion("blob", f"version {version}; this release reads {VERSION}")
    if blob_bytes != len(data):
        raise Truncated("blob", f"{len(data)} bytes of {blob_bytes}")
    table = _HEADER.size + _SECTION.size * section_count
    if section_count > _MAX_SECTIONS or table > len(data):
        raise BadField("blob", f"{section_count} sections")
    rows = list(_SECTION.iter_unpack(data[_HEADER.size : table]))
    tables_end = aligned(table + 4 * sum(row[10] for row in rows))
    if tables_end > len(data):
        raise BadField("blob", "the chunk table is longer than the blob")
    if _header_checksum(data[:tables_end]) != checksum:
        raise BadChecksum("blob", "the header does not match its checksum")
    if codec not in tuple(CodecId) or basis not in tuple(BasisId) or dtype >= len(_DTYPES) or flags > 1:
        raise BadField("blob", f"codec {codec}, basis {basis}, dtype {dtype}, flags {flags}")
    if any(reserved) or not 1 <= tokens <= raw_bytes <= MAX_RAW_BYTES:
        raise BadField("blob", f"{tokens} tokens in {raw_bytes} raw bytes")
    lengths = struct.unpack_from(f"<{sum(row[10] for row in rows)}I", data, table)
    sections: list[Section] = []
    end, used = tables_end, 0
    for row in rows:
        count = row[10]
        section = _section(row, lengths[used : used + count], tokens, raw_bytes)
        if section.offset != end:
            raise BadField("blob", f"section at {section.offset}, expected at {end}")
        end += section.nbytes
        used += count
        sections.append(section)
    if end != len(data):
        raise BadField("blob", f"sections end at {end} of {len(data)} bytes")
    header = Header(
        codec=CodecId(codec), codec_version=codec_version, dtype=_DTYPES[dtype], layout=layout, tokens=tokens,
        raw_bytes=raw_bytes, first_token=first_token if flags else None, basis=BasisId(basis), plan=plan,
        step=step, token_classes=classes, profile=profile,
    )  # fmt: skip
    return Blob(header, tuple(sections), data)


def _section(row: tuple[int, ...], lengths: tuple[int, ...], tokens: int, raw_bytes: int) -> Section:
    (kind, stream, part, zero, start, count, chunk_bytes, nraw, offset, nbytes, chunks, zero2, checksum) = row
    if kind not in tuple(Kind) or zero or zero2 or not count or start + count > tokens:
        raise BadField("blob", f"section of kind {kind}, tokens {start}+{count}")
    # Codes of at most 8 bits and their ranges are never larger than twice the raw values they stand for.
    if not nraw <= 2 * raw_bytes + ALIGN or offset % ALIGN or nbytes % ALIGN:
        raise BadField("blob", f"section of {nraw} bytes at {offset}")
    if kind == Kind.RAW:
        if chunks or chunk_bytes or nbytes != aligned(nraw):
            raise BadField("blob", "a raw section of another length")
    elif chunk_bytes != CHUNK_BYTES or chunks != -(-nraw // CHUNK_BYTES):
        raise BadField("blob", f"{chunks} chunks of {chunk_bytes} for {nraw} bytes")
    pieces = tuple((length & ~_STORED, bool(length & _STORED)) for length in lengths)
    for i, (length, stored) in enumerate(pieces):
        full = min(CHUNK_BYTES, nraw - i * CHUNK_BYTES)
        if length != full if stored else not 0 < length < full:
            raise BadField("blob", f"a chunk of {length} bytes for {full}")
    if pieces and sum(aligned(length) for length, _ in pieces) != nbytes:
        raise BadField("blob", "chunk lengths do not add up to their section")
    return Section(
        Kind(kind), stream, part, start, count, nraw, chunk_bytes, offset, nbytes, pieces, checksum
    )


def _header_fields(header: Header, section_count: int, blob_bytes: int) -> tuple[object, ...]:
    return (
        MAGIC, VERSION, header.codec, header.codec_version, int(header.first_token is not None),
        _DTYPES.index(header.dtype), header.basis, header.token_classes, header.plan, header.step,
        header.tokens, section_count, header.first_token or 0, header.raw_bytes, blob_bytes,
        header.profile, header.layout, bytes(36),
    )  # fmt: skip


def _header_checksum(tables: memoryview) -> int:
    """xxh3-64 of header and tables, with the checksum field itself left out."""
    state = xxhash.xxh3_64(tables[: _HEADER.size - 8])
    state.update(tables[_HEADER.size :])
    return state.intdigest()


def aligned(nbytes: int) -> int:
    """Round up to a multiple of `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN
