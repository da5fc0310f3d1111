"""Files with a key of 32 random bytes: master keys, and keys of exports."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvtcd.core.errors import ConfigError
from kvtcd.tiers.state import MASTER_KEY_BYTES


def read_key(file: Path, *, new: bool = False) -> bytes:
    """Return the key in a file.

    Args:
        file: with 32 bytes.
        new: nothing needs to be under it yet, so one may be made; any other is to be restored.

    Raises:
        ConfigError: it cannot be read, can be read by others, or has another length.
    """
    try:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            key = opened.read()
    except OSError as error:
        raise ConfigError(file, "", f"cannot be read: {error.strerror}") from error
    if len(key) != MASTER_KEY_BYTES:
        todo = "as `head -c 32 /dev/urandom` makes them" if new else "so this is not all of one: restore it"
        raise ConfigError(file, "", f"has {len(key)} bytes; a key has {MASTER_KEY_BYTES}, {todo}")
    if mode & 0o077:
        raise ConfigError(file, "", f"others may read it (mode {mode:04o}); chmod 600 it")
    return key


def kept_key(state: Path) -> tuple[bytes | None, str]:
    """Return the master key that a state directory keeps, and why there is none to be had."""
    file = state / "master.key"
    if not file.exists():
        return None, "no master key here"
    try:
        return read_key(file), ""
    except ConfigError as error:
        return None, str(error)
