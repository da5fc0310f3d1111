"""Routes, each declared once: what it takes, what it answers, who may ask. OpenAPI is written from this.

A handler gets at parameters and bodies through what its route declares, and at nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from aiohttp import web

from kvtcd.api.state import SCOPES, SERVICE, TENANT
from kvtcd.core import wire
from kvtcd.core.access import Scope
from kvtcd.core.errors import BadRequest, KvtcdError
from kvtcd.core.forms import Form, Schema, text
from kvtcd.core.message import Message, object_of

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
JSON, OCTETS = "application/json", "application/octet-stream"
_DECIMAL = re.compile(r"[0-9]{1,19}")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,3})?")


@dataclass(frozen=True, slots=True, eq=False)
class Parameter(Generic[T]):
    """A parameter of a request, which has it once or not at all.

    Attributes:
        name: as clients write it.
        place: where it stands.
        form: of its value.
        about: what it is.
        required: whether it must be there.
        route: what of a path it takes up, where that is not what `form` says: a regular expression.
    """

    name: str
    place: Literal["path", "query", "header"]
    form: Form[T]
    about: str
    required: bool = False
    route: str | None = None

    def given(self, request: web.Request) -> object:
        """Return the JSON value of its text, None where it is absent.

        What is no number stays text, which the form then refuses.
        """
        assert self in request[ROUTE].parameters, f"{self.name} is not declared"
        if self.place == "header":  # one that is given twice is a list (RFC 9110, section 5.3)
            values = request.headers.getall(self.name, None)
            value = None if values is None else ", ".join(values)
        else:
            value = (request.match_info if self.place == "path" else request.query).get(self.name)
        kind = self.form.schema.get("type")
        if value is None:
            return None
        if kind == "integer" and _DECIMAL.fullmatch(value):
            return int(value)
        if kind == "number" and _NUMBER.fullmatch(value):
            return float(value)
        return value

    def of(self, request: web.Request) -> T | None:
        """Return its value, None where it is absent.

        Raises:
            BadRequest: it is malformed or out of range.
        """
        value = self.given(request)
        return None if value is None else self.form.read(self.name, value)


def fields_in_query(
    model: type[Message], about: Mapping[str, str], *, optional: bool
) -> tuple[Parameter[Any], ...]:
    """Return the fields of a message as query parameters: those that `about` says something of."""
    properties = object_of(model).properties()
    found = []
    for name, shown in about.items():
        schema, required = properties[name]
        plain: Schema = schema["anyOf"][0] if "anyOf" in schema else schema
        form = Form(plain, lambda _name, value: value)  # the message itself reads it
        found.append(Parameter(name, "query", form, shown, required and not optional))
    return tuple(found)


def given(request: web.Request, parameters: Iterable[Parameter[Any]]) -> dict[str, object]:
    """Return those parameters that a request has, as the fields of a message."""
    values = {parameter.name: parameter.given(request) for parameter in parameters}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A body of a request or an answer: a message in JSON, or bytes of some other type."""

    media_type: str
    schema: Schema
    about: str = ""
    model: type[Message] | None = None


def json_body(model: type[Message]) -> Body:
    """Return a body that is a message."""
    return Body(JSON, object_of(model).schema(), model=model)


_BYTES: Schema = {"type": "string", "contentEncoding": "binary"}
BLOCK = Body(OCTETS, _BYTES, "The raw block: for each stream in order, layers, tokens, heads, dimensions.")
TOKENS = Body(OCTETS, _BYTES, "Token ids, little-endian u32 each.")
FRAMES = Body(
    wire.MEDIA_TYPE, _BYTES,
    "Frames one after the other. Each: `KVTF`, length of the header (u32, little-endian), length of the body "
    "(u64), a header in JSON, a raw block.",
)  # fmt: skip
EMPTY = Body("", {})


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """An answer with one status that is no error."""

    about: str
    bodies: tuple[Body, ...]
    headers: Mapping[str, tuple[Form[Any], str]] = field(default_factory=dict)


def reply(about: str, *bodies: Body | type[Message], **headers: str) -> Reply:
    """Return an answer; headers are declared by name, ``_`` for ``-``, with what they are."""
    return Reply(
        about,
        tuple(body if isinstance(body, Body) else json_body(body) for body in bodies),
        {name.replace("_", "-"): (text(), shown) for name, shown in headers.items()},
    )


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One route.

    Attributes:
        method: of HTTP.
        path: with names of parameters in braces.
        handler: what answers; its docstring says to people what it does.
        parameters: all that are read.
        bodies: what may come, one of them; none if empty.
        replies: by status.
        raises: errors of `core.problem` that clients must expect, apart from what comes with `parameters`,
            `bodies`, and HTTP itself.
        scope: what it takes to ask; None: nothing but being known.
        public: that not even.
        stored: it is about what the caller has stored: refused while his disk environment is left out.
    """

    method: str
    path: str
    handler: Handler
    parameters: tuple[Parameter[Any], ...]
    bodies: tuple[Body, ...]
    replies: Mapping[int, Reply]
    raises: tuple[type[KvtcdError], ...]
    scope: Scope | None
    public: bool
    stored: bool

    @property
    def pattern(self) -> str:
        """The path as aiohttp matches it."""
        shapes = {
            parameter.name: parameter.route or parameter.form.schema["pattern"].strip("^$()")
            for parameter in self.parameters
            if parameter.place == "path"
        }
        return re.sub(r"\{(\w+)\}", lambda found: f"{{{found[1]}:{shapes[found[1]]}}}", self.path)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer a request.

        Raises:
            HTTPForbidden: the caller lacks the scope.
            BadRequest: a query parameter is not known, or given twice.
            StoreFailed: what the caller has stored could not be opened at the start.
        """
        request[ROUTE] = self
        if self.scope is not None and not self.public:
            require(request, self.scope)
        if self.stored:
            request.app[SERVICE].conditions.admit(request[TENANT])
        known = {parameter.name for parameter in self.parameters if parameter.place == "query"}
        for name in request.query:
            if name not in known:
                raise BadRequest(name, "is not a known parameter")
        if len(request.query) != len(set(request.query)):
            raise BadRequest("query", "a parameter is given twice")
        return await self.handler(request)


ROUTE = web.RequestKey("route", Route)


def require(request: web.Request, scope: Scope) -> None:
    """Let only those through who have a scope.

    Raises:
        HTTPForbidden: this one has not.
    """
    if scope not in request[SCOPES]:
        raise web.HTTPForbidden(text=f"this takes the scope {scope}, which this caller does not have")


def route(
    method: str,
    path: str,
    *parameters: Parameter[Any],
    body: Body | type[Message] | tuple[Body | type[Message], ...] = (),
    replies: Mapping[int, Reply],
    raises: tuple[type[KvtcdError], ...] = (),
    scope: Scope | None = Scope.DATA,
    public: bool = False,
    stored: bool = True,
) -> Callable[[Handler], Route]:
    """Declare what a handler is for; see `Route`."""
    bodies = body if isinstance(body, tuple) else (body,)
    declared = tuple(one if isinstance(one, Body) else json_body(one) for one in bodies)
    return lambda handler: Route(
        method, path, handler, parameters, declared, replies, raises, scope, public,
        stored and scope == Scope.DATA and not public,
    )  # fmt: skip
