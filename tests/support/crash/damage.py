"""Children that open data files which something has damaged while nobody used them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from support.crash import workload
from support.crash.sealed import version_of
from support.records import keys_in

from kvtcd.core.errors import Corrupt, StoreFailed
from kvtcd.tiers.disk import PAGE, Environment

_TREE_FLAGS = 0x03
_META_BYTES = 152


def damage(environment: Path, kind: str, condition: str, draw: int) -> None:
    """Do one random damage of a kind of `DAMAGES` to the data file, and say how the file was left."""
    [data] = environment.glob("*/data.mdb")
    damaged = bytearray(data.read_bytes())
    DAMAGES[kind](damaged, random.Random(draw))
    data.write_bytes(damaged)
    (data.parent / "condition").write_bytes(condition.encode())


def inspect(path: str) -> dict[str, Any]:
    """Open an environment and read everything.

    Returns:
        quarantined; accepted: key and hash of each record its digest vouches for; refused: records with a
        wrong digest; missing: records with parts missing; failed: why the engine gave up, if it did.
    """
    environment = Environment(Path(path), quota=workload.QUOTA)
    seen: dict[str, Any] = {
        "quarantined": environment.quarantined,
        "accepted": [],
        "refused": 0,
        "missing": 0,
        "failed": "",
    }
    try:
        for key in keys_in(environment):
            try:
                found = environment.read(key)
            except Corrupt:
                seen["missing"] += 1
                continue
            if found is None or version_of(key, *found) is None:
                seen["refused"] += 1
            else:
                seen["accepted"].append([key.hex(), hash_of(*found)])
    except StoreFailed as error:
        seen["failed"] = str(error)
    environment.close()
    return seen


def hash_of(envelope: bytes, blob: npt.NDArray[np.uint8] | bytes) -> str:
    """Return a hash of all bytes of a record, whatever is in them."""
    return hashlib.sha256(envelope + bytes(blob)).hexdigest()


def _flip(file: bytearray, at: int, draw: random.Random) -> None:
    file[at] ^= 1 << draw.randrange(8)


def _bit(file: bytearray, draw: random.Random) -> None:
    _flip(file, draw.randrange(len(file)), draw)


def _tree_bit(file: bytearray, draw: random.Random) -> None:
    page = draw.choice(list(_tree_pages(file)))
    _flip(file, page + draw.randrange(PAGE), draw)


def _meta_bit(file: bytearray, draw: random.Random) -> None:
    _flip(file, draw.randrange(2) * PAGE + draw.randrange(_META_BYTES), draw)


def _cut(file: bytearray, draw: random.Random) -> None:
    del file[draw.randrange(len(file)) :]


def _zero(file: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(file) // PAGE) * PAGE
    file[at : at + PAGE] = bytes(PAGE)


def _zero_tree(file: bytearray, draw: random.Random) -> None:
    at = draw.choice(list(_tree_pages(file)))
    file[at : at + PAGE] = bytes(PAGE)


def _swap(file: bytearray, draw: random.Random) -> None:
    one, two = (PAGE * page for page in draw.sample(range(len(file) // PAGE), 2))
    file[one : one + PAGE], file[two : two + PAGE] = file[two : two + PAGE], file[one : one + PAGE]


def _tree_pages(file: bytearray) -> Iterator[int]:
    """Yield the offset of every page with its own number and the flag of a branch or a leaf."""
    for at in range(2 * PAGE, len(file), PAGE):
        number = int.from_bytes(file[at : at + 8], "little")
        if number == at // PAGE and file[at + 10] & _TREE_FLAGS and not file[at + 11]:
            yield at


DAMAGES: dict[str, Callable[[bytearray, random.Random], None]] = {
    "bit": _bit,
    "tree_bit": _tree_bit,
    "meta_bit": _meta_bit,
    "cut": _cut,
    "zero": _zero,
    "zero_tree": _zero_tree,
    "swap": _swap,
}
