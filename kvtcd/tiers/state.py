"""The state directory, held by one process at a time; what is in it, `StateFiles` says."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from kvtcd.core.errors import AlreadyRunning, ConfigError
from kvtcd.tiers import durable, rekeying
from kvtcd.tiers.rekeying import Rekeying
from kvtcd.tiers.state_files import (
    FIELD,
    FORMAT,
    MASTER_KEY,
    MASTER_KEY_BYTES,
    StateFiles,
    read_format,
    refusal,
)

__all__ = ["FORMAT", "MASTER_KEY", "MASTER_KEY_BYTES", "StateDirectory", "at_rest"]
_log = logging.getLogger(__name__)


class StateDirectory(StateFiles):
    """The directory that outlives the process.

    Args:
        path: created with mode 0700 when it does not exist.

    Raises:
        AlreadyRunning: another process, or another object of this one, holds it.
        ConfigError: not a directory of ours alone, on a file system that cannot hold an LMDB file, or of a
            later release; nothing in it is changed then.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.examine()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise refusal(path, error.strerror) from error
        try:
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            why = f"its file `lock` cannot be written: {error.strerror}"
            raise ConfigError(path, FIELD, why) from error
        try:
            self._settle()
        except BaseException:
            os.close(self._lock)
            raise

    def _settle(self) -> None:
        """Hold it, and make of it what it is to be."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if read_format(self.path) is None:
                durable.write_file(self.path / "format", b"%d\n" % FORMAT)
            durable.make_directory(self._tenants)
            for leftover in self._tenants.glob("*" + durable.PART):
                durable.remove_tree(leftover)
        except BlockingIOError:
            raise AlreadyRunning(self.path) from None
        except OSError as error:
            raise ConfigError(self.path, FIELD, f"cannot be written: {error.strerror}") from error

    def note_remote(self, content: bytes) -> None:
        """Keep what a shared store still has to do, durably."""
        durable.write_file(self.path / "remote", content)

    def note_rekeying(self, said: Rekeying | None) -> None:
        """Say which step a change of the master key is in from now on, durably; None: that it has ended."""
        rekeying.write(self.path, said)

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
        """Return what `known_key` does; the first call creates the key.

        Args:
            given: a key that is kept elsewhere; it is not written here.

        Raises:
            ConfigError: as there.
        """
        return self.known_key(given) or self._new_master_key()

    def replace_master_key(self, key: bytes) -> None:
        """Keep another key from now on, durably; nothing happens where the key is kept elsewhere."""
        path = self.path / "master.key"
        if path.exists():
            durable.write_file(path, key)

    def _new_master_key(self) -> bytes:
        path = self.path / "master.key"
        key = secrets.token_bytes(MASTER_KEY_BYTES)
        durable.write_file(path, key)
        _log.info("made the master key %s; without it nothing that is stored here can be read", path)
        return key

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
        raise ConfigError(path, FIELD, f"its file `lock` cannot be read: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        read_format(path)
        yield
    except BlockingIOError:
        raise AlreadyRunning(path) from None
    finally:
        os.close(lock)
