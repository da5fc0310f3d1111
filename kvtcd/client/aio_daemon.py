"""What the async client does with the daemon as a whole: the methods of `daemon.DaemonClient`, awaited."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
from yarl import URL

from kvtcd.client import endpoints
from kvtcd.client.address import Address
from kvtcd.client.call import Call, Options, pauses
from kvtcd.client.connections import GRACE_S, PIECE
from kvtcd.client.device import Data, DeviceRegion
from kvtcd.client.regions import Loan, Region, Regions
from kvtcd.core.errors import DeadlineExceeded, ServerError, Unavailable
from kvtcd.core.identity import Identity
from kvtcd.core.messages import Info, NamespaceInfo, Removed
from kvtcd.core.notices import Notice, NoticeParser
from kvtcd.core.operation import Operation
from kvtcd.cuda.driver import Driver

T = TypeVar("T")


class AsyncDaemonClient:
    """Connections to one daemon, for one event loop, and what is asked of the daemon as a whole.

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
        self._timeout = timeout
        self._regions = Regions()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections, and share no memory any more. The client can still be used."""
        await asyncio.to_thread(self._regions.close)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            path, tls = self.address.socket, self.address.tls
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path) if path else aiohttp.TCPConnector(ssl=tls or True),
                read_bufsize=PIECE,
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            )
        return self._session

    @asynccontextmanager
    async def _exchange(self, call: Call[Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        seconds = max(self._timeout, (call.deadline or 0.0) + GRACE_S)
        try:
            async with await self._send(
                call, aiohttp.ClientTimeout(sock_connect=seconds, sock_read=seconds)
            ) as answer:
                yield answer
        except aiohttp.ClientConnectorCertificateError as error:
            untrusted = error.certificate_error
            assert isinstance(untrusted, ssl.SSLCertVerificationError), "what a handshake raises"
            raise self.address.unavailable(untrusted) from None
        except aiohttp.ClientConnectorError as error:
            raise self.address.unavailable(error.os_error) from None
        except TimeoutError:
            raise DeadlineExceeded("the daemon's answer", seconds) from None
        except aiohttp.ClientError as error:
            raise Unavailable(
                f"the daemon on {self.address} broke off: {str(error) or type(error).__name__}"
            ) from None

    async def _send(self, call: Call[Any], limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        url = URL(f"{self.address.scheme}://{self.address.netloc}{call.path}", encoded=True)
        headers = self.address.headers() | dict(call.headers)
        if call.body:
            headers["Content-Length"] = str(call.nbytes)

        async def once() -> aiohttp.ClientResponse:
            body = _pieces(call) if call.body else None
            return await self._connected().request(
                call.method, url, data=body, headers=headers, timeout=limits, allow_redirects=False
            )

        try:
            return await once()
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            # A kept connection that the daemon had closed meanwhile.
            if not call.repeatable or isinstance(error, aiohttp.ClientConnectorError):
                raise
            return await once()

    async def _run(self, call: Call[T]) -> T:
        async with self._exchange(call) as answer:
            return call.answer(answer.status, await answer.read())

    async def region(self, nbytes: int) -> Region:
        """Return memory for blocks that the daemon maps too, if it can: what lies in it need not be sent."""
        return self._regions.add(await asyncio.to_thread(Region, self.address, nbytes))

    async def device_region(self, memory: object) -> DeviceRegion:
        """Return memory of a GPU for blocks, which the daemon opens too, if it can."""

        def host(nbytes: int) -> Region:
            return self._regions.add(Region(self.address, nbytes))

        def opened() -> DeviceRegion:
            return DeviceRegion(self.address, memory, host, Driver.load())

        return self._regions.add(await asyncio.to_thread(opened))

    async def _lend(self, parts: Sequence[Data]) -> Loan | None:
        return await asyncio.to_thread(self._regions.lend, parts) if self._regions else None

    async def _on_loan(self, loan: Loan, call: Call[T]) -> T | None:
        try:
            return await self._run(call)
        except BaseException as error:
            if await asyncio.shield(asyncio.to_thread(loan.broken_off, error)):
                return None
            raise

    async def info(self) -> Info:
        """Return versions and boot id."""
        return await self._run(endpoints.info())

    async def ready(self) -> bool:
        """Tell whether a daemon is there, and serves and takes blocks."""
        try:
            return await self._run(endpoints.ready())
        except (Unavailable, ServerError):
            return False

    async def register(
        self, name: str, identity: Identity, *, deadline: float | None = None
    ) -> NamespaceInfo:
        """Register a namespace; once more with the same identity changes nothing."""
        return await self._run(endpoints.register(name, identity, Options(deadline=deadline)))

    async def namespace(self, name: str) -> NamespaceInfo:
        """Describe a namespace."""
        return await self._run(endpoints.namespace(name))

    async def namespaces(self) -> tuple[NamespaceInfo, ...]:
        """Describe all namespaces of the caller."""
        return await self._run(endpoints.namespaces())

    async def purge(self, name: str, *, tenant: str | None = None, deadline: float | None = None) -> Removed:
        """Remove a namespace and every byte of its blocks, durably; return what that has removed.

        Args:
            name: of the namespace.
            tenant: whose it is, for those who have the scope `admin`; None: the caller's own.
            deadline: seconds to wait; the purge goes on behind it.
        """
        return await self._run(endpoints.purge(name, tenant, Options(deadline=deadline)))

    async def stats(self) -> dict[str, Any]:
        """Return the state of the daemon."""
        return await self._run(endpoints.stats())

    async def history(self) -> dict[str, Any]:
        """Return the daemon's sums over the last hour, one sample in `every_s` seconds."""
        return await self._run(endpoints.history())

    async def tenants(self) -> list[dict[str, Any]]:
        """Return what each tenant has, and what he found.

        Raises:
            ServerError: the caller does not have the scope `admin`.
        """
        return await self._run(endpoints.tenants())

    async def prefixes(self, namespace: str | None = None) -> list[dict[str, Any]]:
        """Return the prefixes that matches found most often, of all namespaces of the caller or of one.

        Raises:
            UnknownNamespace: there is none of that name.
        """
        return await self._run(endpoints.prefixes(namespace))

    async def policies(self) -> list[dict[str, Any]]:
        """Return the policies in effect, in order, each with the caller's `namespaces` that it governs."""
        return await self._run(endpoints.policies())

    async def reload_policies(self, *, deadline: float | None = None) -> list[dict[str, Any]]:
        """Have the policy files read anew, without a restart; return those in effect.

        Raises:
            ConfigError: a file is wrong; nothing has changed.
            ServerError: the caller is neither the daemon's user nor root.
        """
        return await self._run(endpoints.reload_policies(Options(deadline=deadline)))

    async def events(
        self, namespace: str | None = None, *, after: str | None = None
    ) -> AsyncIterator[Notice]:
        """Yield what becomes of the caller's blocks, until the daemon stops; see `sync.Client.events`."""
        call = endpoints.events(namespace, after)
        async with self._exchange(call) as answer:
            if answer.status >= 400:
                call.answer(answer.status, await answer.read())
            parser = NoticeParser()
            while piece := await answer.content.readany():
                for notice in parser.feed(piece):
                    yield notice

    async def operation(self, operation_id: str) -> Operation:
        """Return an operation as it is now."""
        return await self._run(endpoints.operation(operation_id))

    async def ended(self, operation: Operation) -> Operation:
        """Wait until an operation has ended; return it as it is then."""
        for pause in pauses():
            if operation.state != "running":
                break
            await asyncio.sleep(pause)
            operation = await self.operation(operation.id)
        return operation

    async def cancel(self, operation_id: str) -> Operation:
        """End an operation; what it has done stays done.

        Raises:
            NotFound: there is none of that id, or it was forgotten.
        """
        return await self._run(endpoints.cancel(operation_id))


async def _pieces(call: Call[Any]) -> AsyncIterator[memoryview]:
    """Yield a body in pieces: one large body would be copied whole, and block the loop meanwhile."""
    for part in call.body:
        view = memoryview(part)
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]
