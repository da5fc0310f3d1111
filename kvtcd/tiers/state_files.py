"""What a state directory is and has, looked at without holding it.

::

    state/                 0700
      lock                 flock of the one process that uses it
      format               number of the form of all that is here; without it, 1
      master.key           32 random bytes, 0600; not there if the key is kept elsewhere
      rekey                which step a change of the master key is in, while there is one (`rekeying`)
      remote               what a store that is shared with other daemons still has to do
      tenants/<hex>/       one disk environment per tenant
"""

from __future__ import annotations

import ctypes
import fcntl
import hmac
import logging
import os
import re
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvtcd.core.errors import ConfigError
from kvtcd.tiers import rekeying
from kvtcd.tiers.rekeying import Rekeying

MASTER_KEY_BYTES = 32
MASTER_KEY = "kvtcd.master-key"
"""Name of the credential that may hold the key instead of the file."""
FORMAT = 1
"""Raised by a release that stores what those before it would take for damage, and remove."""
FIELD = "state directory"
_TENANT = re.compile(r"[0-9a-f]{2,64}")
_NUMBER = re.compile(rb"\s*[1-9][0-9]{0,8}\s*")
_log = logging.getLogger(__name__)

# Values of statfs(2) `f_type`, from linux/magic.h and the file systems' own headers. LMDB needs a page cache
# that is coherent between mmap and write, and locks that hold: a remote file system promises neither.
_REFUSED = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x65735546: "FUSE",
    0x01021997: "9p",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x9FA0: "procfs",
    0x62656572: "sysfs",
}
_DOUBTFUL = {
    0x01021994: "tmpfs: blocks on disk are lost when the machine restarts",
    0x794C7630: "overlayfs: blocks on disk are lost with the container",
}


class StateFiles:
    """The files of a state directory that is there, or may be made; nothing here changes one.

    Args:
        path: of the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tenants = path / "tenants"

    def examine(self) -> bool:
        """Refuse what `StateDirectory` would; tell whether a process holds it now.

        Raises:
            ConfigError: as there.
        """
        if not self.path.exists():
            _require_writable(self.path)
            _require_local(self.path)
            return False
        _require_safe(self.path)
        _require_writable(self.path)
        read_format(self.path)
        return _held(self.path)

    def known_key(self, given: bytes | None = None) -> bytes | None:
        """Return the 32 bytes from which all keys of this store are derived, None if there are none yet.

        Args:
            given: a key that is kept elsewhere. A file of another one is refused: to go on with either would
                remove what is stored under the other.

        Raises:
            ConfigError: the file, or what is given, has another size; the file cannot be read, or can be read
                by others; they differ; something is stored and there is no key: under a new one it would go.
        """
        path = self.path / "master.key"
        if given is not None:
            if len(given) != MASTER_KEY_BYTES:
                raise ConfigError("credential", MASTER_KEY, f"not {MASTER_KEY_BYTES} bytes long")
            if path.exists() and not hmac.compare_digest(self.known_key() or b"", given):
                why = f"differs from {path}; copy that file to the credential, or remove it to begin anew"
                raise ConfigError("credential", MASTER_KEY, why)
            return given
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                key = file.read(MASTER_KEY_BYTES + 1)
        except FileNotFoundError:
            self._require_nothing_stored(path)
            return None
        except OSError as error:
            kind = "is a link" if path.is_symlink() else f"cannot be read: {error.strerror}"
            raise ConfigError(
                path, "", f"{kind}; it must be a file of uid {os.geteuid()}, mode 0600"
            ) from error
        if mode & 0o077:
            raise ConfigError(path, "", f"others may read it (mode {mode:04o}); chmod 600 it")
        if len(key) != MASTER_KEY_BYTES:
            why = f"not {MASTER_KEY_BYTES} bytes long; restore it, or {self._anew()}"
            raise ConfigError(path, "", why)
        return key

    def _require_nothing_stored(self, path: Path) -> None:
        if stored := len([*self.tenants()]):
            why = (
                f"is missing, and what is stored here ({stored} tenants) was stored under it; restore it, "
                f"hand it over as the credential {MASTER_KEY}, or {self._anew()}"
            )
            raise ConfigError(path, "", why)

    def _anew(self) -> str:
        return f"remove {self._tenants} and it to begin with an empty store"

    def remote(self) -> bytes | None:
        """Return what a store that is shared still has to do, None if there is nothing.

        Raises:
            ConfigError: it cannot be read.
        """
        file = self.path / "remote"
        try:
            return file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(file, "", f"cannot be read: {error.strerror}") from error

    def rekeying(self) -> Rekeying | None:
        """Return which step a change of the master key is in, None if there is none.

        Raises:
            ConfigError: it cannot be read.
        """
        return rekeying.read(self.path)

    def tenants(self) -> Iterator[str]:
        """Yield the hex name of every tenant that has a directory, in order.

        Raises:
            ConfigError: nobody can tell, for want of a right.
        """
        try:
            found = [*self._tenants.iterdir()] if self._tenants.is_dir() else []
            names = sorted(entry.name for entry in found if entry.is_dir())
        except OSError as error:
            raise ConfigError(self._tenants, "", f"cannot be read: {error.strerror}; chmod 700 it") from error
        yield from filter(_TENANT.fullmatch, names)

    def tenant(self, tenant_hex: str) -> Path:
        """Return where the disk environment of one tenant lies; it need not exist.

        Raises:
            ValueError: not 2 to 64 lower-case hex digits.
        """
        if not _TENANT.fullmatch(tenant_hex):
            raise ValueError(f"{tenant_hex!r} is not a tenant's name of 2 to 64 lower-case hex digits")
        return self._tenants / tenant_hex


def _require_safe(path: Path) -> None:
    """Refuse a directory that is there and not safe to use.

    Raises:
        ConfigError: it is no directory of ours alone, or lies where no LMDB file can.
    """
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise refusal(path, "something else is there")
    if status.st_uid != os.geteuid():
        raise ConfigError(path, FIELD, f"belongs to uid {status.st_uid}, this process is uid {os.geteuid()}")
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(path, FIELD, f"open to others (mode …{mode:02o}); chmod 700 it or choose another")
    _require_local(path)


def _require_local(path: Path) -> None:
    """Refuse a file system that cannot hold an LMDB file; warn of one that forgets."""
    kind = file_system(next(each for each in (path, *path.parents) if each.exists()))
    if kind in _REFUSED:
        raise ConfigError(path, FIELD, f"lies on {_REFUSED[kind]}, which cannot hold it; choose a local disk")
    if kind in _DOUBTFUL:
        _warn(path, _DOUBTFUL[kind])


@cache
def _warn(path: Path, doubt: str) -> None:
    """Say it once in a process: some commands look at a directory before they hold it."""
    _log.warning("%s lies on %s", path, doubt)


def file_system(path: Path) -> int:
    """Return the type of the file system under `path`: `f_type` of statfs(2), 32 bits."""
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(
        256
    )  # struct statfs has 120 bytes on 64-bit Linux; f_type comes first
    if libc.statfs(os.fsencode(path), answer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return ctypes.c_long.from_buffer(answer).value & 0xFFFF_FFFF


def read_format(path: Path) -> int | None:
    """Return the format of a state directory, None if it does not say.

    Raises:
        ConfigError: this release does not read it.
    """
    file = path / "format"
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(file, "", f"cannot be read: {error.strerror}") from error
    if not _NUMBER.fullmatch(text):  # it is written whole or not at all, so no kill explains it
        what = repr(text[:20].decode(errors="replace").strip()) if text.strip() else "nothing"
        why = (
            f"is damaged: it says {what}, and should say a number. Look at the disk, restore the file, or, "
            f"if no later release has used this directory, write {FORMAT} into it (echo {FORMAT} > {file})"
        )
        raise ConfigError(file, "", f"{why}. Nothing was changed")
    if int(text) > FORMAT:
        why = f"says {int(text)}, and this release reads 1 to {FORMAT}; run the release that wrote it"
        raise ConfigError(file, "", f"{why}, or choose another state directory. Nothing was changed")
    return int(text)


def _require_writable(path: Path) -> None:
    """Refuse a directory that this process could not write to, or create: the first that is there says so."""
    above = next(each for each in (path, *path.parents) if each.exists() or each.is_symlink())
    if not above.is_dir():
        raise refusal(path, f"{above} is no directory")
    if os.access(above, os.W_OK | os.X_OK, effective_ids=True):
        return
    if os.statvfs(above).f_flag & os.ST_RDONLY:
        why = f"{above} is on a file system that is mounted read-only; mount it for writing"
    elif above == path:
        why = f"uid {os.geteuid()} may not write to it; chmod 700 it"
    else:
        raise refusal(path, f"uid {os.geteuid()} may not write to {above}")
    raise ConfigError(path, FIELD, f"{why}, or name another as daemon.state")


def refusal(path: Path, why: str | None) -> ConfigError:
    """Return what is said where a state directory cannot be created or written to."""
    what = f"cannot be created: {why}; create it for uid {os.geteuid()} alone (mode 0700)"
    return ConfigError(path, FIELD, f"{what}, or name another as daemon.state")


def _held(path: Path) -> bool:
    """Tell whether a process holds a directory; for the instant of the question, another may look, too."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(path, FIELD, f"its file `lock` cannot be read: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
