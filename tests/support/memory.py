"""A bound on memory, so that what allocates by a length that is merely claimed fails."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MARGIN = 1 << 30


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process have a GiB of address space more than it has now; `MemoryError` is raised beyond."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MARGIN, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
