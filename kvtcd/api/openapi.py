"""The OpenAPI 3.1 document, written from what the routes declare and what reads their messages."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from kvtcd import __version__
from kvtcd.api.route import JSON, Body, Parameter, Reply, Route, reply, route
from kvtcd.api.state import DOCUMENT
from kvtcd.core import errors
from kvtcd.core.forms import Schema
from kvtcd.core.problem import KINDS, MEDIA_TYPE, Kind, kind_of_class

_ABOUT = """Blocks of KV cache of language models, kept by prefix and compressed.

On the Unix socket the user at its other end is the tenant, and takes no token; by TCP a bearer token says who
it is. What an operation asks for is the scope that its security requirement names. Errors are problem details
(RFC 9457): `type` says which, `about:blank` is a fault in HTTP itself."""
_HTTP = {
    400: "The request is malformed.", 401: "The caller is not known.",
    403: "The caller lacks the scope, or is a web page.", 404: "There is no such thing.",
    408: "The body stalls, or comes too slowly.", 409: "It contradicts what is there.",
    411: "The body has no declared length.", 413: "It is too large.",
    415: "The body is of another media type, or compressed.", 417: "`Expect` is not understood.",
    421: "`Host` is not a name of this daemon.", 422: "It does not fit.", 500: "Something failed.",
    503: "Not now; `Retry-After` says when.",
    504: "The time of the request is over.", 507: "The disk is full.",
}  # fmt: skip
_ALWAYS = (400, 401, 403, 415, 417, 421, 500, 503)
_WITH_BODY = (408, 411, 413)
_HEADERS = {401: ("WWW-Authenticate", "How to say who one is."), 503: ("Retry-After", "Seconds.")}


@route(
    "GET", "/v1/openapi.json", replies={200: reply("OpenAPI 3.1.", Body(JSON, {"type": "object"}))},
    stored=False,
)  # fmt: skip
async def show(request: web.Request) -> web.Response:
    """Give this document."""
    return web.Response(body=request.app[DOCUMENT], content_type=JSON)


def document(routes: Iterable[Route]) -> bytes:
    """Return the document about some routes, as JSON."""
    paths: dict[str, dict[str, object]] = {}
    for one in routes:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    schemas: dict[str, Schema] = {}
    lifted = _lift(paths, schemas)
    responses = {str(status): _lift(_problem(status), schemas) for status in _HTTP}
    body = {
        "openapi": "3.1.0",
        "info": {"title": "kvtcd", "version": __version__, "description": _ABOUT},
        "servers": [{"url": "/", "description": "A Unix socket, or TCP on this host."}],
        "paths": lifted,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": responses,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "By TCP. No token on a Unix socket.",
                }
            },
        },
    }
    return json.dumps(body, indent=1, ensure_ascii=False).encode()


def _operation(one: Route) -> dict[str, object]:
    module = one.handler.__module__.rpartition(".")[2]
    name = getattr(one.handler, "__name__", "")
    summary, _, description = inspect.cleandoc(one.handler.__doc__ or "").partition("\n\n")
    return {
        "operationId": f"{module}_{name}",
        "tags": [module],
        "summary": summary,
        **({"description": description} if description else {}),
        **({"parameters": list(map(_parameter, one.parameters))} if one.parameters else {}),
        **({"requestBody": {"required": True, "content": _content(one.bodies)}} if one.bodies else {}),
        "responses": {str(status): _reply(said) for status, said in one.replies.items()}
        | {str(status): {"$ref": f"#/components/responses/{status}"} for status in _statuses(one)},
        "security": [] if one.public else [{"bearer": [str(one.scope)] if one.scope else []}],
    }


def _statuses(one: Route) -> list[int]:
    """Return the statuses of all errors that a client must expect."""
    named = any(parameter.name == "ns" for parameter in one.parameters)
    raised = (*one.raises, *((errors.UnknownNamespace,) if named and one.method != "PUT" else ()))
    found = {*_ALWAYS, *(kind.status for error in raised if (kind := kind_of_class(error)))}
    found |= set(_WITH_BODY) if one.bodies else set()
    found |= {404} if any(parameter.place == "path" for parameter in one.parameters) else set()
    return sorted(found)


def _parameter(one: Parameter[Any]) -> dict[str, object]:
    return {
        "name": one.name, "in": one.place, "required": one.required, "description": one.about,
        "schema": one.form.schema,
    }  # fmt: skip


def _content(bodies: Iterable[Body]) -> dict[str, object]:
    """Return bodies by media type; of several messages in JSON, one of them."""
    found: dict[str, list[Body]] = {}
    for body in bodies:
        if body.media_type:
            found.setdefault(body.media_type, []).append(body)
    return {
        media_type: {
            "schema": (same[0].schema if len(same) == 1 else {"oneOf": [body.schema for body in same]})
            | ({"description": same[0].about} if same[0].about else {})
        }
        for media_type, same in found.items()
    }


def _reply(said: Reply) -> dict[str, object]:
    headers = {
        name: {"description": about, "schema": form.schema} for name, (form, about) in said.headers.items()
    }
    content = _content(said.bodies)
    return {
        "description": said.about,
        **({"headers": headers} if headers else {}),
        **({"content": content} if content else {}),
    }


def _problem(status: int) -> dict[str, object]:
    kinds: list[Schema] = [_kind(kind) for kind in KINDS if kind.status == status]
    header = _HEADERS.get(status)
    return {
        "description": _HTTP[status],
        **(
            {"headers": {header[0]: {"description": header[1], "schema": {"type": "string"}}}}
            if header
            else {}
        ),
        "content": {MEDIA_TYPE: {"schema": {"anyOf": [*kinds, _fault()]}}},
    }


def _details(title: str, type_: Schema, **data: Schema) -> Schema:
    properties = {
        "type": type_, "title": {"type": "string"}, "status": {"type": "integer"},
        "detail": {"type": "string"}, **data,
    }  # fmt: skip
    return {"title": title, "type": "object", "properties": properties, "required": list(properties)}


def _kind(kind: Kind) -> Schema:
    return _details(kind.error.__name__, {"const": kind.type}, **{name: {} for name in kind.data})


def _fault() -> Schema:
    return _details("HttpFault", {"const": "about:blank"})


def _lift(value: Any, schemas: dict[str, Schema]) -> Any:  # noqa: ANN401 - any part of a document
    """Move the schemas of messages to where they are shared, and put references in their place."""
    if isinstance(value, dict):
        inner = {key: _lift(one, schemas) for key, one in value.items()}
        name = inner.get("title")
        if not isinstance(name, str) or inner.get("type") != "object":
            return inner
        known = schemas.setdefault(name, inner)
        assert known == inner, f"two messages are called {name}"
        return {"$ref": f"#/components/schemas/{name}"}
    if isinstance(value, list):
        return [_lift(one, schemas) for one in value]
    return value
