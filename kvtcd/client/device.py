"""Memory of a GPU shared with the daemon: blocks go to and from it without passing through this process."""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from kvtcd.client.address import Address
from kvtcd.client.call import Buffer
from kvtcd.client.sharing import CLOSED, Sharing
from kvtcd.core.device_errors import DeviceUnshared
from kvtcd.core.errors import BadRequest, Unavailable
from kvtcd.core.regions import Span
from kvtcd.cuda.driver import Driver
from kvtcd.cuda.exports import Exported, extent

if TYPE_CHECKING:
    from kvtcd.client.regions import Region

OPEN_S = 60.0
"""How long the daemon may take: the first time it makes a context on the GPU."""


class DeviceRegion:
    """Memory of a GPU for blocks, which the daemon opens too where it can. Any thread may use it.

    ``region[a:b]`` is a part of it, in bytes: put blocks from parts, and have parts filled. Where the memory
    cannot be shared, the same calls take its bytes through a host region of the same size, which is shared or
    else sent over HTTP. Work that was queued on the memory is waited for once it is noted by `record`.

    Args:
        address: of the daemon.
        memory: an object with ``__cuda_array_interface__``, or ``(address, bytes)``. It must stay allocated
            until `close` has returned.
        host: makes the host region.
        driver: CUDA's.

    Raises:
        BadRequest: `memory` is not contiguous, writable memory of a GPU.
    """

    def __init__(
        self, address: Address, memory: object, host: Callable[[int], Region], driver: Driver
    ) -> None:
        self._memory = memory  # is not freed before
        self._exported = Exported(driver, *extent(memory))
        self._host, self._lock = host, threading.Lock()
        self._mirror: Region | None = None
        self._unshareable, offer = "", b""
        try:
            offer = self._exported.offer().to_message()
        except DeviceUnshared as error:
            self._unshareable = str(error)
        self._sharing = Sharing(address, partial(_send, offer))
        if self.share() is None:
            _ = self.mirror

    @property
    def path(self) -> Literal["device", "region", "http"]:
        """How bytes go from and to it now."""
        if self._sharing.is_shared:
            return "device"
        return self._mirror.path if self._mirror else "http"

    @property
    def why(self) -> str:
        """Why that is not ``device``, if so, and why not ``region`` either."""
        reasons = [self._unshareable or self._sharing.why]
        if not self._sharing.is_shared and self._mirror:
            reasons.append(self._mirror.why)
        return "; ".join(dict.fromkeys(reason for reason in reasons if reason))

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""
        return self._sharing.closed

    @property
    def mirror(self) -> Region:
        """Host memory that its bytes pass through where it cannot be shared."""
        with self._lock:
            if self._mirror is None:
                self._mirror = self._host(self._exported.nbytes)
            return self._mirror

    def record(self, stream: int = 0) -> None:
        """Note all that was queued on a CUDA stream until now: whoever reads or writes a part waits for it.

        Call it behind what uses the memory and before the call that names a part of it. Work on several
        streams has to be brought into one order first: the last call holds.

        Args:
            stream: its address (``torch.cuda.current_stream().cuda_stream``); 0 is CUDA's default stream.
        """
        self._exported.record(stream)

    def share(self) -> str | None:
        """Return under which id the daemon knows it, None if it cannot; tries to share it if it is not."""
        return None if self._unshareable else self._sharing.share()

    def recall(self, region: str, why: str) -> None:
        """Share it no more under this id, for a reason, and wait until the daemon touches it no more.

        Raises:
            Unavailable: the daemon does not say so; the memory cannot be used again.
        """
        if not self._sharing.recall(why, region):
            self._sharing.close()
            raise Unavailable("the daemon holds on to memory of a GPU; leave it, and use another")

    def span(self, data: object) -> Span | None:
        """Return where in it a part lies, None for one that is not its own."""
        return data.span if isinstance(data, DevicePart) and data.region is self else None

    def close(self) -> None:
        """Have the daemon let go of it, and wait for that; then the memory may be freed.

        Raises:
            Unavailable: the daemon does not say that it has; it will when it ends.
        """
        let_go = self._sharing.recall(CLOSED)
        self._sharing.close()
        self._exported.close()
        if self._mirror:
            self._mirror.close()
        if not let_go:
            raise Unavailable("the daemon has not let go of memory of a GPU in time: do not free it")

    def __getitem__(self, part: slice) -> DevicePart:
        start, stop, step = part.indices(self._exported.nbytes)
        if step != 1 or stop <= start:
            raise BadRequest("part", f"{part} is no run of bytes of a region of {self._exported.nbytes}")
        return DevicePart(self, Span(start, stop - start))

    def __len__(self) -> int:
        return self._exported.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def to_mirror(self, span: Span) -> memoryview:
        """Copy a part to the mirror; return it there."""
        view = self.mirrored(span)
        self._exported.read(span.offset, _address(view), view.nbytes)
        return view

    def from_mirror(self, span: Span, nbytes: int) -> None:
        """Copy the beginning of a part from the mirror."""
        self._exported.write(span.offset, _address(self.mirrored(span)), nbytes)

    def mirrored(self, span: Span) -> memoryview:
        """Return a part of the mirror."""
        return self.mirror.memory[span.offset : span.offset + span.length]


class DevicePart:
    """A run of bytes of a device region.

    Attributes:
        region, span: which, and where.
    """

    def __init__(self, region: DeviceRegion, span: Span) -> None:
        self.region, self.span = region, span

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.span.length

    def on_host(self) -> memoryview:
        """Return its bytes, in memory of the host that is the same at each call."""
        return self.region.to_mirror(self.span)

    def room(self) -> memoryview:
        """Return the same memory, whatever is in it."""
        return self.region.mirrored(self.span)

    def filled(self, nbytes: int) -> None:
        """Take over as many bytes from there."""
        self.region.from_mirror(self.span, nbytes)


Data = Buffer | DevicePart
"""What blocks can be stored from."""
Room = bytearray | memoryview | DevicePart
"""What blocks can be read into."""


def rooms(out: Sequence[Room]) -> list[bytearray | memoryview]:
    """Return memory of the host for each part, which `take_over` copies from."""
    return [part.room() if isinstance(part, DevicePart) else part for part in out]


def take_over(out: Sequence[Room], nbytes: Sequence[int | None]) -> None:
    """Copy to GPUs what was read into `rooms`; None for what was not."""
    for part, size in zip(out, nbytes, strict=True):
        if isinstance(part, DevicePart) and size:
            part.filled(size)


def _send(offer: bytes, connection: socket.socket) -> None:
    connection.settimeout(OPEN_S)
    connection.send(offer)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
