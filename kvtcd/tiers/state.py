"""The state directory: who may use it, the master key, and one directory per tenant.

::

    state/                 0700
      lock                 flock of the one process that uses it
      format               number of the form of all that is here; without it, 1
      master.key           32 random bytes, 0600; not there if the key is kept elsewhere
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
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from kvtcd.core.errors import AlreadyRunning, ConfigError
from kvtcd.tiers import durable

MASTER_KEY_BYTES = 32
MASTER_KEY = "kvtcd.master-key"
"""Name of the credential that may hold the key instead of the file."""
FORMAT = 1
"""Raised by a release that stores what those before it would take for damage, and remove."""
_TENANT = re.compile(r"[0-9a-f]{2,64}")
_FIELD = "state directory"
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
}
_DOUBTFUL = {
    0x01021994: "tmpfs: blocks on disk are lost when the machine restarts",
    0x794C7630: "overlayfs: blocks on disk are lost with the container",
}


class StateDirectory:
    """The directory that outlives the process, held by one process at a time.

    Args:
        path: created with mode 0700 when it does not exist.

    Raises:
        AlreadyRunning: another process, or another object of this one, holds it.
        ConfigError: not a directory of ours alone, on a file system that cannot hold an LMDB file, or of a
            later release; nothing in it is changed then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _prepare(path)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise AlreadyRunning(path) from None
        try:
            if _format(path) is None:
                durable.write_file(path / "format", b"%d\n" % FORMAT)
        except BaseException:
            os.close(self._lock)
            raise
        self._tenants = path / "tenants"
        durable.make_directory(self._tenants)
        for leftover in self._tenants.glob("*" + durable.PART):
            durable.remove_tree(leftover)

    def remote(self) -> bytes | None:
        """Return what `note_remote` kept, None if there is nothing.

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

    def note_remote(self, content: bytes) -> None:
        """Keep what a shared store still has to do, durably."""
        durable.write_file(self.path / "remote", content)

    @classmethod
    def existing(cls, path: Path) -> Self:
        """Hold a directory that a daemon has used; none is made.

        Raises:
            AlreadyRunning, ConfigError: as when it is made, or it is no state directory.
        """
        if not (path / "lock").is_file():
            raise ConfigError(path, "", "is no state directory (it has no file `lock`)")
        return cls(path)

    def master_key(self, given: bytes | None = None) -> bytes:
        """Return the 32 bytes from which all keys of this store are derived; the first call creates them.

        Args:
            given: a key that is kept elsewhere. It is not written here, and a file of another one is refused:
                to go on with either would remove what is stored under the other.

        Raises:
            ConfigError: the file, or what is given, has another size; the file cannot be read, or can be read
                by others; they differ; something is stored and there is no key: under a new one it would go.
        """
        path = self.path / "master.key"
        if given is not None:
            if len(given) != MASTER_KEY_BYTES:
                raise ConfigError("credential", MASTER_KEY, f"not {MASTER_KEY_BYTES} bytes long")
            if path.exists() and not hmac.compare_digest(self.master_key(), given):
                why = f"differs from {path}; copy that file to the credential, or remove it to begin anew"
                raise ConfigError("credential", MASTER_KEY, why)
            return given
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                key = file.read(MASTER_KEY_BYTES + 1)
        except FileNotFoundError:
            return self._new_master_key(path)
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

    def replace_master_key(self, key: bytes) -> None:
        """Keep another key from now on, durably; nothing happens where the key is kept elsewhere."""
        path = self.path / "master.key"
        if path.exists():
            durable.write_file(path, key)

    def _new_master_key(self, path: Path) -> bytes:
        if stored := len([*self.tenants()]):
            why = (
                f"is missing, and what is stored here ({stored} tenants) was stored under it; restore it, "
                f"hand it over as the credential {MASTER_KEY}, or {self._anew()}"
            )
            raise ConfigError(path, "", why)
        key = secrets.token_bytes(MASTER_KEY_BYTES)
        durable.write_file(path, key)
        _log.info("made the master key %s; without it nothing that is stored here can be read", path)
        return key

    def _anew(self) -> str:
        return f"remove {self._tenants} and it to begin with an empty store"

    def tenants(self) -> Iterator[str]:
        """Yield the hex name of every tenant that has a directory, in order."""
        names = sorted(entry.name for entry in self._tenants.iterdir() if entry.is_dir())
        yield from filter(_TENANT.fullmatch, names)

    def tenant(self, tenant_hex: str) -> Path:
        """Return where the disk environment of one tenant lies; it need not exist.

        Raises:
            ValueError: not 2 to 64 lower-case hex digits.
        """
        if not _TENANT.fullmatch(tenant_hex):
            raise ValueError(f"{tenant_hex!r} is not a tenant's name of 2 to 64 lower-case hex digits")
        return self._tenants / tenant_hex

    def remove_tenant(self, tenant_hex: str) -> None:
        """Remove the directory of a tenant without opening it, durably; its environment must be closed."""
        durable.remove_tree(self.tenant(tenant_hex))

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self._lock)


@contextmanager
def at_rest(path: Path) -> Iterator[None]:
    """Keep a daemon from starting on a state directory while it is read; nothing in it is changed.

    Raises:
        AlreadyRunning: a daemon uses it.
        ConfigError: it is no state directory, may not be read, or is of a later release.
    """
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(path, _FIELD, f"its file `lock` cannot be read: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _format(path)
        yield
    except BlockingIOError:
        raise AlreadyRunning(path) from None
    finally:
        os.close(lock)


def _format(path: Path) -> int | None:
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
    if not text.strip().isdigit() or int(text) > FORMAT:
        shown = text[:20].decode(errors="replace").strip()
        why = f"says {shown!r}, and this release reads 1 to {FORMAT}; run the release that wrote it"
        raise ConfigError(file, "", f"{why}, or choose another state directory. Nothing was changed")
    return int(text)


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


def _prepare(path: Path) -> None:
    """Create the directory, or refuse one that is not safe to use."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot be created: {error.strerror}; create it for uid {os.geteuid()} alone (mode 0700)"
        raise ConfigError(path, _FIELD, f"{why}, or name another as daemon.state") from error
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise ConfigError(path, _FIELD, f"belongs to uid {status.st_uid}, this process is uid {os.geteuid()}")
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(path, _FIELD, f"open to others (mode …{mode:02o}); chmod 700 it or choose another")
    kind = file_system(path)
    if kind in _REFUSED:
        raise ConfigError(
            path, _FIELD, f"lies on {_REFUSED[kind]}, which cannot hold it; choose a local disk"
        )
    if kind in _DOUBTFUL:
        _log.warning("%s lies on %s", path, _DOUBTFUL[kind])
