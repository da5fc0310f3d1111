"""Calls of a shared store: with a time limit, a few attempts, and a breaker that leaves a dead one alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvtcd.core.errors import RemoteFailed, RemoteLate, RemoteLeftAlone
from kvtcd.core.remote.breaker import Breaker, BreakerState, pause
from kvtcd.engine.ports import Came, Item, RemoteStore, Value
from kvtcd.engine.remote.figures import Figures

T = TypeVar("T")
_log = logging.getLogger(__name__)
ATTEMPTS = 3
_TOGETHER = 16
"""Values that come in time if one alone comes in this part of it; as many may be on their way here."""
_FIRST_S, _LONGEST_S = 0.05, 1.0
"""Pauses between attempts."""
_TOLD_S = 60.0
"""Seconds between two lines in the log about calls of one kind that fail for one cause."""


class Caller:
    """Asks a store. Whatever goes wrong there is `RemoteFailed` here; not to ask it is `RemoteLeftAlone`.

    A store may be read from and refuse to be written to, since it is full, say, or a replica: so there are
    breakers of their own for writing and for removing, and none of them keeps readers away.

    Args:
        store: what is asked.
        breaker: told how it went, and like those of writing and removing.
        figures: told of failures.
        timeout: seconds of one attempt.
        luck: see `pause`.

    Attributes:
        breaker: of all else.
        writes: of writing records.
    """

    def __init__(
        self, store: RemoteStore, breaker: Breaker, figures: Figures, *, timeout: float,
        luck: Callable[[], float],
    ) -> None:  # fmt: skip
        self._store, self._figures, self._timeout, self._luck = store, figures, timeout, luck
        self.breaker = breaker
        self._ending = False
        self.writes, self._urgent, self._removals = (breaker.fellow() for _ in range(3))
        self._narrow, self._alone = False, asyncio.Lock()
        self._told: dict[tuple[str, str], float] = {}

    async def get(self, names: Sequence[str], most: int, came: Came) -> list[bool | Exception]:
        """Hand out values, each once, however often the store is asked; see `RemoteStore`."""
        told: set[str] = set()

        def once(name: str, value: Value) -> None:
            if name not in told:
                told.add(name)
                came(name, value)

        if len(names) == 1 or not self._narrow:
            try:
                return await self._call(
                    "get", lambda: self._store.get(names, most, once), several=len(names) > 1
                )
            except RemoteLate:
                self._narrow = True
        return [name in told or await self._get_alone(name, most, once) for name in names]

    async def _get_alone(self, name: str, most: int, came: Came) -> bool | Exception:
        """Have one value come while no other does: over a slow link several are late where one is not."""
        loop = asyncio.get_running_loop()
        async with self._alone:
            begun = loop.time()
            (there,) = await self._call("get", lambda: self._store.get([name], most, came))
            self._narrow = loop.time() - begun > self._timeout / _TOGETHER
        return there

    async def value(self, name: str, most: int) -> Value | None:
        """Return a value, None for one that is not there."""
        values: list[Value] = []
        (there,) = await self.get([name], most, lambda _, value: values.append(value))
        if isinstance(there, Exception):
            raise RemoteFailed("get", _why(there))
        return values[0] if there else None

    async def piece(self, name: str, start: int, nbytes: int) -> Value:
        """Return some bytes of a value; see `RemoteStore`."""
        return await self._call("get", lambda: self._store.piece(name, start, nbytes))

    async def put(self, items: Sequence[Item], *, urgent: bool = False) -> list[Exception | None]:
        """Store values; see `RemoteStore`. What is `urgent` is tried also while records are refused."""
        breaker = self._urgent if urgent else self.writes
        return await self._call("put", lambda: self._store.put(items), breaker)

    async def put_one(self, name: str, value: Value, *, ttl: int | None = None, urgent: bool = False) -> None:
        """Store a value for so many seconds; see `put`. If that one is refused, all of the call is."""
        await self.put([(name, (value,), ttl)], urgent=urgent)

    async def exists(self, names: Sequence[str]) -> list[bool | Exception]:
        """Tell which names have a value; see `RemoteStore`."""
        return await self._call("exists", lambda: self._store.exists(names))

    async def delete(self, names: Sequence[str]) -> None:
        """Remove values, all of them."""
        for answer in await self._call("delete", lambda: self._store.delete(names), self._removals):
            if answer is not None:
                raise RemoteFailed("delete", _why(answer))

    async def names(self, prefix: str) -> set[str]:
        """Return all names that begin so, however long it takes: a store may have to look at all it holds."""

        async def listed() -> set[str]:
            return {name async for name in self._store.listing(prefix) if name.startswith(prefix)}

        return await self._call("list", listed, limited=False)

    def end(self) -> None:
        """Make no call from now on, not even the next attempt of one that is under way."""
        self._ending = True

    async def close(self) -> None:
        """End the connections."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._store.close()
        except Exception as error:  # noqa: BLE001 - a client library may raise anything, and this is the end
            _log.debug("the remote store: closing: %s", error)

    async def _call(
        self, what: str, call: Callable[[], Awaitable[T]], breaker: Breaker | None = None, *,
        limited: bool = True, several: bool = False,
    ) -> T:  # fmt: skip
        breaker = breaker or self.breaker
        for attempt in range(1, ATTEMPTS + 1):
            if self._ending:
                raise RemoteFailed(what, "this daemon ends")
            # While the store does not answer, it is not asked to write or remove either.
            if self.breaker.wait or not breaker.admits():
                raise RemoteLeftAlone(what, max(self.breaker.wait, breaker.wait))
            try:
                async with asyncio.timeout(self._timeout if limited else None):
                    answer = await self._answered(what, call)
            except asyncio.CancelledError:
                breaker.withdrawn()
                raise
            except Exception as error:  # noqa: BLE001 - a client library may raise anything
                self._failed(what, error, breaker)
                if several and isinstance(error, TimeoutError):
                    raise RemoteLate(what, _why(error)) from None
                if attempt == ATTEMPTS:
                    raise RemoteFailed(what, _why(error)) from None
                await asyncio.sleep(pause(attempt, _FIRST_S, _LONGEST_S, self._luck))
            else:
                breaker.succeeded()
                return answer
        raise AssertionError("the last attempt returns or raises")

    async def _answered(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Return what a store answers, unless all of it is errors: that is a call that failed."""
        answer = await call()
        if isinstance(answer, list):
            errors = [one for one in answer if isinstance(one, Exception)]
            if errors and len(errors) == len(answer):
                raise errors[0]
            for error in {type(error): error for error in errors}.values():
                self._note(what, error)
        return answer

    def _failed(self, what: str, error: Exception, breaker: Breaker) -> None:
        before = breaker.opened
        breaker.failed()
        self._note(what, error)
        if breaker.opened > before:
            self._figures.opened.inc()
            _log.warning(
                "the remote store is left alone for a while%s: %s: %s; blocks are kept here meanwhile",
                "" if breaker is self.breaker else ", but for reading", what, _why(error),
            )  # fmt: skip

    def _note(self, what: str, error: Exception) -> None:
        """Count a failure by its cause, and log what the store said, once in a while."""
        cause = type(error).__name__
        self._figures.failures.labels(what, cause).inc()
        now = asyncio.get_running_loop().time()
        if now - self._told.get((what, cause), -_TOLD_S) >= _TOLD_S:
            self._told[what, cause] = now
            _log.warning("the remote store: %s failed: %s: %s", what, cause, _why(error))

    @property
    def state(self) -> BreakerState:
        """Whether the store is asked at all."""
        return self.breaker.state


def _why(error: Exception) -> str:
    """Return the first line of an error, or its kind where it says nothing."""
    return next(iter(str(error).splitlines()), "")[:200] or type(error).__name__
