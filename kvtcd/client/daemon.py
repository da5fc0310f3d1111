"""What the client for threads does with the daemon as a whole: connections, state, notices, operations."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from kvtcd.client import endpoints
from kvtcd.client.address import Address
from kvtcd.client.call import Call, Options, pauses
from kvtcd.client.connections import Pool
from kvtcd.client.device import DeviceRegion
from kvtcd.client.regions import Loan, Region, Regions
from kvtcd.core.errors import ServerError, Unavailable
from kvtcd.core.identity import Identity
from kvtcd.core.messages import Info, NamespaceInfo, Removed
from kvtcd.core.notices import Notice, NoticeParser
from kvtcd.core.operation import Operation
from kvtcd.cuda.driver import Driver

_PART = 64 << 10
T = TypeVar("T")


class DaemonClient:
    """Connections to one daemon, and what is asked of the daemon as a whole. Any thread may use it.

    Args:
        address: path of the daemon's socket, or ``http://host:port``, or https; default ``$KVTCD_SOCKET``,
            else ``/run/kvtcd/kvtcd.sock``.
        token: for a daemon that is reached by TCP; default ``$KVTCD_TOKEN``.
        ca: file of the certificates that https may lead to; default ``$KVTCD_CA``, else the system's.
        timeout: seconds for each read and write on the socket.
    """

    def __init__(
        self,
        address: str | Path | None = None,
        *,
        token: str | None = None,
        ca: str | Path | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.address = Address.of(address, token, ca)
        self._pool = Pool(self.address, timeout)
        self._regions = Regions()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections, and share no memory any more. The client can still be used."""
        self._pool.close()
        self._regions.close()

    def _run(self, call: Call[T]) -> T:
        with self._pool.exchange(call) as response:
            return call.answer(response.status, response.read())

    def region(self, nbytes: int) -> Region:
        """Return memory for blocks that the daemon maps too, if it can: what lies in it need not be sent.

        Put blocks from parts of it, and read them into parts of it (`out`). Its `path` says whether it is
        shared; where it is not, the same calls send bytes over HTTP. Close it when it is done with.
        """
        return self._regions.add(Region(self.address, nbytes))

    def device_region(self, memory: object) -> DeviceRegion:
        """Return memory of a GPU for blocks, which the daemon opens too, if it can: they go there directly.

        Put blocks from parts of it, and `fill` parts of it. Its `path` says whether it is shared; where it is
        not, the same calls take the bytes through the host. Note work on it by its `record`, and close it
        before the memory is freed.

        Args:
            memory: an object with ``__cuda_array_interface__``, or ``(address, bytes)``.

        Raises:
            NoDriver: this process has no CUDA driver.
            BadRequest: it is not contiguous, writable memory of a GPU.
        """
        return self._regions.add(DeviceRegion(self.address, memory, self.region, Driver.load()))

    def _on_loan(self, loan: Loan, call: Call[T]) -> T | None:
        """Carry out a call on buffers in a region; None if the daemon does not know it any more."""
        try:
            return self._run(call)
        except BaseException as error:
            if loan.broken_off(error):
                return None
            raise

    def info(self) -> Info:
        """Return versions and boot id."""
        return self._run(endpoints.info())

    def ready(self) -> bool:
        """Tell whether a daemon is there, and serves and takes blocks."""
        try:
            return self._run(endpoints.ready())
        except (Unavailable, ServerError):
            return False

    def register(self, name: str, identity: Identity, *, deadline: float | None = None) -> NamespaceInfo:
        """Register a namespace; once more with the same identity changes nothing.

        Raises:
            IdentityConflict: name and identity are taken, but not together.
        """
        return self._run(endpoints.register(name, identity, Options(deadline=deadline)))

    def namespace(self, name: str) -> NamespaceInfo:
        """Describe a namespace.

        Raises:
            UnknownNamespace: there is none of that name.
        """
        return self._run(endpoints.namespace(name))

    def namespaces(self) -> tuple[NamespaceInfo, ...]:
        """Describe all namespaces of the caller."""
        return self._run(endpoints.namespaces())

    def purge(self, name: str, *, tenant: str | None = None, deadline: float | None = None) -> Removed:
        """Remove a namespace and every byte of its blocks, durably; return what that has removed.

        Args:
            name: of the namespace.
            tenant: whose it is, for those who have the scope `admin`; None: the caller's own.
            deadline: seconds to wait; the purge goes on behind it.
        """
        return self._run(endpoints.purge(name, tenant, Options(deadline=deadline)))

    def stats(self) -> dict[str, Any]:
        """Return the state of the daemon."""
        return self._run(endpoints.stats())

    def history(self) -> dict[str, Any]:
        """Return the daemon's sums over the last hour, one sample in `every_s` seconds."""
        return self._run(endpoints.history())

    def tenants(self) -> list[dict[str, Any]]:
        """Return what each tenant has, and what he found.

        Raises:
            ServerError: the caller does not have the scope `admin`.
        """
        return self._run(endpoints.tenants())

    def prefixes(self, namespace: str | None = None) -> list[dict[str, Any]]:
        """Return the prefixes that matches found most often, of all namespaces of the caller or of one.

        Raises:
            UnknownNamespace: there is none of that name.
        """
        return self._run(endpoints.prefixes(namespace))

    def policies(self) -> list[dict[str, Any]]:
        """Return the policies in effect, in order, each with the caller's `namespaces` that it governs."""
        return self._run(endpoints.policies())

    def reload_policies(self, *, deadline: float | None = None) -> list[dict[str, Any]]:
        """Have the policy files read anew, without a restart; return those in effect.

        Raises:
            ConfigError: a file is wrong; nothing has changed.
            ServerError: the caller is neither the daemon's user nor root.
        """
        return self._run(endpoints.reload_policies(Options(deadline=deadline)))

    def events(self, namespace: str | None = None, *, after: str | None = None) -> Iterator[Notice]:
        """Yield what becomes of the caller's blocks, as it happens, until the daemon stops.

        What is told begins with the call. An `OVERFLOW` says that notices were lost: ask anew what is where.

        Args:
            namespace: only of this one.
            after: id of the last notice that was seen: go on after it, if that is still known.

        Raises:
            UnknownNamespace: there is none of that name.
            Busy: too many listen.
        """
        call = endpoints.events(namespace, after)
        with self._pool.exchange(call) as response:
            require_ok(call, response)
            parser = NoticeParser()
            while piece := response.read1(_PART):
                yield from parser.feed(piece)

    def operation(self, operation_id: str) -> Operation:
        """Return an operation as it is now.

        Raises:
            NotFound: there is none of that id, or it was forgotten.
        """
        return self._run(endpoints.operation(operation_id))

    def ended(self, operation: Operation) -> Operation:
        """Wait until an operation has ended; return it as it is then."""
        for pause in pauses():
            if operation.state != "running":
                break
            time.sleep(pause)
            operation = self.operation(operation.id)
        return operation

    def cancel(self, operation_id: str) -> Operation:
        """End an operation; what it has done stays done.

        Raises:
            NotFound: there is none of that id, or it was forgotten.
        """
        return self._run(endpoints.cancel(operation_id))


def require_ok(call: Call[None], response: http.client.HTTPResponse) -> None:
    """Raise the error that an answer stands for, if it is one."""
    if response.status >= 400:
        call.answer(response.status, response.read())
