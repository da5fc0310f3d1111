"""Any store with the S3 protocol. It keeps no time to live: that is a lifecycle rule of the bucket."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import GenericError
from obstore.store import S3Store as Bucket

T = TypeVar("T")
U = TypeVar("U")
_REFUSED = re.compile(r"status code: 4(?!08|29)")
"""How the library says that it is the request that is wrong, and not the service or the time."""
_AT_ONCE = 32
"""Requests that are under way."""
_DELETED = 1000
"""Names of one request to delete, the most that S3 takes."""


class S3Store:
    """One bucket, or what has a prefix in it.

    Args:
        bucket: its name.
        prefix: of all names, without a slash at its end; empty for none.
        timeout: seconds of one request.
        endpoint: URL of the service, None for that of AWS.
        region: of the bucket.
        key_id: of the access key, None to look for one as AWS's own clients do.
        secret: of the access key.
        session: token of temporary access, None without.
    """

    def __init__(
        self, bucket: str, *, prefix: str, timeout: float, endpoint: str | None, region: str,
        key_id: str | None = None, secret: str | None = None, session: str | None = None,
    ) -> None:  # fmt: skip
        options: dict[str, Any] = {"region": region, "virtual_hosted_style_request": endpoint is None}
        named = {
            "endpoint": endpoint, "access_key_id": key_id, "secret_access_key": secret,
            "session_token": session,
        }  # fmt: skip
        options |= {name: value for name, value in named.items() if value}
        self._bucket = Bucket(
            bucket,
            prefix=prefix or None,
            client_options={
                "timeout": timedelta(seconds=timeout), "connect_timeout": timedelta(seconds=timeout),
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
            },
            retry_config={"max_retries": 0},  # attempts are the caller's business
            **options,
        )  # fmt: skip
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def get(
        self, names: Sequence[str], most: int, came: Callable[[str, bytes | memoryview], None]
    ) -> list[bool | Exception]:
        """Hand out values; return which names have one. Of one larger than `most`, nothing is read."""

        async def one(name: str) -> bool:
            try:
                found = await obstore.get_async(self._bucket, name)
            except FileNotFoundError:
                return False
            large = found.meta["size"] > most  # no record
            came(name, b"\0" if large else memoryview(await found.bytes_async()))
            return True

        return await self._each(one, names)

    async def piece(self, name: str, start: int, nbytes: int) -> bytes | memoryview:
        """Return some bytes of a value: fewer where it ends, none where there is nothing."""
        async with self._turns:
            try:
                size = (await obstore.head_async(self._bucket, name))["size"]
                if start >= size:  # of which no range can be asked for
                    return b""
                length = min(nbytes, size - start)
                return memoryview(
                    await obstore.get_range_async(self._bucket, name, start=start, length=length)
                )
            except FileNotFoundError:
                return b""

    async def put(
        self, items: Sequence[tuple[str, tuple[bytes | memoryview, ...], int | None]]
    ) -> list[Exception | None]:
        """Store values under names; see `RedisStore.put`, but for the time."""

        async def one(item: tuple[str, tuple[bytes | memoryview, ...], int | None]) -> None:
            name, parts, _ = item
            # An iterator is sent as it is; joined, a value of 4 MiB takes 2.5 ms more of a core.
            await obstore.put_async(self._bucket, name, iter(parts), use_multipart=False)

        return await self._each(one, items)

    async def exists(self, names: Sequence[str]) -> list[bool | Exception]:
        """Tell which names have a value."""

        async def one(name: str) -> bool:
            try:
                await obstore.head_async(self._bucket, name)
            except FileNotFoundError:
                return False
            return True

        return await self._each(one, names)

    async def delete(self, names: Sequence[str]) -> list[Exception | None]:
        """Remove values; one that is not there is no error."""

        async def some(start: int) -> None:
            await obstore.delete_async(self._bucket, list(names[start : start + _DELETED]))

        starts = range(0, len(names), _DELETED)
        answers = await self._each(some, list(starts))
        return [
            answer
            for start, answer in zip(starts, answers, strict=True)
            for _ in names[start : start + _DELETED]
        ]

    async def listing(self, prefix: str) -> AsyncIterator[str]:
        """Yield all names that begin so; `prefix` ends where a name has a slash."""
        async for page in obstore.list(self._bucket, prefix=prefix.rstrip("/")):
            for meta in page:
                yield meta["path"]

    async def close(self) -> None:
        """Connections end by themselves."""

    async def _each(self, call: Callable[[T], Awaitable[U]], items: Sequence[T]) -> list[U | Exception]:
        async def one(item: T) -> U:
            async with self._turns:
                return await call(item)

        answers: list[U | Exception] = []
        for answer in await asyncio.gather(*map(one, items), return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
            answers.append(_away(answer) if isinstance(answer, GenericError) else answer)
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors and len(errors) == len(answers):
            raise errors[0]
        return answers


def _away(error: GenericError) -> Exception:
    """Return what says in Python's own words that nobody could be asked, if that is so."""
    return error if _REFUSED.search(str(error)) else ConnectionError(str(error))
