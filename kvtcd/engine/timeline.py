"""What ran when, and on which thread: a list of spans, and their form for trace viewers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """One stage of one block.

    Attributes:
        pipeline: its name.
        stage: of the pipeline.
        block: number of the block in the order in which the pipeline took them in.
        thread: that ran the stage; on CUDA the one that saw it end.
        begin: in seconds of `time.perf_counter`; on CUDA the launch.
        end: the same; on CUDA the end on the device.
    """

    pipeline: str
    stage: str
    block: int
    thread: str
    begin: float
    end: float


def chrome_trace(spans: Sequence[Span]) -> dict[str, object]:
    """Return spans in the Trace Event Format, which chrome://tracing and Perfetto show: a row per thread."""
    threads = {name: number for number, name in enumerate(dict.fromkeys(span.thread for span in spans))}
    start = min((span.begin for span in spans), default=0.0)
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": name}}
        for name, number in threads.items()
    ]
    events = [
        {
            "ph": "X",
            "name": f"{span.stage} {span.block}",
            "cat": span.pipeline,
            "pid": 0,
            "tid": threads[span.thread],
            "ts": round((span.begin - start) * 1e6, 3),
            "dur": round((span.end - span.begin) * 1e6, 3),
            "args": {"pipeline": span.pipeline, "stage": span.stage, "block": span.block},
        }
        for span in spans
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}
