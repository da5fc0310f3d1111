"""The recording: every reference in order, off the loop, and honest about what it lacks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import pytest_asyncio
from support.http import until
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, LAYOUT, block, soon, toy_service

from kvtcd.core.errors import ConfigError
from kvtcd.core.keys import EngineKey, chain
from kvtcd.core.messages import BlockHead
from kvtcd.engine import recorder as recording
from kvtcd.engine.lanes import Lane
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.recorder import Line, Recorder

pytestmark = pytest.mark.asyncio


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number]) * 32)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines(path: Path) -> int:
    """Return how many lines are there whole."""
    return path.read_text().count("\n")


async def test_what_is_asked_is_written_down_without_a_key_of_the_engine(tmp_path):
    path = tmp_path / "record"
    tokens = list(range(2 * BLOCK_TOKENS + 3))
    async with toy_service(tmp_path / "state", record=path) as toy:
        blocks = toy.service.blocks
        ns = await toy.service.register("uid:1", "n", IDENTITY)
        toy.service.prefixes.match(ns, [key(1), key(2)], b"salt")
        async with blocks.batch(ns, b"salt", soon()) as batch:
            for number in (1, 2):
                slot = await batch.reserve(BlockHead(key(number), BLOCK_TOKENS), BLOCK_BYTES)
                slot.write(memoryview(block(number)))
            await batch.commit()
        async with blocks.read(ns, key(1), b"salt", soon()):
            pass
        async for _ in blocks.read_many(ns, [key(2), key(3)], b"salt", soon()):
            pass
        toy.service.prefixes.match_tokens(ns, tokens, b"")
        records = [toy.service._registry.record_keys(ns, b"salt")(key(n)).hex() for n in range(4)]
        links = [
            toy.service._registry.record_keys(ns, b"")(ln.key).hex()
            for ln in chain(ns.digest, tokens, BLOCK_TOKENS)
        ]
    text = path.read_text()
    head, described, *lines = rows(path)

    assert head["kvtcd_recording"] == 1
    assert described == {"namespace": 1, "block_tokens": BLOCK_TOKENS, "token_bytes": LAYOUT.token_bytes}
    assert [(row["op"], row["keys"]) for row in lines] == [
        ("match", records[1:3]),
        ("put", records[1:2]),
        ("put", records[2:3]),
        ("get", records[1:2]),
        ("get", records[2:4]),
        ("match", links),
    ]
    assert [(row["parent"], row["tokens"], row["bytes"]) for row in lines[1:3]] == [
        (None, BLOCK_TOKENS, BLOCK_BYTES),
        (records[1], BLOCK_TOKENS, BLOCK_BYTES),
    ]
    times = [head["time"], *(row["t"] for row in lines)]
    assert times == sorted(times)
    assert not any(key(n).hex() in text for n in range(4))
    assert "salt" not in text


@pytest_asyncio.fixture
async def lane():
    lane = Lane("record")
    yield lane
    await lane.close()


async def namespace(tmp_path: Path):
    async with toy_service(tmp_path / "state") as toy:
        return await toy.service.register("uid:1", "n", IDENTITY)


async def make(path: Path, lane: Lane) -> Recorder:
    return await asyncio.to_thread(Recorder, path, lane, Metrics())


async def test_a_file_that_is_there_is_continued_and_a_torn_line_ends_there(tmp_path, lane):
    ns, path = await namespace(tmp_path), tmp_path / "record"
    path.write_text('{"kvtcd_recording":1}\n{"t":1,"op":"ge')
    recorder = await make(path, lane)
    recorder.note(Line("get", ns, [b"k"]))
    await recorder.close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"kvtcd_recording":1}', '{"t":1,"op":"ge']
    assert [next(iter(json.loads(line))) for line in lines[2:]] == ["kvtcd_recording", "namespace", "t"]


async def test_after_it_was_moved_away_a_new_file_is_complete_by_itself(tmp_path, lane):
    ns, path = await namespace(tmp_path), tmp_path / "record"
    recorder = await make(path, lane)
    recorder.note(Line("get", ns, [b"1"]))
    await until(lambda: lines(path) == 3)
    path.rename(tmp_path / "old")
    recorder.note(Line("get", ns, [b"2"]))
    await until(lambda: lines(tmp_path / "old") == 4)
    await recorder.reopen()
    recorder.note(Line("get", ns, [b"3"]))
    await recorder.close()
    assert [row.get("keys") for row in rows(path)] == [None, None, ["33"]]
    assert [row.get("keys") for row in rows(tmp_path / "old")] == [None, None, ["31"], ["32"]]


async def test_what_the_disk_refuses_is_counted_and_a_gap_says_how_much(tmp_path, lane, caplog):
    ns, path = await namespace(tmp_path), tmp_path / "record"
    recorder = await make(path, lane)

    recorder._path = Path("/dev/full")
    await recorder.reopen()
    for number in range(1, 4):
        recorder.note(Line("get", ns, [bytes([number])]))
        await until(lambda count=number: recorder._metrics.unrecorded._value.get() == count)
    recorder._path = path
    recorder.note(Line("get", ns, [b"9"]))
    await recorder.close()
    first, again, gap, described, line = rows(path)
    assert [next(iter(row)) for row in (first, again)] == ["kvtcd_recording"] * 2
    assert (gap, described["namespace"], line["keys"]) == ({"op": "gap", "lines": 3}, 1, ["39"])
    assert caplog.text.count("cannot record") == 1


async def test_what_waits_is_bounded(tmp_path, lane, monkeypatch):
    ns, path = await namespace(tmp_path), tmp_path / "record"
    monkeypatch.setattr(recording, "QUEUE", 10)
    recorder = await make(path, lane)
    for number in range(6):
        recorder.note(Line("get", ns, [bytes([number])] * 4))
    assert sum(len(line.keys) for _, line in recorder._waiting) == 8
    await recorder.close()
    assert [row.get("op") for row in rows(path)] == [None, "gap", None, "get", "get"]
    assert rows(path)[1] == {"op": "gap", "lines": 4}
    assert recorder._metrics.unrecorded._value.get() == 4
    assert recorder._metrics.recorded._value.get() == 2


async def test_a_file_that_cannot_be_written_is_said_at_the_start(tmp_path, lane):
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        await make(tmp_path, lane)
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        await make(Path("/dev/full"), lane)
