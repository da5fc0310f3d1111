"""Memory of a GPU that this process takes for itself, to try things out: engines have their own."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Self

from kvtcd.cuda.driver import Driver

GRANULE = 2 << 20
"""What is shared is a whole piece of this size: smaller allocations would share it with strangers."""


class DeviceMemory:
    """Memory of the first GPU that is seen here, until it is left.

    Args:
        nbytes: of it.

    Attributes:
        pointer: its address.

    Raises:
        NoDriver: there is none.
        Failure: it cannot be had.
    """

    def __init__(self, nbytes: int) -> None:
        self._driver, self._nbytes = Driver.load(), nbytes
        self._device = next(iter(self._driver.devices.values()))
        self._context = self._driver.retain(self._device)
        try:
            with self._driver.current(self._context):
                self.pointer = self._driver.allocate(-(-nbytes // GRANULE) * GRANULE)
                self._stream = self._driver.create_stream()
        except BaseException:
            self._driver.release(self._device)
            raise

    def read(self) -> bytes:
        """Return what is in it."""
        found = ctypes.create_string_buffer(self._nbytes)
        with self._driver.current(self._context):
            self._driver.read(self.pointer, [(ctypes.addressof(found), self._nbytes)], self._stream)
            self._driver.finish(self._stream)
        return found.raw

    def write(self, data: bytes) -> None:
        """Fill it."""
        given = ctypes.create_string_buffer(data, self._nbytes)
        with self._driver.current(self._context):
            self._driver.write(self.pointer, [(ctypes.addressof(given), self._nbytes)], self._stream)
            self._driver.finish(self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._driver.current(self._context):
            self._driver.destroy_stream(self._stream)
            self._driver.free(self.pointer)
        self._driver.release(self._device)
