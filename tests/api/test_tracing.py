"""Spans of requests, moves and stages, as an exporter in memory sees them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.http import NS, running
from support.toy import BLOCK_TOKENS, IDENTITY, block

from kvtcd import config
from kvtcd.api.tracing import Tracing
from kvtcd.bootstrap import tracing
from kvtcd.client import AsyncClient, BlockHead
from kvtcd.core.errors import ConfigError, NotFound
from kvtcd.core.keys import EngineKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEY = EngineKey(b"\x07" * 32)
HEAD = BlockHead(KEY, tokens=BLOCK_TOKENS, first_token=0)
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@asynccontextmanager
async def traced(share: float = 1.0) -> AsyncIterator[tuple[object, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    tracer = Tracing(SimpleSpanProcessor(exporter), share)
    try:
        async with running(tracer=tracer, traced=tracer.middleware) as daemon:
            yield daemon, exporter
    finally:
        tracer.close()


@pytest.mark.asyncio
async def test_a_request_its_move_and_its_stages_are_one_trace() -> None:
    async with traced() as (daemon, exporter):
        async with AsyncClient(daemon.socket) as client:
            await client.register("docs", IDENTITY)
            exporter.clear()
            await client.put("docs", HEAD, block(1), durable=True)
        spans = {span.name: span for span in exporter.get_finished_spans()}
    request = spans["PUT /v1/namespaces/{ns}/blocks/{key}"]
    move = spans["move host-disk"]
    assert request.kind is SpanKind.SERVER
    assert request.attributes["http.response.status_code"] == 201
    assert move.parent.span_id == request.context.span_id
    stages = [f"demote {name}" for name in ("gather", "analyze", "deflate", "seal", "commit")]
    assert [name for name in spans if name.startswith("demote")] == stages
    for name in stages:
        assert spans[name].parent.span_id == move.context.span_id
        assert move.start_time - 10**7 <= spans[name].start_time <= spans[name].end_time
        assert spans[name].end_time <= move.end_time + 10**7
    assert spans["demote deflate"].attributes["thread.name"].startswith("kvtcd-")
    assert len({span.context.trace_id for span in spans.values()}) == 1


@pytest.mark.asyncio
async def test_no_span_names_a_key_a_namespace_or_a_tenant() -> None:
    async with traced() as (daemon, exporter):
        async with AsyncClient(daemon.socket) as client:
            await client.register("secret-name", IDENTITY)
            await client.put("secret-name", HEAD, block(1), durable=True)
            await client.get("secret-name", KEY)
            with pytest.raises(NotFound):
                await client.get("secret-name", EngineKey(b"\x08" * 32))
        async with daemon.request("GET", "/secret/path?secret=1") as answer:
            assert answer.status == 404
        text = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert "(no such route)" in text
    for hidden in ("secret", KEY.hex(), "08" * 32, "uid:1"):
        assert hidden not in text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("share", "flags", "spans"), [(0.0, "01", 1), (1.0, "00", 0), (0.0, None, 0), (1.0, None, 1)]
)
async def test_a_caller_with_a_trace_of_his_own_decides_and_for_the_others_a_share(
    share, flags, spans
) -> None:
    headers = {} if flags is None else {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
    async with traced(share) as (daemon, exporter):
        async with daemon.request("GET", "/v1/stats", headers=headers) as answer:
            assert answer.status == 200
        found = exporter.get_finished_spans()
    assert len(found) == spans
    if flags == "01":
        assert f"{found[0].context.trace_id:032x}" == TRACE


@pytest.mark.asyncio
async def test_failures_are_marked() -> None:
    async with traced() as (daemon, exporter):
        async with AsyncClient(daemon.socket) as client:
            await client.register("docs", IDENTITY)
            daemon.toy.codecs[0].fail = ConfigError("a", "b", "broken")
            await client.put("docs", HEAD, block(1))
            await client.flush("docs", [KEY])
        moves = [span for span in exporter.get_finished_spans() if span.name.startswith("move")]
    assert moves
    assert {span.status.status_code for span in moves} == {StatusCode.ERROR}


def test_nothing_is_loaded_where_nothing_is_traced() -> None:
    code = "import sys, kvtcd.serve; sys.exit(str([m for m in sys.modules if 'opentelemetry' in m][:3]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stderr.strip() == "[]"


@pytest.mark.asyncio
async def test_what_is_missing_is_said(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvtcd.api.tracing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    said = config.Config.model_validate({"tracing": {"endpoint": "http://127.0.0.1:4318"}})
    with pytest.raises(ConfigError, match=r"pip install 'kvtcd\[otel\]'"):
        async with tracing(said):
            pass
    async with tracing(config.Config()) as nothing:
        assert nothing is None


@pytest.mark.asyncio
async def test_spans_arrive_at_a_collector_before_it_ends() -> None:
    arrived: list[tuple[str, str | None, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            arrived.append((self.path, self.headers["Content-Type"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = await asyncio.to_thread(HTTPServer, ("127.0.0.1", 0), Collector)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_address[1]}/"
        said = config.Config.model_validate({"tracing": {"endpoint": endpoint}})
        async with (
            tracing(said) as tracer,
            running(traced=tracer.middleware) as daemon,
        ):
            await daemon.register()
            target = f"{NS}/blocks/abcd?tokens={BLOCK_TOKENS}&first_token=0"
            headers = {"Content-Type": "application/octet-stream", "traceparent": f"00-{TRACE}-{PARENT}-01"}
            async with daemon.request("PUT", target, data=block(1), headers=headers) as answer:
                assert answer.status == 201
    finally:
        await asyncio.to_thread(server.shutdown)
        thread.join()
        server.server_close()
    assert {(path, kind) for path, kind, _ in arrived} == {("/v1/traces", "application/x-protobuf")}
    requests = [ExportTraceServiceRequest.FromString(body) for _, _, body in arrived]
    resources = [resource for request in requests for resource in request.resource_spans]
    assert {
        attribute.value.string_value
        for resource in resources
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
    } == {"kvtcd"}
    spans = {span.name: span for one in resources for scope in one.scope_spans for span in scope.spans}
    asked = spans["PUT /v1/namespaces/{ns}/blocks/{key}"]
    assert asked.trace_id.hex() == TRACE
    assert asked.parent_span_id.hex() == PARENT
    assert asked.start_time_unix_nano < asked.end_time_unix_nano
    assert {attribute.key: attribute.value.int_value for attribute in asked.attributes}[
        "http.response.status_code"
    ] == 201


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://", "http://a/?b"])
def test_what_is_no_collector_is_refused(tmp_path, endpoint) -> None:
    (tmp_path / "config.toml").write_text(f'[tracing]\nendpoint = "{endpoint}"\n')
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        config.load(tmp_path / "config.toml")
