"""Ways of bytes into the daemon and out of it: each brings back what it was given; figures of timings."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from kvtcd.lab import bench_data_plane as bench
from kvtcd.lab.bench_data_plane import MIB, Row, command

OURS = ("http-tcp", "http-unix", "region")
OTHERS = ("raw-tcp", "raw-unix", "memcpy", "file", "redis")


def test_a_figure_is_the_median_after_the_first_round_and_is_held_against_its_like():
    def rounds(*cpu: float) -> list[tuple[float, float]]:
        return [(seconds * 1e-9, 2 * seconds * 1e-9) for seconds in cpu]

    rows = {
        (row.path, row.verb): row
        for row in bench._rows(
            {
                ("http-unix", "get", 4): rounds(100, 1, 4, 2),
                ("raw-unix", "get", 4): rounds(100, 1, 1, 1),
                ("raw-unix", "put", 4): rounds(100, 8, 8, 8),
                ("memcpy", "get", 4): rounds(100, 0.5, 0.5, 0.5),
                ("memcpy", "put", 4): rounds(100, 0.25, 0.25, 0.25),
            }
        )
    }
    assert rows["http-unix", "get"] == Row("http-unix", "get", 4, 0.5, 0.25, 0.5, 0.25, None)
    assert rows["raw-unix", "put"] == Row("raw-unix", "put", 4, 0.125, 0.0625, None, 1 / 32, None)


@pytest.mark.slow
def test_every_way_brings_back_what_it_was_given():
    # The path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as short, bench._ways(Path(short), 1) as ways:
        assert set(ways[1]) >= {*OURS, *OTHERS[:-1]}
        for name, way in ways[1].items():
            for turn in range(2):
                sent = bytes([turn, *name.encode()]) * (MIB // (len(name) + 1) + 1)
                way.memory[:MIB] = sent[:MIB]
                before = way.spent()
                way.move("put", MIB)
                way.memory[:MIB] = bytes(MIB)
                way.move("get", MIB)
                assert bytes(way.memory[:MIB]) == sent[:MIB], name
                assert way.spent() > before
                way.tidy()


@pytest.mark.slow
def test_the_command_writes_a_row_for_each_way_verb_and_size(tmp_path):
    rows = command(sizes=[1], rounds=1, json=tmp_path / "out.json", console=Console(quiet=True))
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["command"] == "bench data-plane"
    assert len(written["rows"]) == len(rows)
    for path in OURS:
        for verb in ("get", "put"):
            (row,) = [
                row for row in written["rows"] if (row["path"], row["verb"], row["mib"]) == (path, verb, 1)
            ]
            assert row["gb_s"] > 0
            assert row["over_memcpy"] > 0
            assert (row["over_socket"] is None) == (path == "region")
