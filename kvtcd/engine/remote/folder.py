"""What the remote tier needs of the folder of profiles. All of it blocks."""

from __future__ import annotations

from typing import Protocol

from kvtcd.engine.ports import Value


class Draft(Protocol):
    """A profile that is being written."""

    def write(self, start: int, data: Value) -> None:
        """Write a part.

        Raises:
            OSError: it could not be written.
        """

    def finish(self) -> None:
        """Let it be one of the profiles that are here; either way it is a draft no more.

        Raises:
            Corrupt: it is not the one with its digest, or none that this release reads.
            OSError: it could not be written.
        """

    def discard(self) -> None:
        """Remove what was written, unless it has become a profile."""


class Folder(Protocol):
    """The profiles that are here."""

    def size(self, digest: bytes) -> int:
        """Return the bytes of a profile.

        Raises:
            UnknownProfile: it is not here.
        """

    def piece(self, digest: bytes, start: int, nbytes: int) -> bytes:
        """Return some bytes of a profile.

        Raises:
            UnknownProfile: it is not here, or not all of them are.
        """

    def draft(self, digest: bytes) -> Draft:
        """Begin to write the profile with this SHA-256.

        Raises:
            OSError: it cannot be written.
        """
