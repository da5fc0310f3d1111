"""The client libraries of shared stores as anybody would use them: what the remote tier is held against."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from kvtcd.config import BucketAt, Config, Credentials, RedisAt


class Library(Protocol):
    """Puts and gets some values in one call; raises what the library raises."""

    async def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Store values under names."""

    async def get(self, names: Sequence[str]) -> None:
        """Fetch values, and let go of them."""

    async def close(self) -> None:
        """End the connections."""


class RedisLibrary:
    """redis-py as it comes, but for the address: one pipeline for each call.

    Args:
        at: the server, or nodes of the cluster.
        entry: user and password.
        authority: as in config.toml.
        timeout: seconds.
    """

    def __init__(self, at: RedisAt, entry: Credentials, *, authority: str, timeout: float) -> None:
        from redis.asyncio import Redis, RedisCluster  # noqa: PLC0415 - an extra
        from redis.asyncio.cluster import ClusterNode  # noqa: PLC0415 - as above

        options: dict[str, Any] = {
            "username": entry.username or None, "password": entry.password or None, "ssl": at.tls,
            "socket_timeout": timeout,
            "driver_info": None,  # to learn its own version it reads files, on the event loop
        }  # fmt: skip
        if authority:
            options["ssl_ca_certs"] = authority
        (host, port), *_ = at.hosts
        self._client = (
            RedisCluster(startup_nodes=[ClusterNode(*node) for node in at.hosts], **options)
            if at.cluster
            else Redis(host=host, port=port, db=at.database, **options)
        )

    async def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Send SETs."""
        await self._piped([("SET", name, value) for name, value in items])

    async def get(self, names: Sequence[str]) -> None:
        """Send GETs."""
        await self._piped([("GET", name) for name in names])

    async def close(self) -> None:
        """End the connections."""
        await self._client.aclose()

    async def _piped(self, commands: Sequence[tuple[str | bytes, ...]]) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                _ = pipe.execute_command(*command)
            if not all(await pipe.execute()):
                raise LookupError("a value is not there")


class S3Library:
    """Obstore as it comes, but for the address: requests of one call are made at once.

    Args:
        at: the bucket.
        entry: key and secret.
        endpoint, region: as in config.toml.
    """

    def __init__(self, at: BucketAt, entry: Credentials, *, endpoint: str, region: str) -> None:
        import obstore  # noqa: PLC0415 - an extra
        from obstore.store import S3Store  # noqa: PLC0415 - as above

        given = {
            "endpoint": endpoint, "access_key_id": entry.key_id, "secret_access_key": entry.secret,
            "session_token": entry.session,
        }  # fmt: skip
        options: dict[str, Any] = {name: value for name, value in given.items() if value}
        self._put, self._get = obstore.put_async, obstore.get_async
        self._bucket = S3Store(
            at.bucket, prefix=at.prefix or None, region=region, virtual_hosted_style_request=not endpoint,
            client_options={"allow_http": endpoint.startswith("http://")}, **options,
        )  # fmt: skip

    async def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Put objects."""
        _ = await asyncio.gather(*(self._put(self._bucket, name, value) for name, value in items))

    async def get(self, names: Sequence[str]) -> None:
        """Get objects, and read them."""

        async def one(name: str) -> None:
            _ = await (await self._get(self._bucket, name)).bytes_async()

        await asyncio.gather(*map(one, names))

    async def close(self) -> None:
        """Connections end by themselves."""


def library(config: Config, entry: Credentials) -> Library:
    """Return the library of the store that a configuration names."""
    said = config.remote
    if isinstance(said.where, RedisAt):
        return RedisLibrary(said.where, entry, authority=said.authority, timeout=said.timeout)
    assert said.where is not None, "the configuration names a store"
    return S3Library(said.where, entry, endpoint=said.endpoint, region=said.region)
