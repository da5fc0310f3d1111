"""A recording becomes the requests that were made: each block of each counts once."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, soon, toy_service

from kvtcd.core.errors import ConfigError
from kvtcd.core.keys import EngineKey, RecordKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.policy import Evict, Policy
from kvtcd.lab import simulate
from kvtcd.lab.recording import read_requests
from kvtcd.lab.replay import Replay
from kvtcd.lab.trace import Request, read_trace

SLICE = Path(__file__).parent.parent / "data" / "mooncake-600.jsonl"
HEAD = [{"kvtcd_recording": 1, "time": 100.0}, {"namespace": 1, "block_tokens": 16, "token_bytes": 8}]


def key(name: str) -> RecordKey:
    return RecordKey(name.encode().ljust(32, b"-"))


def line(words: str, at: float) -> dict:
    """Read ``match ABC``, ``get AB``, ``put D<C`` (parent C), or one with ``@seconds`` at its end."""
    words, _, time = words.partition("@")
    op, names = words.split()
    names, _, parent = names.partition("<")
    row = {"t": float(time or at), "op": op, "namespace": 1, "keys": [key(name).hex() for name in names]}
    if op == "put":
        row |= {"parent": key(parent).hex() if parent else None, "tokens": 16, "bytes": 128}
    return row


def requests(tmp_path: Path, *lines: str) -> list[str]:
    """Return the blocks of each request of a recording, as letters."""
    path = tmp_path / "record"
    rows = [*HEAD, *(line(words, 100 + number) for number, words in enumerate(lines))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["".join(chr(k[0]) for k in request.blocks) for request in read_requests(path)]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        pytest.param(["match ABC", "get AB", "put C<B"], ["ABC"], id="hits, then what was missing"),
        pytest.param(["match ABC", "put A", "put B<A", "put C<B"], ["ABC"], id="nothing was there"),
        pytest.param(["match AB", "match AB", "get AB"], ["AB"], id="a scheduler that asks again"),
        pytest.param(["match AB", "get AB"] * 2, ["AB", "AB"], id="the same prompt twice"),
        pytest.param(["match AB", "match AB", "get AB", "get AB"], ["AB", "AB"], id="the same twice at once"),
        pytest.param(["match AB", "get A", "get B"], ["AB"], id="block by block"),
        pytest.param(["match AB", "get B", "get A"], ["AB"], id="in any order"),
        pytest.param(
            ["match ABp", "get AB", "match ABCq", "put C<B", "put q<C"], ["ABCq"], id="an answer is saved"
        ),
        pytest.param(["match ABp", "match ABCq", "put A", "put B<A", "put C<B"], ["ABC"], id="all is saved"),
        pytest.param(
            ["match ABC", "match ABD", "get AB", "get AB", "put C<B", "put D<B"],
            ["ABC", "ABD"],
            id="two that share a beginning",
        ),
        pytest.param(["match AB", "get AB", "match AB", "get A", "put B<A"], ["AB", "AB"], id="evicted: one"),
        pytest.param(["match AB", "get AB", "match AB", "put A", "put B<A"], ["AB", "AB"], id="evicted"),
        pytest.param(["get A", "put A"], ["A"], id="asked for in vain without a match"),
        pytest.param(["get AB", "get AB"], ["AB", "AB"], id="gets alone"),
        pytest.param(["put A", "put B<A", "put A"], ["AB", "A"], id="puts alone"),
        pytest.param(["match ABC", "get X"], ["X"], id="a match alone refers to nothing"),
        pytest.param(["match AB", "get A", "put B<A@9000"], ["A", "B"], id="much later is another request"),
        pytest.param(["match AB", "get AB", "match C@50", "put C@60"], ["AB", "C"], id="a clock set back"),
    ],
)  # fmt: skip
def test_match_get_and_put_of_one_request_refer_to_each_block_once(tmp_path, lines, found):
    assert requests(tmp_path, *lines) == found


def test_namespaces_and_starts_of_the_daemon_are_kept_apart(tmp_path):
    rows = [
        *HEAD, {"namespace": 2, "block_tokens": 32, "token_bytes": 8},
        line("match AB", 100), line("match AB", 101) | {"namespace": 2}, line("get AB", 102),
        line("get A", 103) | {"namespace": 2}, {"op": "gap", "lines": 3},
    ]  # fmt: skip
    again = [HEAD[0], HEAD[1] | {"block_tokens": 64}, line("put B<A", 110)]
    path = tmp_path / "record"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"t": 1\n')
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in again)
        file.write('{"t": 12')
    found = [(r.at, r.tokens, len(r.blocks), r.block_tokens) for r in read_requests(path)]
    assert found == [(0, 32, 2, 16), (1, 32, 1, 32), (10, 16, 1, 64)]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"kvtcd_recording": 2}\n', "line 1: .*version 2"),
        (
            '{"kvtcd_recording": 1}\n{"t": 1, "op": "get", "namespace": 7, "keys": []}\n',
            "line 2: namespace: no line above describes 7",
        ),
        ('{"kvtcd_recording": 1}\nnonsense\n{"op": "gap", "lines": 1}\n', "line 2: is not a line"),
        ('{"kvtcd_recording": 1}\n[]\n{"op": "gap", "lines": 1}\n', "line 2: is not a line"),
        ('{"kvtcd_recording": 1}\n', "holds no requests"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, text, where):
    path = tmp_path / "record"
    path.write_text(text)
    with pytest.raises(ConfigError, match=where):
        read_requests(path)


def test_a_recording_is_simulated_with_its_own_size_of_blocks(tmp_path):
    path, policy, out = tmp_path / "record", tmp_path / "lru.toml", tmp_path / "out.json"
    rows = [*HEAD, *(line(words, 100) for words in ("match AB", "put A", "put B<A", "match AB", "get AB"))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy.write_text('[evict]\npolicy = "lru"\n')
    simulate.command(
        trace=path, policies=[policy], budgets=["1MiB", "1blocks"], ratios=[1.0], bytes_per_token=1024,
        json=out, plot=None,
    )  # fmt: skip
    figures = json.loads(out.read_text())
    assert (figures["requests"], figures["references"]) == (2, 4)
    assert [(row["budget_blocks"], row["hit_ratio"]) for row in figures["rows"]] == [(64, 0.5), (1, 0.0)]


def test_a_mooncake_trace_is_read_as_ever():
    assert read_requests(SLICE) == read_trace(SLICE)


async def session(folder: Path, record: Path) -> tuple[int, int, int]:
    """Use a daemon at random; return hits and references by a dictionary, and hits as the daemon counts."""
    rng, seen = random.Random(3), set()
    hits = references = 0

    async with toy_service(folder, host=256 * BLOCK_BYTES, record=record) as toy:
        blocks = toy.service.blocks
        ns = await toy.service.register("uid:1", "n", IDENTITY)
        for _ in range(60):
            document = rng.randrange(6)
            prompt = [(document, depth) for depth in range(rng.randrange(1, 6))] + [(rng.randrange(99), 9)]
            keys = {part: EngineKey(bytes(part) * 16) for part in prompt}
            present = next((n for n, part in enumerate(prompt) if part not in seen), len(prompt))
            hits, references = hits + present, references + len(prompt)
            seen |= set(prompt)

            for _ in range(rng.randrange(1, 3)):
                found = toy.service.prefixes.match(ns, list(keys.values()), b"").prefix
            assert len(found) == present
            async for _, lease in blocks.read_many(ns, [match.key for match in found], b"", soon()):
                assert lease is not None
            async with blocks.batch(ns, b"", soon()) as batch:
                for number in range(present, len(prompt)):
                    parent = keys[prompt[number - 1]] if number else None
                    head = BlockHead(keys[prompt[number]], BLOCK_TOKENS, number * BLOCK_TOKENS, parent)
                    slot = await batch.reserve(head, BLOCK_BYTES)
                    if slot is not None:
                        slot.write(memoryview(block(1)))
                await batch.commit()
        counted = sum(place.hits for place in toy.service._tally.total.places)
    return hits, references, counted


def test_a_recorded_session_replayed_hits_what_a_dictionary_hits(tmp_path):
    path = tmp_path / "record"
    hits, references, counted = asyncio.run(session(tmp_path / "state", path))
    recorded = read_requests(path)
    replay = Replay(Policy("lru", evict=Evict("lru")), 10_000)
    for request in recorded:
        replay.request(request)
    assert len(recorded) == 60
    assert sum(len(request.blocks) for request in recorded) == references
    assert replay.hits == hits == counted
    (row,) = simulate.simulate(recorded, [Policy("lru", evict=Evict("lru"))], [10_000], [1.0])
    assert row.hit_ratio == row.belady == hits / references


def test_blocks_of_a_recording_have_their_own_places_when_they_are_replayed():
    keys = tuple(key(name) for name in "ABC")
    replay = Replay(Policy("lru", evict=Evict("lru")), 10)
    replay.request(Request(0, 40, keys, block_tokens=16))
    entries = replay._catalog.residents.entries
    assert [(entries[k].position, entries[k].tokens) for k in keys] == [(0, 16), (16, 16), (32, 8)]
