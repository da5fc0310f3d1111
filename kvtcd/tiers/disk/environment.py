"""The disk environment of one tenant: it opens what is sound, sets aside what is not, and survives its engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtcd.core.errors import Corrupt, StoreFailed, TooLarge
from kvtcd.tiers import durable
from kvtcd.tiers.disk import directories
from kvtcd.tiers.disk.faults import Broken, Damaged, translated
from kvtcd.tiers.disk.gate import Gate
from kvtcd.tiers.disk.generation import Generation
from kvtcd.tiers.disk.inspection import Condition, fault, read_condition, write_condition
from kvtcd.tiers.disk.records import Put, Stored

MAX_TRANSACTION = 256 << 20
"""Bytes of blobs in one transaction: LMDB keeps them all in memory until the commit."""
RECOVERY_WINDOW = 600.0
"""Seconds in which a second I/O error means that the device cannot be trusted."""
_BATCH_RECORDS = 1000
_BATCH_BYTES = 32 << 20
_log = logging.getLogger(__name__)


class Environment:
    """Records and namespaces of one tenant on disk. Blocking; reads from any thread, writes from one.

    A record is there with exactly the bytes that were put, or it is missing, or reading it raises `Corrupt`
    because chunks are missing; whether the bytes are right is for their MAC to say.

    Args:
        path: its directory; created unless it exists. The parent must exist.
        quota: bytes that `used` is meant to stay below. The caller evicts; the file stays near it.

    Attributes:
        quota: as given.
        recovered: the last process did not close it; the file has been verified in full.
        quarantined: the file was damaged and set aside, and this began empty.

    Raises:
        StoreFailed: it cannot be opened, for a reason other than damage.
    """

    def __init__(self, path: Path, *, quota: int) -> None:
        self.path = path
        self.quota = quota
        self.recovered = False
        self.quarantined = False
        self._gate = Gate()
        self._process = os.getpid()
        self._writer: int | None = None
        self._broke_at: float | None = None
        self._unusable = ""
        with translated("open", path):
            durable.make_directory(path)
            directories.sweep(path)
            self._generation: Generation | None = self._open_current()

    @property
    def failed(self) -> bool:
        """Whether the engine broke twice within ten minutes, or its file with it: every call raises StoreFailed."""
        return self._unusable.startswith("it broke")
