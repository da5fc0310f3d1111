"""Memory shared with the daemon: blocks go through it without a socket."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Literal, Self, TypeVar
from weakref import WeakSet

from kvtcd.client.address import Address
from kvtcd.client.arguments import block_head, region_bytes
from kvtcd.client.call import flat
from kvtcd.client.device import Data, DevicePart, DeviceRegion
from kvtcd.client.sharing import Sharing
from kvtcd.core.errors import BadRequest, DeadlineExceeded, KvtcdError, NotFound, Unavailable
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.regions import (
    HELLO,
    REGION,
    SEALS,
    Landed,
    Placed,
    PlacedHead,
    PlacedKey,
    RegionGet,
    RegionPut,
    Span,
)
from kvtcd.mapping import HUGE, make_huge, mapped


class Region:
    """Memory for blocks, which the daemon maps too where it can. Any thread may use it.

    A block that lies in it is stored from there, and one that is read into it is written there by the
    daemon: the client whose `region` made it sees by itself that a buffer is a part of it. Where memory
    cannot be shared, the same calls send the bytes over HTTP. While a call runs, leave its part alone.

    Pages come into being when they are first written to, which takes several times as long as writing to
    them again: keep a region.

    Attributes:
        memory: all of it, writable.

    Raises:
        BadRequest: not a byte is asked for.
        Unavailable: so much memory cannot be had.
    """

    def __init__(self, address: Address, nbytes: int) -> None:
        region_bytes(nbytes)
        self._fd = os.memfd_create("kvtcd-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            self._map = mapped(self._fd, nbytes)
        except (OSError, OverflowError) as error:
            os.close(self._fd)
            raise Unavailable(f"memory for a region of {nbytes} bytes cannot be had: {error}") from None
        except BaseException:
            os.close(self._fd)
            raise
        self.memory = memoryview(self._map)
        self._begin = _address(self.memory)
        self._lent, self._huge = set[int](), set[int]()
        """Numbers of huge pages that lie under what was lent once, and of those that were asked for."""
        self._sharing = Sharing(address, partial(_send, self._fd))
        self.share()

    @property
    def path(self) -> Literal["region", "http"]:
        """How bytes go from and to it now."""
        return "region" if self._sharing.is_shared else "http"

    @property
    def why(self) -> str:
        """Why that is not ``region``, if so."""
        return self._sharing.why

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more; so too where the daemon holds on to what it was lent."""
        return self._sharing.closed

    def share(self) -> str | None:
        """Return under which id the daemon knows it, None if it cannot; tries to share it if it is not."""
        return self._sharing.share()

    def recall(self, region: str, why: str) -> None:
        """Share it no more under this id, for a reason, and wait until the daemon writes nothing to it.

        Raises:
            Unavailable: the daemon does not say so; the memory cannot be used again.
        """
        if not self._sharing.recall(why, region):
            self.close()
            raise Unavailable("the daemon holds on to a region; make another one")

    def span(self, data: Data) -> Span | None:
        """Return where in it a buffer lies, None for one that is not a part of it."""
        if isinstance(data, DevicePart):
            return None
        view = memoryview(data)
        if view.readonly or not view.nbytes or not view.c_contiguous:
            return None
        offset = _address(view) - self._begin
        return Span(offset, view.nbytes) if 0 <= offset <= len(self.memory) - view.nbytes else None

    def settle(self, spans: Iterable[Span]) -> None:
        """Have huge pages under what is lent for the second time: to make them takes longer than one copy."""
        for span in spans:
            end = min(span.offset + span.length, len(self.memory) // HUGE * HUGE)
            wanted = set(range(span.offset // HUGE, -(-end // HUGE))) - self._huge
            for number in wanted & self._lent:
                make_huge(self._map, number)
                self._huge.add(number)
            self._lent |= wanted

    def close(self) -> None:
        """Share it no more. The memory stays as long as something refers to it."""
        if self._sharing.close():
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Loan:
    """Buffers of one call that all lie in one region, while the daemon works on them.

    Attributes:
        name: of the region, to the daemon.
        spans: where in it each buffer lies.
    """

    def __init__(self, region: Region | DeviceRegion, name: str, spans: Sequence[Span]) -> None:
        self._region = region
        self.name, self.spans = name, spans

    def only(self) -> Placed:
        """Return where the only buffer is."""
        (span,) = self.spans
        return Placed(self.name, span)

    def put(self, heads: Iterable[BlockHead]) -> RegionPut:
        """Return the request to store what lies in the buffers, in order."""
        rows = zip(map(block_head, heads), self.spans, strict=True)
        return RegionPut(self.name, tuple(PlacedHead(head, span) for head, span in rows))

    def get(self, keys: Iterable[EngineKey]) -> RegionGet:
        """Return the request to read blocks into the buffers, in order."""
        return RegionGet(self.name, tuple(map(PlacedKey, keys, self.spans)))

    def broken_off(self, error: BaseException) -> bool:
        """Note how a call failed; return once the daemon touches the buffers no more.

        True: it failed because the daemon does not know the region, for instance since it was started anew.

        Raises:
            Unavailable: the daemon holds on to them.
        """
        unknown = isinstance(error, NotFound) and error.what == REGION
        answered = isinstance(error, KvtcdError) and not isinstance(error, Unavailable | DeadlineExceeded)
        if unknown or not answered:
            why = _LOST if unknown else f"a call was broken off: {str(error) or type(error).__name__}"
            self._region.recall(self.name, why)
        return unknown


R = TypeVar("R", Region, DeviceRegion)
_LOST = "the daemon does not know the region any more, it may have been started anew; the next call shares it"


class Regions:
    """The regions of one client. Any thread may use it."""

    def __init__(self) -> None:
        self._regions: WeakSet[Region | DeviceRegion] = WeakSet()

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self._regions)

    def add(self, region: R) -> R:
        """Look for buffers in this one too."""
        self._regions.add(region)
        return region

    def close(self) -> None:
        """Share none of them any more."""
        while self._regions:
            self._regions.pop().close()

    def lend(self, parts: Sequence[Data]) -> Loan | None:
        """Lend out some buffers, None unless they are all in one region that the daemon shares."""
        for region in list(self._regions):
            spans = [span for part in parts if (span := region.span(part))]
            if spans and len(spans) == len(parts) and (name := region.share()) is not None:
                if isinstance(region, Region):
                    region.settle(spans)
                return Loan(region, name, spans)
        return None


def one_each(keys: Sequence[bytes], out: Sequence[object] | None) -> None:
    """Raise `BadRequest` unless there is a buffer for each key, or none are given."""
    if out is not None and len(out) != len(keys):
        raise BadRequest("out", f"has {len(out)} buffers for {len(keys)} keys")


def in_region(
    landed: Sequence[Landed], out: Sequence[bytearray | memoryview]
) -> Iterator[tuple[EngineKey, memoryview | None]]:
    """Yield each key with that part of its buffer which the daemon has written, or None for a miss."""
    for one, buffer in zip(landed, out, strict=True):
        yield one.found.key, flat(buffer)[: one.nbytes] if one.found.tier else None


def _send(fd: int, connection: socket.socket) -> None:
    socket.send_fds(connection, [HELLO], [fd])


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
