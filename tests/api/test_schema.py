"""Requests made up from the OpenAPI document, right and wrong ones, sent to a running daemon.

They are the same in every run. `make fuzz` sends many more, other ones each time.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from support.ports import free_port
from support.toy import BLOCK_BYTES, IDENTITY

from kvtcd import config
from kvtcd.api.app import ROUTES
from kvtcd.api.openapi import document
from kvtcd.core.access import Scope, digest, new_token
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
CASES = 1200 if NIGHTLY else 48
"""Of each operation, right and wrong ones each: 50,000 and 2,000 in all."""
SCHEMA = schemathesis.openapi.from_dict(json.loads(document(ROUTES)))
ENDLESS = "notices_stream"
OPERATIONS = {found.ok().definition.raw["operationId"]: found.ok() for found in SCHEMA.get_all_operations()}
CHECKED = [
    CHECKS.get_one(name)
    for name in (
        "status_code_conformance", "content_type_conformance", "response_headers_conformance",
        "response_schema_conformance", "negative_data_rejection",
    )
]  # fmt: skip
PROMISED = {503, 504}
"""Busy, and a deadline that has passed, which may be a millisecond from now: both say nothing of a fault."""
COMMON = settings(
    max_examples=CASES, derandomize=not NIGHTLY, database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[str, str]]:
    """Run a daemon by TCP; return where it is, and a token with every scope."""
    token = new_token()
    with tempfile.TemporaryDirectory(prefix="kvtcd-schema-") as name:
        folder = Path(name)
        (folder / "tokens.toml").write_text(
            f"[[token]]\nsha256 = '{digest(token.encode()).hex()}'\ntenant = 'a'\n"
            f"scopes = {[str(scope) for scope in Scope]}\n"
        )
        port = free_port()
        daemon = Daemon(
            folder, host=256 * BLOCK_BYTES, disk=64 << 20, profiles=folder / "profiles",
            tcp=config.daemon.Tcp(listen=f"127.0.0.1:{port}", tokens=folder / "tokens.toml"),
        )  # fmt: skip
        with daemon:
            address = f"http://127.0.0.1:{port}"
            with daemon.client() as client:
                assert client.ready()
            headers = {"Authorization": f"Bearer {token}"}
            for namespace in ("0", "a"):  # names that come up often, as the simplest ones
                identity = IDENTITY.to_json() | {"model": namespace}
                url = f"{address}/v1/namespaces/{namespace}"
                assert requests.put(url, json=identity, headers=headers, timeout=60).ok
            yield address, token
            assert daemon.stop() == 0, "it ends as it should"


def can_be_wrong(operation: dict[str, Any]) -> bool:
    """Tell whether anything that a client may send is refused for what it is.

    A wrong parameter of a query may not survive its way into a URL, so those alone are not enough.
    """
    places = {p["in"] for p in operation.get("parameters", ()) if p["schema"] != {"type": "string"}}
    return "requestBody" in operation or bool(places - {"query"})


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {ENDLESS}))
def test_answers_are_as_the_document_says(name, mode, site):
    address, token = site
    if mode is GenerationMode.NEGATIVE and not can_be_wrong(OPERATIONS[name].definition.raw):
        pytest.skip("takes nothing that could be wrong")
    strategy = OPERATIONS[name].as_strategy(generation_mode=mode)
    with requests.Session() as session:

        @COMMON
        @given(case=strategy)
        def send(case):
            answer = case.call_and_validate(
                base_url=address, session=session, headers={"Authorization": f"Bearer {token}"},
                checks=CHECKED, timeout=60,
            )  # fmt: skip
            assert answer.status_code < 500 or answer.status_code in PROMISED

        send()


@pytest.mark.parametrize("name", sorted(n for n, one in OPERATIONS.items() if one.definition.raw["security"]))
def test_nobody_gets_in_without_a_token(name, site):
    address, token = site
    wrong = [None, "Bearer x", f"Basic {token}", f"Bearer {token}x", f"Bearer {token[:-1]}"]

    @settings(COMMON, max_examples=2)
    @given(
        case=OPERATIONS[name].as_strategy(generation_mode=GenerationMode.POSITIVE),
        said=st.sampled_from(wrong),
    )
    def send(case, said):
        case.headers = {k: v for k, v in (case.headers or {}).items() if k.lower() != "authorization"}
        headers = {} if said is None else {"Authorization": said}
        assert case.call(base_url=address, headers=headers, timeout=60).status_code == 401

    send()


@pytest.mark.parametrize("path", sorted({route.path for route in ROUTES}))
def test_methods_that_are_not_declared_are_refused(path, site):
    address, token = site
    filled = path.format(tenant="t", ns="a", key="ab", id="0" * 32, file="page.js")
    declared = {route.method for route in ROUTES if route.path == path}
    for method in {"GET", "PUT", "POST", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "QUERY"} - declared:
        answer = requests.request(
            method, f"{address}{filled}", headers={"Authorization": f"Bearer {token}"}, timeout=60
        )
        assert answer.status_code == 405, method
        assert set(answer.headers["Allow"].split(",")) == declared
