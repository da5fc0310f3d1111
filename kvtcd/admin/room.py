"""Whether the device of a state directory has room for a second copy of what is in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from kvtcd.core.errors import StoreFull
from kvtcd.tiers.disk import at_rest


def used(environments: Iterable[Path]) -> int:
    """Return the bytes that the records of environments occupy which nobody has open.

    Raises:
        StoreFailed: one cannot be read.
    """
    nbytes = 0
    for each in environments:
        with at_rest(each) as resting:
            nbytes += resting.used
    return nbytes


def require_room(op: str, path: Path, nbytes: int) -> None:
    """Refuse to begin what would not come to its end.

    Raises:
        StoreFull: the device of `path` has less room than `nbytes`.
    """
    free = shutil.disk_usage(path).free
    if free < nbytes:
        unit, size = ("MB", 1e6) if nbytes >= 1e6 else ("kB", 1e3)
        why = f"{nbytes / size:,.0f} {unit} are needed for a second copy, {free / size:,.0f} are free"
        raise StoreFull(op, f"{why} on the device of {path}")
