"""Memory shared with the daemon: blocks go through it without a socket."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Literal, Self
from weakref import WeakSet

from kvtcd.client.address import Address
from kvtcd.client.arguments import block_head, region_bytes
from kvtcd.client.call import Buffer, flat, problem
from kvtcd.core.errors import BadRequest, Corrupt, DeadlineExceeded, KvtcdError, NotFound, Unavailable
from kvtcd.core.fields import json_object
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.regions import (
    HELLO,
    MAX_ANSWER,
    REGION,
    SEALS,
    Grant,
    Landed,
    Placed,
    RegionGet,
    RegionPut,
    Span,
    side_socket,
)

CONNECT_S = 5.0


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
        self._address = address
        self._lock = threading.Lock()
        self._shared: tuple[socket.socket, str] | None = None
        self._why = ""
        self._fd = os.memfd_create("kvtcd-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            self.memory = memoryview(mmap.mmap(self._fd, nbytes))
        except (OSError, OverflowError) as error:
            os.close(self._fd)
            raise Unavailable(f"memory for a region of {nbytes} bytes cannot be had: {error}") from None
        except BaseException:
            os.close(self._fd)
            raise
        self._begin = _address(self.memory)
        self.share()

    @property
    def path(self) -> Literal["region", "http"]:
        """How bytes go from and to it now."""
        return "region" if self._shared else "http"

    @property
    def why(self) -> str:
        """Why that is not ``region``, if so."""
        return self._why

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more; so too where the daemon holds on to what it was lent."""
        return self._fd < 0

    def share(self) -> str | None:
        """Return under which id the daemon knows it, None if it cannot; tries to share it if it is not."""
        with self._lock:
            if self._shared is None and self._fd >= 0:
                try:
                    self._shared = _hand_over(self._address, self._fd)
                    self._why = ""
                except KvtcdError as error:
                    self._why = str(error)
            return self._shared[1] if self._shared else None

    def recall(self, region: str) -> None:
        """Share it no more under this id, and wait until the daemon writes nothing to it.

        Raises:
            Unavailable: the daemon does not say so; the memory cannot be used again.
        """
        with self._lock:
            if self._shared is None or self._shared[1] != region:
                return
            connection, _ = self._shared
            self._shared = None
        with connection:
            try:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1):
                    pass
            except TimeoutError:
                self.close()
                raise Unavailable("the daemon holds on to a region; make another one") from None
            except OSError:
                pass  # it is gone, and all that it did with it

    def span(self, data: Buffer) -> Span | None:
        """Return where in it a buffer lies, None for one that is not a part of it."""
        view = memoryview(data)
        if view.readonly or not view.nbytes or not view.c_contiguous:
            return None
        offset = _address(view) - self._begin
        return Span(offset, view.nbytes) if 0 <= offset <= len(self.memory) - view.nbytes else None

    def close(self) -> None:
        """Share it no more. The memory stays as long as something refers to it."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            if self._shared:
                self._shared[0].close()
                self._shared = None
                self._why = "the region is closed"

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

    def __init__(self, region: Region, name: str, spans: Sequence[Span]) -> None:
        self._region = region
        self.name, self.spans = name, spans

    def only(self) -> Placed:
        """Return where the only buffer is."""
        (span,) = self.spans
        return Placed(self.name, span)

    def put(self, heads: Iterable[BlockHead]) -> RegionPut:
        """Return the request to store what lies in the buffers, in order."""
        return RegionPut(self.name, list(zip(map(block_head, heads), self.spans, strict=True)))

    def get(self, keys: Iterable[EngineKey]) -> RegionGet:
        """Return the request to read blocks into the buffers, in order."""
        return RegionGet(self.name, list(zip(keys, self.spans, strict=True)))

    def broken_off(self, error: BaseException) -> bool:
        """Note how a call failed; return once the daemon touches the buffers no more.

        True: it failed because the daemon does not know the region, for instance since it was started anew.

        Raises:
            Unavailable: the daemon holds on to them.
        """
        unknown = isinstance(error, NotFound) and error.what == REGION
        answered = isinstance(error, KvtcdError) and not isinstance(error, Unavailable | DeadlineExceeded)
        if unknown or not answered:
            self._region.recall(self.name)
        return unknown


class Regions:
    """The regions of one client. Any thread may use it."""

    def __init__(self) -> None:
        self._regions: WeakSet[Region] = WeakSet()

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self._regions)

    def add(self, region: Region) -> Region:
        """Look for buffers in this one too."""
        self._regions.add(region)
        return region

    def close(self) -> None:
        """Share none of them any more."""
        while self._regions:
            self._regions.pop().close()

    def lend(self, parts: Sequence[Buffer]) -> Loan | None:
        """Lend out some buffers, None unless they are all in one region that the daemon shares."""
        for region in list(self._regions):
            spans = [span for part in parts if (span := region.span(part))]
            if spans and len(spans) == len(parts) and (name := region.share()) is not None:
                return Loan(region, name, spans)
        return None


def one_each(keys: Sequence[bytes], out: Sequence[bytearray | memoryview] | None) -> None:
    """Raise `BadRequest` unless there is a buffer for each key, or none are given."""
    if out is not None and len(out) != len(keys):
        raise BadRequest("out", f"has {len(out)} buffers for {len(keys)} keys")


def in_region(
    landed: Sequence[Landed], out: Sequence[bytearray | memoryview]
) -> Iterator[tuple[EngineKey, memoryview | None]]:
    """Yield each key with that part of its buffer which the daemon has written, or None for a miss."""
    for one, buffer in zip(landed, out, strict=True):
        yield one.found.key, flat(buffer)[: one.nbytes] if one.found.tier else None


def _hand_over(address: Address, fd: int) -> tuple[socket.socket, str]:
    """Send a descriptor to a daemon; return the connection that keeps it shared, and the id of the region.

    Raises:
        KvtcdError: it cannot be had, and why.
    """
    if address.socket is None:
        raise Unavailable(f"memory is shared on a Unix socket only, not on {address}")
    path = side_socket(address.socket)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(CONNECT_S)
        connection.connect(path)
        socket.send_fds(connection, [HELLO], [fd])
        return connection, _granted(connection.recv(MAX_ANSWER)).region
    except (OSError, Corrupt) as error:
        connection.close()
        raise Unavailable(f"the daemon shares no memory on {path}: {error}") from None
    except BaseException:
        connection.close()
        raise


def _granted(answer: bytes) -> Grant:
    body = json_object(answer)
    if "region" not in body:
        raise problem(int(body.get("status", 0)), answer)
    return Grant.from_json(body)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
