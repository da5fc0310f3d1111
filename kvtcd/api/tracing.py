"""Spans for OpenTelemetry: of requests, of the moves that they cause, and of the stages of each move.

Only who configures it loads this module, and with it the extra ``otel``. Spans name routes, tiers and stages:
no key, no namespace, no tenant.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable

from aiohttp import web
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvtcd import __version__
from kvtcd.api.auth import Handler
from kvtcd.core.events import Move, MoveFailed
from kvtcd.engine.mover import Outcome
from kvtcd.engine.timeline import Span

_PARENT = TraceContextTextMapPropagator()


class Tracing:
    """Makes spans and hands them to a processor.

    Args:
        processor: takes spans that have ended.
        share: of requests without a trace of their own that are traced; one that comes with the W3C header
            ``traceparent`` is traced if that says so.
    """

    def __init__(self, processor: SpanProcessor, share: float = 1.0) -> None:
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(share),
            resource=Resource({"service.name": "kvtcd", "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvtcd", __version__)
        # Stages are timed by a clock that begins anywhere.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    @classmethod
    def to(cls, endpoint: str, share: float) -> Tracing:
        """Send spans to a collector by OTLP over HTTP, many at once, on a thread of the exporter's own.

        Args:
            endpoint: URL of the collector, without the path of the protocol.
            share: see the class.
        """
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces")
        return cls(BatchSpanProcessor(exporter), share)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Trace a request, as a part of what its caller traces."""
        resource = request.match_info.route.resource
        route = resource.canonical if resource else "(no such route)"
        with self._tracer.start_as_current_span(
            f"{request.method} {route}",
            context=_PARENT.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": request.method, "http.route": route},
            record_exception=False,
        ) as span:
            response = await handler(request)
            span.set_attribute("http.response.status_code", response.status)
            if response.status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            return response

    async def move(self, move: Move, ending: Awaitable[Outcome]) -> Outcome:
        """Trace a move, as a part of what it was asked for by."""
        with self._tracer.start_as_current_span(
            f"move {move.source}-{move.target}",
            attributes={"kvtcd.source": str(move.source), "kvtcd.target": str(move.target)},
            record_exception=False,
        ) as span:
            outcome = await ending
            if isinstance(outcome.event, MoveFailed):
                span.set_status(Status(StatusCode.ERROR))
            return outcome

    def stage(self, span: Span) -> None:
        """Trace a stage that has ended, as a part of its move."""
        begin, end = (self._epoch_ns + round(seconds * 1e9) for seconds in (span.begin, span.end))
        traced = self._tracer.start_span(
            f"{span.pipeline} {span.stage}", start_time=begin, attributes={"thread.name": span.thread}
        )
        traced.end(end)

    def close(self) -> None:
        """Send what has not been sent; blocking."""
        self._provider.shutdown()
