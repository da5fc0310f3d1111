"""The few functions of CUDA's driver API by which processes share memory of a GPU; no tensor library.

Addresses, contexts, streams and events are plain integers here, as they are in C. Whatever allocates, opens
or waits blocks: nothing of this belongs on an event loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Self

from kvtcd.core.device_errors import NoDriver
from kvtcd.core.device_regions import HANDLE_BYTES

LIBRARY = "libcuda.so.1"
LEGACY_IPC_CAPABLE, DEVICE_ORDINAL = 10, 9
"""``CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`` and ``…_DEVICE_ORDINAL``."""
LAZY_PEER_ACCESS = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``: the only flags with which a handle may be opened."""
NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING``: a stream that does not wait for the legacy default stream, nor that for it."""
BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS = 1, 2, 4
"""``CU_EVENT_…``: who waits sleeps; no time is taken, without which an event cannot be interprocess."""
NOT_READY = 600
STICKY = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999})
"""Errors behind which every later call of the process to this device fails too; most say so in ``cuda.h``."""


class Bytes16(ctypes.Structure):
    """``CUuuid``."""

    _fields_ = (("data", ctypes.c_ubyte * 16),)


class Bytes64(ctypes.Structure):
    """``CUipcMemHandle`` and ``CUipcEventHandle``, which are passed by value."""

    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(Bytes16), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuIpcGetMemHandle": (POINTER(Bytes64), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), Bytes64, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuIpcGetEventHandle": (POINTER(Bytes64), c_void_p),
    "cuIpcOpenEventHandle": (POINTER(c_void_p), Bytes64),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
}
"""The arguments of every function; each returns a ``CUresult``."""


class Failure(Exception):
    """A call of the driver that failed; `name` is CUDA's for its `code`."""

    def __init__(self, call: str, code: int, name: str) -> None:
        self.call, self.code, self.name = call, code, name
        super().__init__(f"{call}: {name} ({code})")

    @property
    def sticky(self) -> bool:
        """Whether nothing else can succeed on this device any more."""
        return self.code in STICKY


class Driver:
    """The driver, initialised. Any thread may use it; see `current`.

    Args:
        library: has the functions of `PROTOTYPES`.

    Raises:
        NoDriver: it finds no device.
    """

    def __init__(self, library: Any) -> None:  # noqa: ANN401 - a CDLL has no type of its own
        self._library = library
        try:
            self._call("cuInit", 0)
            self.devices = self._devices()
        except Failure as failure:
            raise NoDriver(str(failure)) from None
        if not self.devices:
            raise NoDriver("it finds no device; see CUDA_VISIBLE_DEVICES")

    @classmethod
    def load(cls) -> Self:
        """Load the driver of this machine.

        Raises:
            NoDriver: there is none, or it finds no device.
        """
        try:
            library = ctypes.CDLL(LIBRARY)
            for name, arguments in PROTOTYPES.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, c_int
        except (OSError, AttributeError) as error:
            raise NoDriver(str(error)) from None
        return cls(library)

    # Devices and contexts -------------------------------------------------------------------------------

    def _devices(self) -> dict[str, int]:
        """Return the device that each UUID, 32 hex digits, stands for in this process."""
        count, found = c_int(), {}
        self._call("cuDeviceGetCount", byref(count))
        for ordinal in range(count.value):
            device, uuid = c_int(), Bytes16()
            self._call("cuDeviceGet", byref(device), ordinal)
            self._call("cuDeviceGetUuid_v2", byref(uuid), device.value)
            found[bytes(uuid.data).hex()] = device.value
        return found

    def retain(self, device: int) -> int:
        """Return the primary context of a device, that which torch uses too; it lives until `release`."""
        return self._made("cuDevicePrimaryCtxRetain", device)

    def release(self, device: int) -> None:
        """Give back what `retain` returned."""
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Let this thread's calls be of a context meanwhile."""
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    # Memory ---------------------------------------------------------------------------------------------

    def device_of(self, pointer: int) -> int:
        """Return the device on which memory lies."""
        return self._attribute(DEVICE_ORDINAL, pointer)

    def is_exportable(self, pointer: int) -> bool:
        """Tell whether memory was allocated such that it has a handle."""
        return bool(self._attribute(LEGACY_IPC_CAPABLE, pointer))

    def range_of(self, pointer: int) -> tuple[int, int]:
        """Return where the allocation begins in which memory lies, and how many bytes it has."""
        base, nbytes = c_uint64(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), pointer)
        return base.value, nbytes.value

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory of the current context."""
        pointer = c_uint64()
        self._call("cuMemAlloc_v2", byref(pointer), nbytes)
        return pointer.value

    def free(self, pointer: int) -> None:
        """Give back what `allocate` returned."""
        self._call("cuMemFree_v2", pointer)

    def read(self, pointer: int, pieces: Sequence[tuple[int, int]], stream: int) -> None:
        """Queue copies of memory of a device to pieces of host memory, each an address and a length."""
        for address, nbytes in pieces:
            self._call("cuMemcpyDtoHAsync_v2", address, pointer, nbytes, stream)
            pointer += nbytes

    def write(self, pointer: int, pieces: Sequence[tuple[int, int]], stream: int) -> None:
        """Queue copies the other way."""
        for address, nbytes in pieces:
            self._call("cuMemcpyHtoDAsync_v2", pointer, address, nbytes, stream)
            pointer += nbytes

    # Between processes ----------------------------------------------------------------------------------

    def export(self, pointer: int) -> bytes:
        """Return the handle of an allocation, given its first address."""
        return self._handle("cuIpcGetMemHandle", pointer)

    def open(self, handle: bytes) -> int:
        """Return where an allocation of another process begins here."""
        pointer = c_uint64()
        self._call("cuIpcOpenMemHandle_v2", byref(pointer), _by_value(handle), LAZY_PEER_ACCESS)
        return pointer.value

    def close(self, pointer: int) -> None:
        """Give back what `open` returned."""
        self._call("cuIpcCloseMemHandle", pointer)

    def export_event(self, event: int) -> bytes:
        """Return the handle of an event that was made with `INTERPROCESS`."""
        return self._handle("cuIpcGetEventHandle", event)

    def open_event(self, handle: bytes) -> int:
        """Return an event of another process; to be destroyed as one's own."""
        return self._made("cuIpcOpenEventHandle", _by_value(handle))

    # Order ----------------------------------------------------------------------------------------------

    def create_stream(self) -> int:
        """Return a new stream of the current context."""
        return self._made("cuStreamCreate", NON_BLOCKING)

    def finish(self, stream: int) -> None:
        """Wait until all that was queued is done."""
        self._call("cuStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        """End a stream."""
        self._call("cuStreamDestroy_v2", stream)

    def create_event(self, flags: int) -> int:
        """Return a new event of the current context."""
        return self._made("cuEventCreate", flags)

    def record(self, event: int, stream: int) -> None:
        """Let an event stand for all that was queued until now."""
        self._call("cuEventRecord", event, stream)

    def has_come(self, event: int) -> bool:
        """Tell whether what an event stands for is done; one that was never recorded has come."""
        try:
            self._call("cuEventQuery", event)
        except Failure as failure:
            if failure.code != NOT_READY:
                raise
            return False
        return True

    def wait(self, event: int) -> None:
        """Wait until what an event stands for is done."""
        self._call("cuEventSynchronize", event)

    def destroy_event(self, event: int) -> None:
        """End an event, or the use of another process's."""
        self._call("cuEventDestroy_v2", event)

    # ----------------------------------------------------------------------------------------------------

    def _attribute(self, attribute: int, pointer: int) -> int:
        value = c_int()  # those that are asked for are an int or a bool, which fills its lowest byte
        self._call("cuPointerGetAttribute", byref(value), attribute, pointer)
        return value.value

    def _handle(self, call: str, of: int) -> bytes:
        handle = Bytes64()
        self._call(call, byref(handle), of)
        return bytes(handle.data)

    def _made(self, call: str, *arguments: object) -> int:
        made = c_void_p()
        self._call(call, byref(made), *arguments)
        return made.value or 0

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            text = c_char_p()
            self._library.cuGetErrorName(code, byref(text))
            raise Failure(name, code, (text.value or b"an unknown error").decode())


def _by_value(handle: bytes) -> Bytes64:
    return Bytes64.from_buffer_copy(handle)
