"""Files with a key of 32 random bytes: master keys, and keys of exports."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvtcd.core.errors import ConfigError
from kvtcd.tiers.state import MASTER_KEY_BYTES


def read_key(file: Path) -> bytes:
    """Return the key in a file.

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
        why = f"has {len(key)} bytes; a key has {MASTER_KEY_BYTES}, as `head -c 32 /dev/urandom` makes them"
        raise ConfigError(file, "", why)
    if mode & 0o077:
        raise ConfigError(file, "", f"others may read it (mode {mode:04o}); chmod 600 it")
    return key
