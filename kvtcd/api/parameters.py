"""What a request is about, apart from its body."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from kvtcd.api.state import LIMITS, SERVICE, TENANT
from kvtcd.core.errors import BadRequest, DeadlineExceeded, Stopping
from kvtcd.core.messages import DEADLINE_HEADER, SALT_HEADER
from kvtcd.engine.namespaces import Namespace

_MILLISECONDS = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Deadline:
    """How long a request may take; `at` is loop time."""

    at: float

    @classmethod
    def of(cls, request: web.Request, default: float | None = None) -> Deadline:
        """Read the deadline of a request; `default` seconds if it gives none.

        Raises:
            BadRequest: the header is malformed or out of range.
        """
        limits = request.app[LIMITS]
        seconds = deadline_s(request.headers, default or limits.deadline_s, limits.max_deadline_s)
        return cls(asyncio.get_running_loop().time() + seconds)

    @asynccontextmanager
    async def bound(self, what: str, *, goes_on: bool = False) -> AsyncIterator[None]:
        """Give up what takes longer, or with `goes_on` no more than waiting for it.

        Raises:
            DeadlineExceeded: it does.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError:
            raise DeadlineExceeded(what, round(loop.time() - begun, 3), goes_on=goes_on) from None


@dataclass(frozen=True, slots=True)
class Target:
    """Whose blocks a request is about, and how long it may take; `deadline` is loop time."""

    tenant: str
    namespace: Namespace
    salt: bytes
    deadline: float

    @classmethod
    def of(cls, request: web.Request, default: float | None = None) -> Target:
        """Read the target of a request, which may take `default` seconds if it does not say how many.

        Raises:
            UnknownNamespace: the tenant has none of the name in the path.
            BadRequest: a header is malformed or out of range.
        """
        tenant = request[TENANT]
        namespace = request.app[SERVICE].namespace(tenant, request.match_info["ns"])
        return cls(tenant, namespace, salt(request.headers), Deadline.of(request, default).at)


def salt(headers: Mapping[str, str]) -> bytes:
    """Return the salt of a request, empty if it has none.

    Raises:
        BadRequest: not base64url.
    """
    text = headers.get(SALT_HEADER, "")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(SALT_HEADER, "is not base64url") from None


def deadline_s(headers: Mapping[str, str], default: float, longest: float) -> float:
    """Return the seconds a request may take.

    Raises:
        BadRequest: not a number of milliseconds, or out of range.
    """
    text = headers.get(DEADLINE_HEADER)
    if text is None:
        return default
    if not _MILLISECONDS.fullmatch(text) or not 0 < int(text) <= longest * 1000:
        raise BadRequest(DEADLINE_HEADER, f"is not a number within 1..{longest * 1000:.0f}")
    return int(text) / 1000


def wants_durable(request: web.Request) -> bool:
    """Tell whether the answer is to wait for the disk (RFC 7240 ``Prefer: durable``)."""
    preferences = ",".join(request.headers.getall("Prefer", ()))
    return "durable" in {preference.strip().lower() for preference in preferences.split(",")}


def refuse_if_stopping(request: web.Request) -> None:
    """Take nothing new while the daemon stops.

    Raises:
        Stopping: it does.
    """
    if request.app[SERVICE].draining:
        raise Stopping


def only(request: web.Request, *known: str) -> Mapping[str, str]:
    """Return the query of a request.

    Raises:
        BadRequest: a parameter is not known, or given twice.
    """
    for name in request.query:
        if name not in known:
            raise BadRequest(name, "is not a known parameter")
    if len(request.query) != len(set(request.query)):
        raise BadRequest("query", "a parameter is given twice")
    return request.query
