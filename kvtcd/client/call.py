"""One request to the daemon as a value: what to send, and how to read the answer. No I/O."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvtcd.client.arguments import seconds
from kvtcd.core.errors import BadRequest, Corrupt, KvtcdError, ServerError
from kvtcd.core.fields import json_object
from kvtcd.core.messages import DEADLINE_HEADER, SALT_HEADER
from kvtcd.core.problem import error_from

T_co = TypeVar("T_co", covariant=True)
Buffer = bytes | bytearray | memoryview
Salt = str | bytes
"""Parts the blocks of one tenant further; text stands for its UTF-8."""

POLL_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True, slots=True)
class Options:
    """What every call about blocks may carry: an extra partition within the tenant, and seconds to take.

    Raises:
        BadRequest: no time at all, or less.
    """

    salt: Salt = ""
    deadline: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.salt, str | Buffer):
            raise TypeError(f"salt: text or bytes, not {type(self.salt).__name__}")
        if self.deadline is not None:
            seconds("deadline", self.deadline)

    def headers(self) -> dict[str, str]:
        """Return the headers."""
        headers = {}
        if self.salt:
            salt = self.salt.encode() if isinstance(self.salt, str) else self.salt
            headers[SALT_HEADER] = base64.urlsafe_b64encode(salt).decode()
        if self.deadline is not None:
            headers[DEADLINE_HEADER] = str(max(1, round(self.deadline * 1000)))
        return headers


@dataclass(frozen=True, slots=True)
class Call(Generic[T_co]):
    """One request.

    Attributes:
        method: HTTP method.
        path: with its query.
        read: turns an answer that is no error into the result.
        body: parts, sent one after the other; nothing is joined.
        headers: besides the length.
        deadline: seconds that the daemon was given.
        repeatable: doing it twice is the same as once.
    """

    method: str
    path: str
    read: Callable[[dict[str, Any]], T_co]
    body: tuple[Buffer, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    deadline: float | None = None
    repeatable: bool = True

    @property
    def nbytes(self) -> int:
        """Length of the body."""
        return sum(memoryview(part).nbytes for part in self.body)

    def answer(self, status: int, content: bytes) -> T_co:
        """Return the result of a complete answer in JSON.

        Raises:
            KvtcdError: the one that the daemon sent.
            ServerError: an answer that cannot be understood.
        """
        if status >= 400:
            raise problem(status, content)
        try:
            return self.read(json_object(content) if content else {})
        except (BadRequest, Corrupt) as error:
            raise ServerError(status, "Unreadable answer", str(error)) from None


def problem(status: int, content: bytes) -> KvtcdError:
    """Return the error that an answer stands for."""
    try:
        return error_from(status, json_object(content))
    except Corrupt:
        return ServerError(status, "Error", content[:200].decode(errors="replace"))


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each look at an operation, without end."""
    yield from POLL_S
    yield from itertools.repeat(POLL_S[-1])


def room(nbytes: int, out: bytearray | memoryview | None) -> memoryview:
    """Return a view of `nbytes` bytes, of `out` if given.

    Raises:
        BadRequest: `out` is too small, not contiguous or not writable.
    """
    if out is None:
        return memoryview(bytearray(nbytes))
    view = flat(out)
    if view.readonly or len(view) < nbytes:
        raise BadRequest("out", f"needs {nbytes} writable bytes, has {len(view)}")
    return view[:nbytes]


def flat(data: Buffer) -> memoryview:
    """Return contiguous bytes as a view of single bytes."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise BadRequest("data", "is not contiguous in memory")
    return view.cast("B")
