"""What a request is about, apart from its body."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from kvtcd.api.route import Parameter, fields_in_query, given
from kvtcd.api.state import LIMITS, SERVICE, TENANT
from kvtcd.core.access import TENANT_NAME
from kvtcd.core.errors import BadRequest, DeadlineExceeded, Stopping
from kvtcd.core.forms import KEY as KEY_FORM
from kvtcd.core.forms import Form, Pattern, Range, integer, text
from kvtcd.core.identity import NAMESPACE_NAME
from kvtcd.core.keys import MAX_SALT
from kvtcd.core.messages import DEADLINE_HEADER, SALT_HEADER, BlockHead
from kvtcd.core.regions import Placed
from kvtcd.engine.namespaces import Namespace

MAX_DEADLINE_S = 600.0


def _salt(name: str, value: object) -> bytes:
    code = text().read(name, value)
    try:
        salt = base64.b64decode(code + "=" * (-len(code) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(name, "is not base64url") from None
    if len(salt) > MAX_SALT:
        raise BadRequest(name, f"{len(salt)} bytes; at most {MAX_SALT}")
    return salt


_SALT = Form(text(Pattern("[A-Za-z0-9_-]*={0,2}")).schema | {"maxLength": 4 * -(-MAX_SALT // 3)}, _salt)

NS = Parameter("ns", "path", text(Pattern(NAMESPACE_NAME)), "Name of the namespace.", required=True)
OF_TENANT = Parameter("tenant", "path", text(Pattern(TENANT_NAME)), "Whose it is.", required=True)
KEY = Parameter("key", "path", KEY_FORM, "Engine key of the block.", required=True, route="[^/]+")
# what is no key is answered as such
OPERATION = Parameter("id", "path", text(Pattern("[0-9a-f]{32}")), "Id of the operation.", required=True)
LEASE = Parameter("id", "path", text(Pattern("[0-9a-f]{32}")), "Id of the lease.", required=True)
IN_NAMESPACE = Parameter(
    "namespace", "query", text(Pattern(NAMESPACE_NAME)),
    "Name of a namespace that it is about; else all of the caller's.",
)  # fmt: skip
SALT = Parameter(
    SALT_HEADER, "header", _SALT, "Parts the blocks of a tenant further: base64url of up to 255 bytes."
)
DEADLINE = Parameter(
    DEADLINE_HEADER, "header", integer(Range(1, int(MAX_DEADLINE_S) * 1000)),
    "Milliseconds that the request may take. Without it 30 seconds, or ten minutes for an operation.",
)  # fmt: skip
PREFER = Parameter(
    "Prefer", "header", text(), "RFC 7240; `durable` is understood: answer once it is on disk."
)  # fmt: skip
BLOCKS = (NS, SALT, DEADLINE)
"""Of every request about blocks."""
HEAD = fields_in_query(
    BlockHead,
    {
        "tokens": "Tokens in the block; fewer than a full block only in the last one of a sequence.",
        "first_token": "Position of its first token; without it keys cannot be freed of RoPE.",
        "parent": "Key of the block it continues.",
        "supersedes": "Key of a partial block that this one makes superfluous.",
    },
    optional=False,
)
PLACED = fields_in_query(
    Placed,
    {
        "region": "Id of a region of shared memory that has the bytes, or gets them, instead of the body.",
        "offset": "Where in the region.",
        "length": "How many bytes of it.",
    },
    optional=True,
)


def head(request: web.Request) -> BlockHead:
    """Return what path and query say of a block.

    Raises:
        BadRequest: a parameter is missing, malformed or out of range.
    """
    return BlockHead.from_json(given(request, (KEY, *HEAD)))


def placed(request: web.Request) -> Placed | None:
    """Return the part of a region that the query names, if it does.

    Raises:
        BadRequest: a parameter is missing, malformed or out of range.
    """
    named = given(request, PLACED)
    return Placed.from_json(named) if named else None


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
        asked = DEADLINE.of(request)
        seconds = (default or request.app[LIMITS].deadline_s) if asked is None else asked / 1000
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
        namespace = request.app[SERVICE].namespace(tenant, name_of(request))
        return cls(tenant, namespace, SALT.of(request) or b"", Deadline.of(request, default).at)


def name_of(request: web.Request) -> str:
    """Return the namespace in the path."""
    name = NS.of(request)
    assert name is not None, "it is in the path"
    return name


def wants_durable(request: web.Request) -> bool:
    """Tell whether the answer is to wait for the disk (RFC 7240 ``Prefer: durable``)."""
    preferences = (PREFER.of(request) or "").split(",")
    return "durable" in {preference.strip().lower() for preference in preferences}


def refuse_if_stopping(request: web.Request) -> None:
    """Take nothing new while the daemon stops.

    Raises:
        Stopping: it does.
    """
    if request.app[SERVICE].draining:
        raise Stopping
