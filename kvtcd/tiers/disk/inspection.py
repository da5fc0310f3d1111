"""Whether the data file of a generation may be handed to LMDB, which maps it and trusts what it maps."""

from __future__ import annotations

import os
import struct
from enum import StrEnum
from pathlib import Path

import lmdb.verify

from kvtcd.tiers.disk.faults import DATA

# mdb.c of LMDB 0.9, 64 bits: a page header of 16 bytes (page number first, flags at 10), then `MDB_meta`.
# The page size is kept in the first field of the free database's record.
_META = struct.Struct("=Q2xH4x II QQ I44x 48x QQ")
_META_MAGIC = 0xBEEFC0DE
_META_VERSION = 1
_META_FLAG = 0x08

_MARKER = "condition"
_MARKER_BYTES = 16


class Condition(StrEnum):
    """How a generation was left, as its marker file says."""

    CLEAN = "clean"
    """Closed in order: all is durable."""
    OPENING = "opening"
    """The process ended while it was opened; perhaps the file ended it."""
    REOPENING = "opening again"
    """The same twice in a row."""
    OPEN = "open"
    """The process, or the machine, ended while it was in use."""


def read_condition(generation: Path) -> Condition:
    """Return how the generation was left; a missing or unreadable marker counts as in use."""
    try:
        return Condition((generation / _MARKER).read_bytes().rstrip(b" ").decode("ascii"))
    except (FileNotFoundError, ValueError):
        return Condition.OPEN


def write_condition(generation: Path, condition: Condition) -> None:
    """Set the marker, durably; in place, so that it can be set on a full device."""
    descriptor = os.open(generation / _MARKER, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, condition.encode("ascii").ljust(_MARKER_BYTES), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fault(generation: Path, condition: Condition) -> str | None:
    """Return why LMDB must not open this generation, or None; lengthen its file if that is all it needs."""
    why, lacking = diagnosis(generation, condition)
    if why is None and lacking is not None:
        os.truncate(generation / DATA, lacking)
    return why


def diagnosis(generation: Path, condition: Condition) -> tuple[str | None, int | None]:
    """Return why LMDB must not open this generation, or None; and how long its file should be, if longer.

    After a clean close it is enough that the file is as long as its newer meta page says: a page beyond the
    end would end the process with SIGBUS. Otherwise all pages that LMDB would trust are checked without LMDB.
    If the file is sound and yet too short, it lacks free pages that were never written, or pages of blobs:
    zeros may take their place, which the MAC of a record does not accept. Nothing is changed.
    """
    if condition is Condition.REOPENING:
        return "opening it ended the process twice", None
    data = generation / DATA
    if not data.exists():
        return f"has no {DATA}", None
    needed = _length(data)
    whole = needed is not None and data.stat().st_size >= needed
    if condition is Condition.CLEAN and whole:
        return None, None
    try:
        problems = lmdb.verify.verify(str(generation))  # type: ignore[no-untyped-call] # lmdb types only its core
    except (lmdb.verify.VerifyError, struct.error, IndexError) as error:
        return str(error), None
    if problems or needed is None:
        return "; ".join(problems[:3]) or "its meta pages cannot be read", None
    return None, None if whole else needed


def _length(data: Path) -> int | None:
    """Return how long the file must be by its newer meta page, or None when a meta page is not one."""
    with data.open("rb") as file:
        metas: list[tuple[int, int]] = []
        page = 0
        for index in range(2):
            head = os.pread(file.fileno(), _META.size, index * page)
            if len(head) < _META.size:
                return None
            _, flags, magic, version, _, _, page, last, transaction = _META.unpack(head)
            if not flags & _META_FLAG or magic != _META_MAGIC or version != _META_VERSION:
                return None
            metas.append((transaction, (last + 1) * page))
    _, length = max(metas)
    return length
