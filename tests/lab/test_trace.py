"""Traces are read as they are published, and refused with file, line and reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtcd.core.errors import ConfigError
from kvtcd.lab.trace import read_trace

SLICE = Path(__file__).parent.parent / "data" / "mooncake-600.jsonl"
GOOD = {"timestamp": 1500, "input_length": 1025, "output_length": 3, "hash_ids": [7, 8, 9]}


def test_a_published_trace_is_read() -> None:
    requests = read_trace(SLICE)
    lines = [json.loads(line) for line in SLICE.read_text().splitlines()]

    assert len(requests) == 600
    assert [r.at for r in requests] == [line["timestamp"] / 1000 for line in lines]
    assert [r.tokens for r in requests] == [line["input_length"] for line in lines]
    ids = {
        key: i
        for r, line in zip(requests, lines, strict=True)
        for key, i in zip(r.blocks, line["hash_ids"], strict=True)
    }
    assert len(ids) == len({i for line in lines for i in line["hash_ids"]}), "equal ids, equal keys"
    assert {len(key) for key in ids} == {32}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"timestamp": None}, "timestamp: is not a number"),
        ({"timestamp": 1499}, "timestamp: is before that of the line above"),
        ({"input_length": 0}, "input_length: is not an integer within 1"),
        ({"input_length": 1024}, "hash_ids: 3 blocks of 512 tokens for 1024 tokens"),
        ({"hash_ids": "789"}, "hash_ids: is not a list"),
        ({"hash_ids": ["7", "8", "9"]}, "hash_ids: are not all integers"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, change, why) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (GOOD, GOOD | change)))

    with pytest.raises(ConfigError) as error:
        read_trace(path)

    assert (error.value.path, error.value.field) == (str(path), "line 2")
    assert why in error.value.why


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "holds no requests"),
        (b"{", "line 1: is no request: Expecting"),
        (b"5\n", "line 1: is no request: is not an object"),
        (b'{"timestamp": 1, "input_length": 3}\n', "line 1: hash_ids: is missing"),
        (b"\xff\xfe", "line 1: is no request: .*utf-8"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, data, why) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(data)

    with pytest.raises(ConfigError, match=f"trace.jsonl: {why}"):
        read_trace(path)


def test_an_absent_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="absent: cannot be read: No such file"):
        read_trace(tmp_path / "absent")
