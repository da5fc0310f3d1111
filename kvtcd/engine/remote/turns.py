"""Questions that come while others are under way go together."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from kvtcd.core.errors import KvtcdError, RemoteFailed

T = TypeVar("T")


class Turns(Generic[T]):
    """Gathers names that are asked for, and asks for many in one call. All methods belong to the loop.

    A name waits for the end of this turn of the loop, and while `at_once` calls are under way.

    Args:
        call: asks; returns an answer for each name in order, some of which may be errors.
        most: names of one call.
        at_once: calls under way.
    """

    def __init__(
        self, call: Callable[[Sequence[str]], Awaitable[list[T | Exception]]], *, most: int, at_once: int
    ) -> None:  # fmt: skip
        self._call, self._most, self._at_once = call, most, at_once
        self._waiting: OrderedDict[str, asyncio.Future[T]] = OrderedDict()
        self._calls: set[asyncio.Task[None]] = set()
        self._soon = False

    async def ask(self, name: str) -> T:
        """Return the answer for one name.

        Raises:
            RemoteFailed: there is none.
        """
        loop = asyncio.get_running_loop()
        future = self._waiting.setdefault(name, loop.create_future())
        if not self._soon:
            self._soon = True
            loop.call_soon(self._send)
        return await asyncio.shield(future)

    def _send(self) -> None:
        self._soon = False
        while self._waiting and len(self._calls) < self._at_once:
            names = [name for _, name in zip(range(self._most), self._waiting, strict=False)]
            task = asyncio.create_task(self._one({n: self._waiting.pop(n) for n in names}), name="kvtcd-turn")
            self._calls.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        self._send()

    async def _one(self, asked: dict[str, asyncio.Future[T]]) -> None:
        try:
            answers: list[T | Exception] = await self._call(list(asked))
        except KvtcdError as error:
            answers = [error] * len(asked)
        for future, answer in zip(asked.values(), answers, strict=True):
            if isinstance(answer, Exception):
                known = isinstance(answer, KvtcdError)
                future.set_exception(answer if known else RemoteFailed("get", str(answer)))
                future.exception()  # whoever asked may have gone
            else:
                future.set_result(answer)
