"""Memory of GPUs that other processes have, as one thread of this process opens, copies and closes it.

An event of another process is asked whether it has come, and never put into a stream: if that process ends
before its work is done the event never comes, and whatever waits for this context would wait with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvtcd.core.device_bytes import DeviceBytes
from kvtcd.core.device_errors import BadHandle, DeviceFailed, UnknownDevice
from kvtcd.core.device_regions import DeviceOffer
from kvtcd.core.errors import BadRequest
from kvtcd.cuda.driver import Driver, Failure


@dataclass(slots=True)
class _Allocation:
    """An allocation of another process, opened once for all of its parts."""

    owner: str
    pointer: int
    uses: int = 0


@dataclass(slots=True)
class _Device:
    """A GPU on which something is open."""

    uuid: str
    number: int
    context: int
    stream: int
    allocations: dict[bytes, _Allocation] = field(default_factory=dict)
    """By handle: to open one twice is an error in some releases of CUDA."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A part of another process's memory, with its address here.

    Attributes:
        uuid: of the GPU on which it lies.
        gpu: CUDA's number of that in this process.
        nbytes: of it.
    """

    uuid: str
    gpu: int
    nbytes: int
    pointer: int
    handle: bytes
    event: int | None

    def at(self, offset: int, nbytes: int) -> DeviceBytes:
        """Return bytes of it, for whoever writes there on a stream of his own.

        That the owner's event has come is to be asked before, and it is to stay open until they are written.
        """
        assert offset + nbytes <= self.nbytes
        return DeviceBytes(self.gpu, self.pointer + offset, nbytes)


class Imports:
    """All memory of other processes that is open here. It belongs to one thread.

    A context on a device is made when the first memory there is opened, and kept: it takes some hundred MiB
    of the device, and a while to make.

    Args:
        load: loads the driver; called when it is first needed.
    """

    def __init__(self, load: Callable[[], Driver] = Driver.load) -> None:
        self._load = load
        self._driver: Driver | None = None
        self._devices: dict[str, _Device] = {}
        self._failed: dict[str, str] = {}

    def open(self, owner: str, offer: DeviceOffer) -> Imported:
        """Open what was offered. What one owner has open cannot be opened by another.

        Raises:
            NoDriver: there is none.
            UnknownDevice: the GPU is none of this process.
            BadHandle: the driver does not open it, or another owner has it open.
            BadRequest: the part is not all in the allocation.
            DeviceFailed: the GPU has failed.
        """
        driver = self._driver = self._driver or self._load()
        device = self._device(driver, offer.uuid)
        try:
            with driver.current(device.context):
                pointer = self._opened(driver, device, owner, offer)
                try:
                    event = driver.open_event(offer.event) if offer.event else None
                except Failure as failure:
                    self._give_up(driver, device, offer.handle)
                    raise self._refusal(device.uuid, "event", failure) from None
        except Failure as failure:
            raise self._refusal(device.uuid, "memory", failure) from None
        return Imported(offer.uuid, device.number, offer.nbytes, pointer + offer.offset, offer.handle, event)

    def _device(self, driver: Driver, uuid: str) -> _Device:
        if why := self._failed.get(uuid):
            raise DeviceFailed(uuid, why)
        if uuid not in driver.devices:
            raise UnknownDevice(uuid, tuple(driver.devices))
        if uuid not in self._devices:
            number = driver.devices[uuid]
            try:
                context = driver.retain(number)
                with driver.current(context):
                    self._devices[uuid] = _Device(uuid, number, context, driver.create_stream())
            except Failure as failure:
                raise self._refusal(uuid, "GPU", failure) from None
        return self._devices[uuid]

    def _opened(self, driver: Driver, device: _Device, owner: str, offer: DeviceOffer) -> int:
        """Return where an allocation begins, in use once more."""
        allocation = device.allocations.get(offer.handle)
        if allocation is None:
            allocation = _Allocation(owner, driver.open(offer.handle))
            device.allocations[offer.handle] = allocation
        elif allocation.owner != owner:
            raise BadHandle("memory", "it is in use")
        allocation.uses += 1
        try:
            _require_room(offer, *driver.range_of(allocation.pointer), allocation.pointer)
        except BaseException:
            self._give_up(driver, device, offer.handle)
            raise
        return allocation.pointer

    def _give_up(self, driver: Driver, device: _Device, handle: bytes) -> None:
        allocation = device.allocations[handle]
        allocation.uses -= 1
        if not allocation.uses:
            del device.allocations[handle]
            with suppress(Failure):  # what has failed is closed with its process
                driver.close(allocation.pointer)

    def has_come(self, part: Imported) -> bool:
        """Tell whether its owner is done with all that he noted in its event.

        Raises:
            DeviceFailed: the GPU has failed.
            BadHandle: the event is none any more.
        """
        if part.event is None:
            return True
        driver, device = self._ready(part)
        try:
            with driver.current(device.context):
                return driver.has_come(part.event)
        except Failure as failure:
            raise self._refusal(device.uuid, "event", failure) from None

    def read(self, part: Imported, offset: int, pieces: Sequence[tuple[int, int]]) -> None:
        """Copy bytes from `offset` on to pieces of host memory, each an address and a length; wait for it.

        Raises:
            DeviceFailed: the GPU has failed.
            BadHandle: the memory cannot be read.
        """
        driver, device = self._ready(part)
        self._copied(device, lambda: driver.read(part.pointer + offset, pieces, device.stream))

    def write(self, part: Imported, offset: int, pieces: Sequence[tuple[int, int]]) -> None:
        """Copy the other way.

        Raises:
            DeviceFailed, BadHandle: see `read`.
        """
        driver, device = self._ready(part)
        self._copied(device, lambda: driver.write(part.pointer + offset, pieces, device.stream))

    def _copied(self, device: _Device, queue: Callable[[], None]) -> None:
        driver = self._driver
        assert driver is not None  # there is a device
        try:
            with driver.current(device.context):
                try:
                    queue()
                finally:
                    driver.finish(device.stream)  # of what was queued before one failed, too
        except Failure as failure:
            raise self._refusal(device.uuid, "memory", failure) from None

    def close(self, part: Imported) -> None:
        """Let go of a part, and with the last one of its allocation."""
        driver, device = self._driver, self._devices.get(part.uuid)
        if driver is None or device is None:
            return  # the device has failed, and nothing is open on it
        with suppress(Failure), driver.current(device.context):
            self._give_up(driver, device, part.handle)
            if part.event is not None:
                driver.destroy_event(part.event)

    def shut(self) -> None:
        """Let go of all devices; nothing is open on them any more."""
        for device in self._devices.values():
            assert self._driver is not None  # there is a device
            with suppress(Failure):
                with self._driver.current(device.context):
                    self._driver.destroy_stream(device.stream)
                self._driver.release(device.number)
        self._devices.clear()

    def _ready(self, part: Imported) -> tuple[Driver, _Device]:
        if why := self._failed.get(part.uuid):
            raise DeviceFailed(part.uuid, why)
        assert self._driver is not None  # it has opened the part
        return self._driver, self._devices[part.uuid]

    def _refusal(self, uuid: str, what: str, failure: Failure) -> BadHandle | DeviceFailed:
        """Return what a failure means; behind one that is sticky nothing is open on the device any more."""
        if not failure.sticky:
            return BadHandle(what, str(failure))
        self._failed[uuid] = str(failure)
        self._devices.pop(uuid, None)
        return DeviceFailed(uuid, str(failure))


def _require_room(offer: DeviceOffer, base: int, size: int, pointer: int) -> None:
    end, room = offer.offset + offer.nbytes, base + size - pointer
    if end > room:
        raise BadRequest("offset", f"the region ends at {end}, and its allocation at {room}")
