"""Who reads blocks at this moment, and for how long: what they read cannot be evicted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Readers:
    """Those who hold a block in host memory while they read it."""

    def __init__(self) -> None:
        self._since: dict[object, float] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read one block."""
        reader = object()
        self._since[reader] = time.monotonic()
        try:
            yield
        finally:
            del self._since[reader]

    def oldest_s(self) -> float:
        """Return for how many seconds the first of them has been reading, 0 where nobody reads."""
        since = next(iter(self._since.values()), None)
        return 0.0 if since is None else time.monotonic() - since
