"""Changes to directories that a power loss leaves either not begun or complete.

A name becomes visible by one rename, after its content is on the device, and disappears by one rename before
its content is unlinked. What ends in `PART` is therefore never complete and may be removed at any time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PART = ".part"
"""Suffix of what is being built or being removed."""


def sync_directory(path: Path) -> None:
    """Make the names in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create `path` for its owner alone (0700) unless it exists; the parent must exist."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return
    sync_directory(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Create or replace `path`, readable by its owner alone (0600)."""
    with new_file(path) as file:
        file.write(content)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Create or replace `path` (0600) by what is written while this is entered; an error changes nothing."""
    part = path.with_name(path.name + PART)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file; nothing happens when it does not exist."""
    path.unlink(missing_ok=True)
    sync_directory(path.parent)


def publish(part: Path, final: Path) -> None:
    """Give a built directory its name; the files in it must be durable already."""
    sync_directory(part)
    part.rename(final)
    sync_directory(final.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory and all below it; nothing happens when it does not exist."""
    doomed = path if path.name.endswith(PART) else path.with_name(path.name + PART)
    if doomed != path and path.exists():
        if doomed.exists():
            shutil.rmtree(doomed)
        path.rename(doomed)
        sync_directory(path.parent)
    if doomed.exists():
        shutil.rmtree(doomed)
        sync_directory(path.parent)
