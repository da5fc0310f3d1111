"""Many questions of one turn of the loop become one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from kvtcd.core.errors import KvtcdError, RemoteFailed

T = TypeVar("T")


class Turns(Generic[T]):
    """Gathers names that are asked for, and asks for all of them together. All methods belong to the loop.

    Args:
        call: asks; returns an answer for each name in order, some of which may be errors.
        most: names of one call.
    """

    def __init__(self, call: Callable[[Sequence[str]], Awaitable[list[T | Exception]]], *, most: int) -> None:
        self._call, self._most = call, most
        self._asked: dict[str, asyncio.Future[T]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, name: str) -> T:
        """Return the answer for one name.

        Raises:
            RemoteFailed: there is none.
        """
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._send)
        future = self._asked.setdefault(name, loop.create_future())
        return await asyncio.shield(future)

    def _send(self) -> None:
        asked, self._asked = list(self._asked.items()), {}
        for start in range(0, len(asked), self._most):
            task = asyncio.create_task(self._one(dict(asked[start : start + self._most])), name="kvtcd-turn")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _one(self, asked: dict[str, asyncio.Future[T]]) -> None:
        try:
            answers: list[T | Exception] = await self._call(list(asked))
        except KvtcdError as error:
            answers = [error] * len(asked)
        for future, answer in zip(asked.values(), answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                known = isinstance(answer, KvtcdError)
                future.set_exception(answer if known else RemoteFailed("get", str(answer)))
                future.exception()  # whoever asked may have gone
            else:
                future.set_result(answer)
