"""Redis and Valkey, alone or as a cluster: pipelines, and a time to live for each value."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import Pipeline
from redis.asyncio.cluster import ClusterNode, ClusterPipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, ClusterError, ResponseError, SlotNotCoveredError
from redis.exceptions import ConnectionError as Unconnected
from redis.exceptions import TimeoutError as Late

from kvtcd.tiers.remote.redis_connection import DirectConnection, DirectTLSConnection, Joined, Parts

_PAGE = 1000
"""Names that a server looks at in one go when it lists."""

Came = Callable[[str, bytes | memoryview], None]
"""Told of a name and its value."""
Command = tuple[Any, ...]
"""What is sent: a word, then the name that it is about."""


class RedisStore:
    """One server, or a cluster.

    Args:
        hosts: names and ports: of the server, or of some nodes of the cluster.
        cluster: whether it is one.
        database: number of the database; a cluster has only 0.
        timeout: seconds of one call, and of a connection.
        tls: encrypt, and check the server's certificate.
        authority: PEM file of who signs that, None for those that the system trusts.
        username: of an ACL, None without.
        password: None without.
    """

    def __init__(
        self, hosts: Sequence[tuple[str, int]], *, cluster: bool, timeout: float, database: int = 0,
        tls: bool = False, authority: str | None = None, username: str | None = None,
        password: str | None = None,
    ) -> None:  # fmt: skip
        # Attempts are the caller's business: here each call is made once.
        options: dict[str, Any] = {
            "username": username, "password": password, "socket_timeout": timeout,
            "socket_connect_timeout": timeout, "retry": Retry(NoBackoff(), 0), "ssl": tls,
            "driver_info": None,  # to learn its own version it reads files, on the event loop
        }  # fmt: skip
        if authority:
            options["ssl_ca_certs"] = authority
        connection = DirectTLSConnection if tls else DirectConnection
        self._cluster: RedisCluster | None = None
        self._single: Redis | None = None
        if cluster:
            nodes = [ClusterNode(host, port) for host, port in hosts]
            self._cluster = RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)
            self._cluster.connection_kwargs["connection_class"] = connection
            for node in self._cluster.startup_nodes:
                node.connection_class = connection
        else:
            host, port = hosts[0]
            self._single = Redis(host=host, port=port, db=database, **options)
            self._single.connection_pool.connection_class = connection
        client: Any = self._cluster if cluster else self._single
        client.set_response_callback("GETRANGE", _handed_out)

    async def get(self, names: Sequence[str], most: int, came: Came) -> list[bool | Exception]:
        """Hand out values, of each at most one byte more than `most`; return which names have one."""
        answers = await self._ask([("GETRANGE", name, 0, most) for name in names], came)
        for number, (name, answer) in enumerate(zip(names, answers, strict=True)):
            if isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE"):
                came(name, b"\0")  # something else has this name: no record, and no fault of the server
                answers[number] = True
        await self._tell_empty(names, answers, came)
        return answers

    async def _tell_empty(self, names: Sequence[str], answers: list[Any], came: Came) -> None:
        """Hand out empty values, which no range tells from missing ones."""
        none = [number for number, answer in enumerate(answers) if answer is False]
        asked = [(word, names[number]) for number in none for word in ("EXISTS", "STRLEN")]
        found = iter(await self._ask(asked) if asked else [])
        for number, there, length in zip(none, found, found, strict=True):
            if isinstance(there, Exception):
                answers[number] = there
            elif there and length == 0:
                came(names[number], b"")
                answers[number] = True

    async def piece(self, name: str, start: int, nbytes: int) -> bytes | memoryview:
        """Return some bytes of a value: fewer where it ends, none where there is nothing."""
        found: list[bytes | memoryview] = []
        command = ("GETRANGE", name, start, start + nbytes - 1)
        (answer,) = await self._ask([command], lambda _, value: found.append(value))
        if isinstance(answer, Exception):
            raise answer
        return found[0] if found else b""

    async def put(self, items: Sequence[tuple[str, Parts, int | None]]) -> list[Exception | None]:
        """Store values under names, each for so many seconds, or for as long as the server likes."""
        timed = [("SET", name, Joined(parts), *(("EX", ttl) if ttl else ())) for name, parts, ttl in items]
        return _done(await self._ask(timed))

    async def exists(self, names: Sequence[str]) -> list[bool | Exception]:
        """Tell which names have a value."""
        answers = await self._ask([("EXISTS", name) for name in names])
        return [one if isinstance(one, Exception) else bool(one) for one in answers]

    async def delete(self, names: Sequence[str]) -> list[Exception | None]:
        """Remove values; one that is not there is no error."""
        return _done(await self._ask([("UNLINK", name) for name in names]))

    async def listing(self, prefix: str) -> AsyncIterator[str]:
        """Yield all names that begin so, perhaps one of them twice; the servers look at all they have."""
        pattern = _escaped(prefix) + "*"
        if self._single is not None:
            async for name in self._single.scan_iter(match=pattern, count=_PAGE):
                yield _text(name)
            return
        cluster = await self._ready()
        for node in cluster.get_primaries():
            async for name in cluster.scan_iter(match=pattern, count=_PAGE, target_nodes=node):
                yield _text(name)

    async def close(self) -> None:
        """End the connections."""
        if self._single is not None:
            await self._single.aclose()
        if self._cluster is not None:
            await self._cluster.aclose()

    async def _ask(self, commands: Sequence[Command], came: Came | None = None) -> list[Any]:
        """Send commands that have a name each: to a server in one pipeline, to a cluster in one a node."""
        if self._single is not None:
            return await _piped(self._single.pipeline(transaction=False), commands, came)
        cluster = await self._ready()
        parts: dict[str, list[int]] = {}
        for number, command in enumerate(commands):
            with suppress(SlotNotCoveredError):
                if node := cluster.get_node_from_key(command[1]):
                    parts.setdefault(node.name, []).append(number)
        answers: list[Any] = [ConnectionError("no node of the cluster has its slot")] * len(commands)
        calls = [_piped(cluster.pipeline(), [commands[n] for n in part], came) for part in parts.values()]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for part, result in zip(parts.values(), results, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
            for at, number in enumerate(part):
                answer = result if isinstance(result, Exception) else result[at]
                answers[number] = _away(answer) if isinstance(answer, Exception) else answer
        return answers

    async def _ready(self) -> RedisCluster:
        assert self._cluster is not None, "it is a cluster or a single server"
        return await self._cluster.initialize()


async def _piped(
    pipe: Pipeline | ClusterPipeline, commands: Sequence[Command], came: Came | None
) -> list[Any]:
    async with pipe:
        for command in commands:  # queued: the answers are had together
            _ = pipe.execute_command(*command, **({"came": partial(came, command[1])} if came else {}))
        return list(await pipe.execute(raise_on_error=False))


def _handed_out(value: bytes | memoryview, *, came: Callable[[bytes | memoryview], None]) -> bool:
    """Hand out a value when it has been read, while what comes behind it is under way; nobody keeps it."""
    if value:
        came(value)
    return bool(value)


def _done(answers: list[Any]) -> list[Exception | None]:
    return [answer if isinstance(answer, Exception) else None for answer in answers]


def _away(error: Exception) -> Exception:
    """Return what says so in Python's own words, if nobody could be asked."""
    if isinstance(error, Unconnected | ClusterDownError | ClusterError):
        return ConnectionError(str(error))
    return TimeoutError(str(error)) if isinstance(error, Late) else error


def _escaped(text: str) -> str:
    return "".join("\\" + letter if letter in "*?[]\\^" else letter for letter in text)


def _text(name: Any) -> str:  # noqa: ANN401 - bytes or str, as the client was made
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
