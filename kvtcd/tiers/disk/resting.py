"""An environment that nobody has open, read without changing it: for people who ask what is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtcd.core.errors import StoreFailed
from kvtcd.tiers.disk import directories
from kvtcd.tiers.disk.faults import data_bytes
from kvtcd.tiers.disk.generation import Generation, walk
from kvtcd.tiers.disk.inspection import Condition, diagnosis, read_condition
from kvtcd.tiers.disk.records import Bytes, Page, fresh


@dataclass(frozen=True, slots=True)
class Resting:
    """How an environment was left.

    Attributes:
        path: of its generation in use, or of the environment where it has none.
        condition: how that was left.
        fault: why it would be set aside at the next start; None: it is sound, or holds nothing yet.
        file_bytes: length of its data file.
        set_aside: generations that were damaged earlier.
        generation: what is in it; None where that cannot be read.
    """

    path: Path
    condition: Condition
    fault: str | None
    file_bytes: int
    set_aside: tuple[str, ...]
    generation: Generation | None

    def namespaces(self) -> dict[str, bytes]:
        """Return what is kept under the names of namespaces."""
        return self.generation.namespaces() if self.generation else {}

    def pages(self) -> Iterator[Page]:
        """Iterate over all records, a thousand at a time, in the order of their keys."""
        return walk(self.generation.page) if self.generation else iter(())

    def read(self, key: bytes) -> tuple[bytes, Bytes] | None:
        """Return (envelope, blob) of a record, None for one that is not there.

        Raises:
            Corrupt: parts of it are missing.
        """
        return self.generation.read(key, fresh) if self.generation else None

    def envelope(self, key: bytes) -> bytes | None:
        """Return the envelope of a record, None for one that is not there.

        Raises:
            Corrupt: its header cannot be read.
        """
        return self.generation.envelope(key) if self.generation else None

    @property
    def used(self) -> int:
        """Bytes that the records occupy."""
        return self.generation.used if self.generation else 0


@contextmanager
def at_rest(environment: Path) -> Iterator[Resting]:
    """Read an environment; the caller sees to it that no process has it open.

    Raises:
        StoreFailed: a directory or file of it cannot be read.
    """
    try:
        path, aside = directories.current(environment), tuple(directories.damaged(environment))
        condition = read_condition(path) if path else Condition.CLEAN
        why, lacking = diagnosis(path, condition) if path else (None, None)
        nbytes = data_bytes(path or environment)
    except OSError as error:
        raise StoreFailed("open", str(error)) from error
    if lacking is not None:
        why = f"its file should have {lacking} bytes; the next start lengthens it"
    generation = Generation(path, quota=0, reading=True) if path and why is None else None
    try:
        yield Resting(path or environment, condition, why, nbytes, aside, generation)
    finally:
        if generation:
            generation.close()
