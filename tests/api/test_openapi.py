"""The OpenAPI document: valid, committed, about these routes and no others, and all that handlers read."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from support.http import running

from kvtcd import __version__, api
from kvtcd.api.app import ROUTES
from kvtcd.api.openapi import document
from kvtcd.core.problem import KINDS

GOLDEN = Path(__file__).parents[1] / "data" / "openapi.json"
DOCUMENT = json.loads(document(ROUTES))
SOURCES = Path(api.__file__).parent
READERS = {"route.py", "auth.py", "guard.py", "bodies.py", "page.py"}
"""Where a request's own parts are read: parameters by declaration, and what belongs to HTTP itself."""


def test_the_document_is_valid():
    OpenAPIV31SpecValidator(DOCUMENT).validate()


def test_a_change_of_the_api_shows_in_review():
    shown = json.loads(GOLDEN.read_text())
    assert shown | {"info": shown["info"] | {"version": __version__}} == DOCUMENT, (
        "the API has changed: if that is meant, write tests/data/openapi.json anew with "
        "python -c 'from kvtcd.api import app, openapi; print(openapi.document(app.ROUTES).decode())'"
    )


@pytest.mark.asyncio
async def test_it_is_about_all_routes_and_no_others():
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    async with running() as daemon:
        assert {(r.method, r.resource.canonical) for r in daemon.app.router.routes()} == described
        async with daemon.request("GET", "/v1/openapi.json") as answer:
            assert await answer.json() == DOCUMENT


def test_every_parameter_of_a_path_is_declared_and_each_operation_has_a_name_of_its_own():
    names = []
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            names.append(operation["operationId"])
            declared = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
            assert declared == set(re.findall(r"{(\w+)}", path))
            assert operation["summary"]
    assert len(set(names)) == len(names) == len(ROUTES)


def test_handlers_get_at_nothing_of_a_request_but_what_is_declared():
    """`Parameter.of` refuses what the route does not declare; here nothing goes past it."""
    for source in SOURCES.glob("*.py"):
        if source.name not in READERS:
            reads = {
                node.attr
                for node in ast.walk(ast.parse(source.read_text()))
                if isinstance(node, ast.Attribute)
                and node.attr in {"query", "match_info", "rel_url", "query_string", "cookies", "content_type"}
                and isinstance(node.value, ast.Name)
                and node.value.id == "request"
            }
            # the route, for logs and traces
            reads -= {"match_info"} if source.name in {"problems.py", "tracing.py"} else set()
            assert not reads, f"{source.name} reads {reads} of a request"


@pytest.mark.asyncio
async def test_what_no_route_declares_is_refused():
    async with running() as daemon:
        for path in ("/v1", "/v1/stats", "/v1/namespaces", "/metrics", "/v1/openapi.json"):
            async with daemon.request("GET", f"{path}?surprise=1") as answer:
                assert (answer.status, (await answer.json())["field"]) == (400, "surprise")


def test_every_error_that_clients_see_is_described():
    schemas = DOCUMENT["components"]["schemas"]
    for kind in KINDS:
        described = schemas[kind.error.__name__]
        assert described["properties"]["type"] == {"const": kind.type}
        assert set(kind.data) <= set(described["required"])
        assert str(kind.status) in DOCUMENT["components"]["responses"]


def test_scopes_are_those_that_are_asked_for():
    for route in ROUTES:
        asked = DOCUMENT["paths"][route.path][route.method.lower()]["security"]
        expected = [{"bearer": [route.scope] if route.scope else []}]
        assert asked == ([] if route.public else expected)
