"""A shared store in a dict: what a real one does, and when it fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class FakeStore:
    """Values by name. `down`: calls fail. `lost`: names that no node has now. `gate`: calls wait for it.

    `refuses`: kinds of calls that are answered with an error for each name. `poison`: what no put may have at
    the end of a name, or its connection is closed.

    Attributes:
        calls: how often each kind of call was made.
        asked: names of all calls of a kind.
        ttls: with which each value was stored.
    """

    values: dict[str, bytes] = field(default_factory=dict)
    ttls: dict[str, int | None] = field(default_factory=dict)
    down: bool = False
    lost: set[str] = field(default_factory=set)
    refuses: dict[str, Exception] = field(default_factory=dict)
    poison: str = "none"
    calls: Counter[str] = field(default_factory=Counter)
    asked: dict[str, list[str]] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def _call(self, kind, names) -> None:
        self.calls[kind] += 1
        self.asked.setdefault(kind, []).extend(names)
        await self.gate.wait()
        if self.down or (names and self.lost.issuperset(names)):
            raise ConnectionError("nobody is there")

    def _answer(self, name, value):
        return ConnectionError("its node is away") if name in self.lost else value

    async def get(self, names, most, came):
        await self._call("get", names)
        for name in names:
            if name in self.values and name not in self.lost:
                came(name, self.values[name][: most + 1])
        return [self._answer(name, name in self.values) for name in names]

    async def piece(self, name, start, nbytes):
        await self._call("piece", [name])
        return self.values.get(name, b"")[start : start + nbytes]

    async def put(self, items):
        await self._call("put", [name for name, _, _ in items])
        if any(name.endswith(self.poison) for name, _, _ in items):
            raise ConnectionError("it has closed the connection")
        if "put" in self.refuses:
            return [self.refuses["put"]] * len(items)
        for name, parts, ttl in items:
            if name not in self.lost:
                self.values[name], self.ttls[name] = b"".join(parts), ttl
        return [self._answer(name, None) for name, _, _ in items]

    async def exists(self, names):
        await self._call("exists", names)
        if "exists" in self.refuses:
            return [self.refuses["exists"]] * len(names)
        return [self._answer(name, name in self.values) for name in names]

    async def delete(self, names):
        await self._call("delete", names)
        if "delete" in self.refuses:
            return [self.refuses["delete"]] * len(names)
        for name in names:
            if name not in self.lost:
                self.values.pop(name, None)
        return [self._answer(name, None) for name in names]

    async def listing(self, prefix):
        await self._call("list", [])
        if self.lost:
            raise ConnectionError("a node is away")
        for name in [name for name in self.values if name.startswith(prefix)]:
            yield name

    async def close(self) -> None:
        self.calls["close"] += 1

    def records(self) -> list[str]:
        """Return the names of records."""
        return [name for name in self.values if name.count("/") == 3]
