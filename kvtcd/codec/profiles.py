"""The folder of profiles: which one fits a namespace, and the one that a blob names."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from kvtcd.codec.draft import Draft
from kvtcd.codec.profile import SUFFIX, Profile, file_name, is_named, load, read_origin
from kvtcd.codec.residency import Residency
from kvtcd.core.errors import Corrupt, KvtcdError, ProfileMismatch, UnknownProfile
from kvtcd.core.identity import Identity

_log = logging.getLogger(__name__)


class ProfileFolder:
    """Profiles in a folder, each loaded once. Blocking; from any thread.

    The folder is read anew at every search, so a profile that is copied there serves the next namespace.

    Args:
        path: of the folder.
        residency: keeps bases of all of them on devices; None: without limits.
    """

    def __init__(self, path: Path, residency: Residency | None = None) -> None:
        self._path, self._residency = path, residency or Residency()
        self._loaded: dict[bytes, Profile] = {}
        self._digests: dict[tuple[Path, int, int], bytes] = {}

    def find(self, identity: Identity) -> Profile | None:
        """Return the newest profile that fits a namespace.

        Files that are not named by their digest, which alone tells that they are whole, and damaged ones are
        passed over with a warning; there is one, too, of a profile that was fitted to few tokens.
        """
        for path in sorted(self._path.glob(f"*{SUFFIX}"), key=_age, reverse=True):
            try:
                (origin := read_origin(path)).check(identity)
                if is_named(path):
                    profile = self._load(path)
                    if origin.starved:
                        _log.warning("%s is used, but was %s", path, origin.starved)
                    return profile
                _log.warning("%s is passed over: %s", path, misnamed(self._digest(path)))
            except ProfileMismatch:
                continue
            except (KvtcdError, OSError) as fault:
                _log.warning("%s is passed over: %s", path, fault)
        return None

    def get(self, digest: bytes) -> Profile:
        """Return the profile with a digest.

        Raises:
            UnknownProfile: it is not in the folder, or damaged there. (Never `Corrupt`: that would be said of
                the blob, which may be sound.)
        """
        if digest in self._loaded:
            return self._loaded[digest]
        try:
            return self._load(self.located(digest))
        except OSError:
            raise UnknownProfile(digest) from None
        except Corrupt as fault:
            _log.warning("%s", fault)
            raise UnknownProfile(digest) from None

    def size(self, digest: bytes) -> int:
        """Return the bytes of the profile with a digest.

        Raises:
            UnknownProfile: it is not in the folder.
        """
        try:
            return self.located(digest).stat().st_size
        except OSError:
            raise UnknownProfile(digest) from None

    def piece(self, digest: bytes, start: int, nbytes: int) -> bytes:
        """Return some bytes of the profile with a digest.

        Raises:
            UnknownProfile: it is not in the folder, or not all of them are there.
        """
        try:
            with self.located(digest).open("rb") as file:
                file.seek(start)
                found = file.read(nbytes)
        except OSError:
            raise UnknownProfile(digest) from None
        if len(found) != nbytes:
            raise UnknownProfile(digest)
        return found

    def draft(self, digest: bytes) -> Draft:
        """Begin to write the profile with a digest.

        Raises:
            OSError: it cannot be written.
        """
        return Draft(self._path / file_name(digest), digest, self._load)

    def located(self, digest: bytes) -> Path:
        """Return the file with this content: under its digest, or under any name its owner gave it.

        Without one, return where it would be.
        """
        named = self._path / file_name(digest)
        others = () if named.exists() else self._path.glob(f"*{SUFFIX}")
        return next((path for path in others if self._digest(path) == digest), named)

    def _digest(self, path: Path) -> bytes:
        """Return the SHA-256 of a file, read again only when the file has changed."""
        stat = path.stat()
        version = (path, stat.st_size, stat.st_mtime_ns)
        if version not in self._digests:
            with path.open("rb") as file:
                self._digests[version] = hashlib.file_digest(file, "sha256").digest()
        return self._digests[version]

    def _load(self, path: Path) -> Profile:
        profile = load(path, self._residency)
        return self._loaded.setdefault(profile.digest, profile)


def misnamed(digest: bytes) -> str:
    """Say why a daemon packs nothing with a profile whose file is not named by its digest."""
    return (
        "its name does not tell whether it is whole, so a daemon does not pack with it; if it is what "
        f"`kvtcd calibrate` wrote, call it {file_name(digest)}"
    )


def _age(path: Path) -> tuple[int, str]:
    """Sort key: modification time, then name, so that the choice does not depend on the file system."""
    try:
        return path.stat().st_mtime_ns, path.name
    except OSError:
        return 0, path.name
