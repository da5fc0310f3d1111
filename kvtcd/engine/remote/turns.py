"""Questions that come while others are under way go together."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from kvtcd.engine.errands import Errands

S = TypeVar("S")
K = TypeVar("K")
T = TypeVar("T")


class Turns(Generic[S, K, T]):
    """Gathers what is asked for, and asks for many in one call. All methods belong to the loop.

    A question waits for the end of this turn of the loop, and while `at_once` calls are under way. Who asks
    for what others ask for already waits for the same answer.

    Args:
        name: of the calls, among errands.
        call: answers questions of one subject, in their order.
        errands: by which calls come to their end also when whoever asked has gone.
        most: questions of one call.
        at_once: calls under way.
    """

    def __init__(
        self, name: str, call: Callable[[S, Sequence[K]], Awaitable[Sequence[T]]], errands: Errands, *,
        most: int, at_once: int,
    ) -> None:  # fmt: skip
        self._name, self._call, self._errands = name, call, errands
        self._most, self._at_once = most, at_once
        self._waiting: OrderedDict[K, S] = OrderedDict()
        self._answers: dict[K, asyncio.Future[T]] = {}
        self._under_way = 0
        self._soon = False

    async def ask(self, subject: S, key: K) -> T:
        """Return the answer to a question of a subject; no other subject has the same key."""
        answer = self._answers.get(key)
        if answer is None:
            loop = asyncio.get_running_loop()
            answer = self._answers[key] = loop.create_future()
            self._waiting[key] = subject
            if not self._soon:
                self._soon = True
                loop.call_soon(self._send)
        return await asyncio.shield(answer)

    def _send(self) -> None:
        self._soon = False
        while self._waiting and self._under_way < self._at_once:
            subject = next(iter(self._waiting.values()))
            keys: list[K] = []
            for key, one in self._waiting.items():
                if one is subject:
                    keys.append(key)
                    if len(keys) == self._most:
                        break
            for key in keys:
                del self._waiting[key]
            self._under_way += 1
            _ = self._errands.start(self._name, self._answer(subject, keys))

    async def _answer(self, subject: S, keys: Sequence[K]) -> None:
        futures = [self._answers[key] for key in keys]
        try:
            for future, answer in zip(futures, await self._call(subject, keys), strict=True):
                future.set_result(answer)
        except Exception as error:
            for future in futures:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # whoever asked may have gone
            raise
        finally:
            for key in keys:
                del self._answers[key]
            self._under_way -= 1
            self._send()
