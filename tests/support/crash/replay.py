"""What a disk may hold after a power loss, from a recording of what was written to it and synced."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

SECTOR = 512
_HEAD = struct.Struct("=c7xQQ")


@dataclass(frozen=True)
class Event:
    """One call, in the kinds of shim.c."""

    kind: str
    offset: int
    data: bytes


def build_shim(folder: Path) -> Path:
    """Compile shim.c, or skip the test."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the recorder with")
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def events(recording: bytes) -> Iterator[Event]:
    """Yield what was recorded, in order."""
    at = 0
    while at < len(recording):
        kind, offset, length = _HEAD.unpack_from(recording, at)
        at += _HEAD.size
        yield Event(kind.decode(), offset, recording[at : at + length])
        at += length


def image(base: bytes, history: Sequence[Event], draw: random.Random) -> bytes:
    """Return the file after a power loss at the end of `history`.

    All that was synced is there, and of the rest any subset, in order, some of it torn between sectors.
    """
    disk = bytearray(base)
    pending: list[Event] = []
    for event in history:
        if event.kind == "d":
            _apply(disk, event)
        elif event.kind in "wt":
            pending.append(event)
        elif event.kind == "s":
            for written in pending:
                _apply(disk, written)
            pending.clear()
    kept = draw.random()
    for event in pending:
        fate = draw.random()
        if fate < kept:
            _apply(disk, event)
        elif fate < kept + 0.2:
            for piece in _torn(event, draw):
                _apply(disk, piece)
    return bytes(disk)


def _torn(event: Event, draw: random.Random) -> Iterator[Event]:
    if event.kind == "t":
        return
    for at in range(0, len(event.data), SECTOR):
        if draw.random() < 0.5:
            yield Event("w", event.offset + at, event.data[at : at + SECTOR])


def _apply(disk: bytearray, event: Event) -> None:
    if event.kind == "t":
        del disk[event.offset :]
        disk.extend(bytes(event.offset - len(disk)))
        return
    disk.extend(bytes(max(0, event.offset - len(disk))))
    disk[event.offset : event.offset + len(event.data)] = event.data
