"""A profile on its way into its folder: written in parts, and there only once it is whole."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvtcd.core.errors import BadChecksum


class Draft:
    """A file without its name yet. Blocking; from one thread at a time.

    Args:
        path: of the profile, once it is one.
        digest: SHA-256 of its content.
        check: reads a profile; raises `Corrupt` for what is none.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, digest: bytes, check: Callable[[Path], object]) -> None:
        self._path, self._digest, self._check = path, digest, check
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        self._file, self._part = os.fdopen(descriptor, "w+b", buffering=0), Path(name)

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write a part.

        Raises:
            OSError: it could not be written.
        """
        self._file.seek(start)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def finish(self) -> None:
        """Put it into the folder, unless what it holds is no profile; either way it is a draft no more.

        Raises:
            Corrupt: it is not the one with its digest, or none that this release reads.
            OSError: it could not be written.
        """
        try:
            self._file.seek(0)
            if hashlib.file_digest(self._file, "sha256").digest() != self._digest:
                raise BadChecksum("profile", f"is not {self._digest.hex()}")
            os.fsync(self._file.fileno())
            self._part.replace(self._path)
        finally:
            self.discard()
        try:
            self._check(self._path)
        except BaseException:
            self._path.unlink()
            raise

    def discard(self) -> None:
        """Remove what was written, unless it has become a profile."""
        self._file.close()
        self._part.unlink(missing_ok=True)
