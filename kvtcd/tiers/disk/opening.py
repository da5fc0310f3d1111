"""Building a generation that appears only when complete, and opening one only when it is sound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kvtcd.core.errors import StoreFailed, StoreFull
from kvtcd.tiers import durable
from kvtcd.tiers.disk import directories
from kvtcd.tiers.disk.faults import Damaged
from kvtcd.tiers.disk.generation import Generation
from kvtcd.tiers.disk.inspection import Condition, fault, read_condition, write_condition

UNBOUNDED = 1 << 40
"""Quota of who adds nothing: what was held before is held again."""


def build(environment: Path, quota: int, fill: Callable[[Generation], None]) -> Path:
    """Make the next generation of `environment`, let `fill` write into it, publish it; return its directory.

    Whatever stops it, a file is either there with all its content or not at all.
    """
    part, final = directories.following(environment)
    try:
        durable.make_directory(part)
        generation = Generation(part, quota=quota, create=True)
        try:
            fill(generation)
            generation.sync()
        finally:
            generation.close()
        write_condition(part, Condition.CLEAN)
        durable.publish(part, final)
    except BaseException:
        durable.remove_tree(part)
        raise
    return final


def copied(
    old: Generation, environment: Path, quota: int, keep: Callable[[bytes], bool], names: Mapping[str, bytes]
) -> tuple[Path, bool]:
    """Build a generation of what `keep` accepts, as much as finds room; return it, and whether that is all.

    Raises:
        StoreFull: there is no room for an empty one.
    """
    whole = True

    def fill(new: Generation) -> None:
        nonlocal whole
        new.put_namespaces(names)
        try:
            for batch in old.batches(keep):
                new.write(batch, ())
        except StoreFull:
            whole = False

    return build(environment, quota, fill), whole


def open_sound(path: Path, quota: int) -> Generation:
    """Check a generation as its condition demands, and open it.

    The marker says `opening` meanwhile: if the file ends the process all the same, the next start verifies it
    in full, and the one after that sets it aside. (One interrupted opening is more often a kill.) What the
    process outlives, a permission that is missing say, leaves the condition as it was.

    Raises:
        Damaged: it must be set aside.
        StoreFailed: it cannot be opened now.
    """
    condition = read_condition(path)
    if why := fault(path, condition):
        raise Damaged("open", why)
    again = condition is Condition.OPENING
    write_condition(path, Condition.REOPENING if again else Condition.OPENING)
    try:
        generation = Generation(path, quota=quota)
    except StoreFailed:
        write_condition(path, condition)
        raise
    write_condition(path, Condition.OPEN)
    return generation


def close_clean(generation: Generation) -> None:
    """Close a generation so that the next start needs no verification."""
    try:
        generation.sync()
    finally:
        generation.close()
    write_condition(generation.path, Condition.CLEAN)
