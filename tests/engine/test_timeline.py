"""The form that trace viewers read, checked against the Trace Event Format's own fields."""

from __future__ import annotations

import json

import pytest

from kvtcd.engine.timeline import Span, chrome_trace


def test_a_trace_has_a_named_row_for_each_thread_and_microseconds_from_the_first_span() -> None:
    spans = [
        Span("promote", "read", 0, "kvtcd-read_0", 100.0, 100.002),
        Span("promote", "inflate", 0, "kvtcd-inflate_0", 100.002, 100.0035),
        Span("promote", "read", 1, "kvtcd-read_0", 100.002, 100.004),
    ]
    trace = json.loads(json.dumps(chrome_trace(spans)))
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]

    assert {e["name"] for e in trace["traceEvents"] if e["ph"] == "M"} == {"thread_name"}
    assert [(names[e["tid"]], e["name"], e["cat"]) for e in events] == [
        ("kvtcd-read_0", "read 0", "promote"),
        ("kvtcd-inflate_0", "inflate 0", "promote"),
        ("kvtcd-read_0", "read 1", "promote"),
    ]
    assert [(e["ts"], e["dur"]) for e in events] == [
        (0.0, pytest.approx(2000)), (pytest.approx(2000), pytest.approx(1500)),
        (pytest.approx(2000), pytest.approx(2000)),
    ]  # fmt: skip
    assert events[2]["args"] == {"pipeline": "promote", "stage": "read", "block": 1}


def test_nothing_recorded_is_an_empty_trace() -> None:
    assert chrome_trace([])["traceEvents"] == []
