"""What the benchmark measures is seen in its own timeline; figures and trace have the keys others read."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.patience import PATIENCE_S
from support.toy import IDENTITY, ToyCodec, block

from kvtcd import cli
from kvtcd.engine.timeline import Span
from kvtcd.lab import bench_overlap
from kvtcd.lab.bench_overlap import Row, longest, measure

GROUPS, DISK, HALF = 6, 0.04, 0.025
WAYS = {
    "demote": ["gather", "analyze", "deflate", "seal", "commit"],
    "promote": ["read", "check", "inflate", "synthesize", "scatter"],
}


class Meeting:
    """Of blocks that are sent together, each waits in a late stage until the next one is in an early one."""

    def __init__(self) -> None:
        self._come = [threading.Event() for _ in range(2 * GROUPS)]
        self._early, self._late = iter(self._come), iter([*self._come[1:], None])
        self._left = 0

    def early(self) -> None:
        """Called by the blocks in order."""
        next(self._early).set()

    def late(self) -> None:
        """Called by the blocks in order."""
        following = next(self._late)
        self._left += 1
        if self._left > GROUPS and following is not None:
            assert following.wait(PATIENCE_S), "the next block does not come"


class SleepyCodec(ToyCodec):
    """Each half takes its time, without work that a busy machine would stretch, and meets its neighbour."""

    def __init__(self, identity, down: Meeting, up: Meeting) -> None:
        super().__init__(identity)
        self._down, self._up = down, up

    def analyze(self, raw, **place):
        self._down.early()
        time.sleep(HALF)
        return super().analyze(raw, **place)

    def encode(self, body, **place):
        time.sleep(HALF)
        self._down.late()
        return super().encode(body, **place)

    def inflate(self, blob, scratch):
        time.sleep(HALF)
        inflated, meeting = super().inflate(blob, scratch), self._up

        class Sleepy:
            def synthesize(self, out):
                time.sleep(HALF)
                meeting.late()
                inflated.synthesize(out)

        return Sleepy()


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    raw, down, up = np.frombuffer(block(1), np.uint8), Meeting(), Meeting()
    read = bench_overlap.SlowDisk.read

    def reading(disk, *arguments):
        up.early()
        return read(disk, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_overlap.SlowDisk, "read", reading)
        return asyncio.run(
            measure(
                tmp_path_factory.mktemp("bench"), identity=IDENTITY, codec=SleepyCodec(IDENTITY, down, up),
                raw=raw, groups=GROUPS, delay=DISK,
            )
        )  # fmt: skip


def spans_of(result, way: str, part: slice) -> dict[str, list[Span]]:
    """Spans by stage, in order of time; the first half of the blocks went one by one."""
    found = defaultdict(list)
    for span in sorted(result.spans, key=lambda span: span.begin):
        if span.pipeline == way and span.block in range(2 * GROUPS)[part]:
            found[span.stage].append(span)
    return found


SERIAL, PIPELINED = slice(0, GROUPS), slice(GROUPS, None)


@pytest.mark.parametrize("way", WAYS)
def test_every_stage_of_every_block_is_there_in_order(result, way) -> None:
    for part in (SERIAL, PIPELINED):
        stages = spans_of(result, way, part)
        assert set(stages) == set(WAYS[way])
        for stage, row in stages.items():
            assert [span.block for span in row] == list(range(2 * GROUPS)[part])
            if stage != "commit":  # several records in one
                assert all(left.end <= right.begin for left, right in pairwise(row))
        for way_of_one in zip(*(stages[stage] for stage in WAYS[way]), strict=True):
            assert all(left.end <= right.begin for left, right in pairwise(way_of_one))


@pytest.mark.parametrize(
    ("way", "ahead", "behind"), [("promote", "read", "synthesize"), ("demote", "analyze", "deflate")]
)
def test_neighbours_overlap_only_when_they_are_sent_together(result, way, ahead, behind) -> None:
    """The next block is in an early stage before this one has left a later one."""

    def overlaps(part: slice) -> int:
        stages = spans_of(result, way, part)
        return sum(
            following.begin < leading.end
            for leading, following in zip(stages[behind][:-1], stages[ahead][1:], strict=True)
        )

    assert (overlaps(SERIAL), overlaps(PIPELINED)) == (0, GROUPS - 1)


def test_the_figures_are_those_of_the_timeline_and_hold_what_is_promised(result) -> None:
    for row in result.rows:
        stages = spans_of(result, row.way, PIPELINED)
        sums = {
            stage: sum(end - begin for begin, end in {(s.begin, s.end) for s in spans})
            for stage, spans in stages.items()
        }
        assert row.longest_stage == max(sums, key=sums.get)
        assert row.longest_stage_s == pytest.approx(sums[row.longest_stage])
        assert row.serial_s >= GROUPS * (DISK + 2 * HALF)
        slowest = stages[row.longest_stage]
        assert row.pipelined_s - row.fill_drain_s == pytest.approx(slowest[-1].end - slowest[0].begin)
    assert [row.way for row in result.rows] == ["demote", "promote"]


def test_records_committed_together_count_once() -> None:
    spans = [
        Span("demote", "deflate", 0, "a", 0.0, 1.0),
        Span("demote", "deflate", 1, "a", 1.0, 2.0),
        Span("demote", "commit", 0, "b", 2.0, 3.5),
        Span("demote", "commit", 1, "b", 2.0, 3.5),
    ]
    assert longest(spans) == ("deflate", [(0.0, 1.0), (1.0, 2.0)])


def test_the_command_writes_figures_and_trace(tmp_path, monkeypatch, capsys) -> None:
    figures, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    line = [
        "bench",
        "overlap",
        "--groups",
        "2",
        "--disk-ms",
        "5",
        "--json",
        str(figures),
        "--trace",
        str(trace),
    ]
    monkeypatch.setattr(sys, "argv", ["kvtcd", *line])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    written = json.loads(figures.read_text())
    events = json.loads(trace.read_text())["traceEvents"]

    assert exit_.value.code == 0
    assert written["command"] == "bench overlap"
    assert [(row["way"], row["groups"]) for row in written["rows"]] == [("demote", 2), ("promote", 2)]
    assert {"groups", "serial_s", "pipelined_s", "longest_stage_s"} <= set(written["rows"][0])
    assert written["target_ratio"] == 1.15
    for row in written["rows"]:
        assert row["ratio"] == pytest.approx(row["pipelined_s"] / row["longest_stage_s"])
    stages = {event["args"]["stage"] for event in events if event["ph"] == "X"}
    assert stages == {*WAYS["demote"], *WAYS["promote"]}
    assert "slowest" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_said_to_be_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["kvtcd", "bench", "overlap", "--device", "cuda"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()

    assert exit_.value.code == 69
    assert "no CUDA device" in capsys.readouterr().err


def test_the_table_marks_what_does_not_hold() -> None:
    good = Row("promote", 8, 1.0, 0.6, "read", 0.5, 0.1)
    bad = Row("promote", 8, 1.0, 0.9, "read", 0.5, 0.1)
    assert (good.pipelined_s <= good.bound_s, bad.pipelined_s <= bad.bound_s) == (True, False)
    shown = bench_overlap.table([good, bad], 50)
    assert list(shown.columns[-2].cells) == ["[green]0.675", "[red]0.675"]
    assert list(shown.columns[-1].cells) == ["1.20", "1.80"], "with fill and drain"
    assert "at most 1.15" in str(shown.caption)
