"""Files that commands write at their end: refused before the work begins, and then whole or not at all.

What is there and is no regular file, such as a pipe or what lies below /dev, is written to as it is.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtcd.core.errors import ConfigError


def check(path: Path) -> None:
    """Refuse a file that cannot be written; what is there stays, and what is not there is not made.

    Raises:
        ConfigError: it is a folder, its folder is not there, or nothing may be written there.
    """
    try:
        if path.is_dir():
            raise _refused(path, "it is a folder; name a file")
        if not path.parent.is_dir():
            raise _refused(path, f"there is no folder {path.parent}")
        if _in_place(path):
            if not os.access(path, os.W_OK):
                raise _refused(path, "it may not be written to")
            return
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise _refused(path, str(error.strerror)) from None


def check_folder(path: Path) -> None:
    """Refuse a folder, there or still to be made, that no file can be written into.

    Raises:
        ConfigError: there is something else of that name, or nothing may be written there.
    """
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise _refused(path, f"{there} is no folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _refused(path, f"{there}: {error.strerror}") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file, of the same suffix, that becomes `path` at the end.

    Raises:
        ConfigError: it cannot be written; `path` is as it was.
    """
    target = path.resolve()
    part = path if _in_place(path) else target.with_name(f".{target.stem}.{os.getpid()}.part{target.suffix}")
    try:
        yield part
        if part is not path:
            part.replace(target)
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from None
    finally:
        if part is not path:
            part.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Write a text.

    Raises:
        ConfigError: it cannot be written; `path` is as it was.
    """
    with replacing(path) as part:
        part.write_text(text, "utf-8")


def _in_place(path: Path) -> bool:
    """Tell whether a file is written to, not replaced: it cannot be, or is more than its bytes."""
    if not path.exists():
        return False
    special = not path.is_file() or Path("/dev") in path.absolute().parents
    return special or not os.access(path.resolve().parent, os.W_OK)


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(path, "", f"cannot be written: {why}")
