"""The directories of one environment.

::

    00000007/                       the generation in use: the highest complete one
    00000006.bad-1764000000/        one that was damaged, with the time it was set aside
    00000008.part/                  being built or removed
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from kvtcd.tiers import durable

KEPT_BAD = 2
_NAME = re.compile(r"(?P<number>\d{8})(?P<bad>\.bad-\d+)?(?P<part>\.part)?")


def current(environment: Path) -> Path | None:
    """Return the generation in use."""
    complete = _complete(environment)
    return complete[-1] if complete else None


def following(environment: Path) -> tuple[Path, Path]:
    """Return where to build the next generation, and its final name: a number never used before."""
    numbers = [int(match["number"]) for match in map(_NAME.fullmatch, _names(environment)) if match]
    name = f"{max(numbers, default=0) + 1:08d}"
    return environment / (name + durable.PART), environment / name


def sweep(environment: Path, *, bad: bool = False) -> None:
    """Remove what is unfinished or superseded, and with `bad` also what was set aside as damaged."""
    for name in _names(environment):
        match = _NAME.fullmatch(name)
        if match and (match["part"] or (bad and match["bad"])):
            durable.remove_tree(environment / name)
    for superseded in _complete(environment)[:-1]:
        durable.remove_tree(superseded)


def clear(environment: Path) -> None:
    """Remove everything; a removal needs no room."""
    for name in _names(environment):
        if _NAME.fullmatch(name):
            durable.remove_tree(environment / name)


def set_aside(generation: Path) -> None:
    """Rename a damaged generation, and remove all but the newest two of those."""
    generation.rename(generation.with_name(f"{generation.name}.bad-{int(time.time())}"))
    durable.sync_directory(generation.parent)
    for name in damaged(generation.parent)[:-KEPT_BAD]:
        durable.remove_tree(generation.parent / name)


def damaged(environment: Path) -> list[str]:
    """Return the names of generations that were set aside as damaged, the oldest first."""
    return [name for name in _names(environment) if (match := _NAME.fullmatch(name)) and match["bad"]]


def _complete(environment: Path) -> list[Path]:
    matches = filter(None, map(_NAME.fullmatch, _names(environment)))
    return [environment / match.string for match in matches if not (match["bad"] or match["part"])]


def _names(environment: Path) -> list[str]:
    return sorted(entry.name for entry in environment.iterdir())
