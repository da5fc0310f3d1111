"""Memory of a GPU that this process has, and shows another one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvtcd.core.device_errors import BadHandle, NotExportable
from kvtcd.core.device_regions import DeviceOffer
from kvtcd.core.errors import BadRequest
from kvtcd.cuda.driver import BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS, Driver, Failure


def extent(memory: object) -> tuple[int, int]:
    """Return address and length of memory of a GPU.

    Args:
        memory: an object with ``__cuda_array_interface__``, writable and contiguous; or just the two.

    Raises:
        BadRequest: it is something else.
    """
    if isinstance(memory, tuple) and len(memory) == 2:
        pointer, nbytes = memory
    else:
        try:
            said: dict[str, Any] = memory.__cuda_array_interface__  # type: ignore[attr-defined]  # or the error
            pointer, readonly = said["data"]
            shape, nbytes = said["shape"], int(said["typestr"][2:])
            strides = said.get("strides")
        except (AttributeError, TypeError, LookupError, ValueError):
            why = (
                "is neither (address, bytes) nor an object with __cuda_array_interface__, as tensors of uint8"
            )
            raise BadRequest("memory", why) from None
        for size, stride in zip(reversed(shape), reversed(strides or (None,) * len(shape)), strict=True):
            if stride is not None and stride != nbytes and size > 1:
                raise BadRequest("memory", "is not contiguous")
            nbytes *= size
        if readonly:
            raise BadRequest("memory", "is read-only")
    if not isinstance(pointer, int) or not isinstance(nbytes, int) or pointer < 1 or nbytes < 1:
        raise BadRequest("memory", "has no address, or not a byte")
    return pointer, nbytes


class Exported:
    """Memory of a GPU, whatever allocated it, which stays whose it is. Any thread may use it.

    Attributes:
        nbytes: of it.

    Raises:
        BadRequest: there is no such memory on a GPU.
    """

    def __init__(self, driver: Driver, pointer: int, nbytes: int) -> None:
        self._driver, self._pointer, self.nbytes = driver, pointer, nbytes
        try:
            self._device = driver.device_of(pointer)
            self._context = driver.retain(self._device)
        except Failure as failure:
            raise BadRequest("memory", f"{pointer:#x} is no address on a GPU: {failure}") from None
        self._event: int | None = None
        self._is_interprocess = False
        try:
            with driver.current(self._context):
                self._base = self._start_of_allocation()
                self._stream = driver.create_stream()
                self._event = self._new_event()
        except Failure as failure:
            driver.release(self._device)
            raise BadRequest("memory", f"{pointer:#x} cannot be used: {failure}") from None
        except BaseException:
            driver.release(self._device)
            raise

    def _start_of_allocation(self) -> int:
        base, size = self._driver.range_of(self._pointer)
        if (beyond := self._pointer + self.nbytes - base - size) > 0:
            raise BadRequest("memory", f"ends {beyond} bytes behind its allocation")
        return base

    def _new_event(self) -> int:
        try:
            event = self._driver.create_event(INTERPROCESS | DISABLE_TIMING | BLOCKING_SYNC)
        except Failure:  # not on every system
            return self._driver.create_event(DISABLE_TIMING | BLOCKING_SYNC)
        self._is_interprocess = True
        return event

    def offer(self) -> DeviceOffer:
        """Return what another process has to know of it.

        Raises:
            NotExportable: it has no handle.
            BadHandle: the driver gives none.
        """
        driver = self._driver
        (uuid,) = (uuid for uuid, device in driver.devices.items() if device == self._device)
        try:
            with driver.current(self._context):
                if not driver.is_exportable(self._pointer):
                    raise NotExportable(self.nbytes)
                handle = driver.export(self._base)
                event = driver.export_event(self._event) if self._event and self._is_interprocess else None
        except Failure as failure:
            raise BadHandle("memory", str(failure)) from None
        return DeviceOffer(uuid, handle, self._pointer - self._base, self.nbytes, event)

    def record(self, stream: int) -> None:
        """Note what was queued on a stream until now: who uses the memory waits for it.

        Where events cannot be shared, it is waited for here.
        """
        if self._event is None:
            return
        with self._driver.current(self._context):
            self._driver.record(self._event, stream)
            if not self._is_interprocess:
                self._driver.wait(self._event)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Copy a part of it to host memory, once all that was noted is done."""
        with self._driver.current(self._context):
            self._settled()
            self._driver.read(self._pointer + offset, [(address, nbytes)], self._stream)
            self._driver.finish(self._stream)

    def write(self, offset: int, address: int, nbytes: int) -> None:
        """Copy host memory to a part of it, once all that was noted is done."""
        with self._driver.current(self._context):
            self._settled()
            self._driver.write(self._pointer + offset, [(address, nbytes)], self._stream)
            self._driver.finish(self._stream)

    def _settled(self) -> None:
        if self._event is not None:
            self._driver.wait(self._event)

    def close(self) -> None:
        """Let go of the driver; the memory stays."""
        if self._event is None:
            return
        event, self._event = self._event, None
        with (
            suppress(Failure),
            self._driver.current(self._context),
        ):  # a device that failed has lost them anyway
            self._driver.destroy_event(event)
            self._driver.destroy_stream(self._stream)
        with suppress(Failure):
            self._driver.release(self._device)
