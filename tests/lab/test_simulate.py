"""A replay finds what a cache of lists finds; policies lie between nothing and the optimum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from support.invariants import check

from kvtcd import cli, config
from kvtcd.core.errors import ConfigError, Unavailable
from kvtcd.core.keys import RecordKey
from kvtcd.core.policy import Admit, Evict, EvictName, Policy
from kvtcd.lab import simulate
from kvtcd.lab.belady import most_hits
from kvtcd.lab.replay import Replay
from kvtcd.lab.trace import Request, read_trace

ROOT = Path(__file__).parent.parent.parent
SLICE = ROOT / "tests" / "data" / "mooncake-600.jsonl"


@pytest.fixture(scope="module")
def requests():
    return read_trace(SLICE)


def hits(policy: Policy, capacity: int, requests) -> int:
    replay = Replay(policy, capacity)
    for request in requests:
        replay.request(request)
    return replay.hits


def lru_of_lists(requests, capacity: int, on_sight: int = 1) -> int:
    """The least recently used goes first, of one request the last block; room is made before it is used."""
    queue, seen, found = [], {}, 0
    for request in requests:
        here = set(queue)
        prefix = next((n for n, key in enumerate(request.blocks) if key not in here), len(request.blocks))
        found += prefix
        held = list(request.blocks[:prefix])
        queue = [key for key in queue if key not in set(held)] + held
        for key in request.blocks:
            seen[key] = seen.get(key, 0) + 1
        fresh = 0
        for key in request.blocks[prefix:]:
            if key in queue:
                queue.remove(key)
                queue.append(key)
                held.append(key)
            elif seen[key] >= on_sight:
                fresh += 1
                held.append(key)
                del queue[: max(0, len(queue) + fresh - capacity)]
        queue = [key for key in queue if key not in set(held)] + [key for key in held[::-1] if key in held]
    return found


@pytest.mark.parametrize("capacity", [400, 2000])
@pytest.mark.parametrize("on_sight", [1, 2])
def test_lru_finds_what_a_list_finds(requests, capacity, on_sight) -> None:
    policy = Policy("lru", admit=Admit(on_sight=on_sight), evict=Evict("lru", leaves_first=False))

    assert hits(policy, capacity, requests) == lru_of_lists(requests, capacity, on_sight)


@pytest.mark.parametrize("name", get_args(EvictName))
def test_with_room_for_all_every_policy_finds_all_that_came_before(requests, name) -> None:
    before: set[bytes] = set()
    repeated = 0
    for request in requests:
        repeated += next(
            (n for n, key in enumerate(request.blocks) if key not in before), len(request.blocks)
        )
        before.update(request.blocks)

    assert hits(Policy(name, evict=Evict(name)), 100_000, requests) == repeated
    assert most_hits(requests, 100_000) == repeated


@pytest.mark.parametrize("name", get_args(EvictName))
def test_no_policy_finds_more_than_the_optimum(requests, name) -> None:
    assert 0 < hits(Policy(name, evict=Evict(name)), 500, requests) <= most_hits(requests, 500)


def test_the_shipped_default_beats_lru_by_far(requests) -> None:
    """On the whole trace it closes a third of the gap; its first minutes already show it."""
    (balanced,) = config.load_policies((ROOT / "policies" / "balanced.toml",))

    ours, lru = hits(balanced, 500, requests), hits(simulate.RAW_LRU, 500, requests)

    assert ours > 1.2 * lru


def test_a_request_larger_than_the_budget_is_served_all_the_same(requests) -> None:
    long = [request for request in requests if len(request.blocks) > 30][:20]

    for name in get_args(EvictName):
        replay = Replay(Policy(name, evict=Evict(name)), 8)
        for request in long:
            replay.request(request)
            check(replay._catalog)
        assert replay.stored >= 8


def test_short_sequences_are_not_kept(requests) -> None:
    policy = Policy("long", admit=Admit(min_tokens=4096))
    short = [request for request in requests if request.tokens < 4096]

    assert hits(policy, 10_000, short) == 0
    assert hits(policy, 10_000, requests) > 0


# The command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "block_bytes", "blocks"),
    [("3000blocks", None, 3000), ("7 blocks", 5, 7), ("64GiB", 64 << 20, 1024), ("1 GiB", 1e8, 10)],
)
def test_a_budget_is_blocks_or_bytes(text, block_bytes, blocks) -> None:
    assert simulate.budget_blocks(text, block_bytes) == blocks


def test_the_bytes_of_a_block_are_the_mean_of_what_a_recording_or_the_user_says(requests) -> None:
    def asked(blocks: str, tokens: int, **fields: int) -> Request:
        return Request(0.0, tokens, tuple(RecordKey(bytes([ord(b)]) * 32) for b in blocks), **fields)

    small, large = {"block_tokens": 16, "token_bytes": 8}, {"block_tokens": 256, "token_bytes": 4}
    assert simulate.block_bytes([asked("ab", 32, **small)], None) == 128
    assert simulate.block_bytes([asked("abc", 36, **small)], None) == (128 + 128 + 32) / 3, "a partial one"
    twice = [asked("ab", 32, **small), asked("ab", 32, **small), asked("xy", 512, **large)]
    assert simulate.block_bytes(twice, None) == (128 + 128 + 1024 + 1024) / 4, "each block once"
    assert simulate.block_bytes(twice, 10) == (160 + 160 + 2560 + 2560) / 4
    assert simulate.block_bytes(requests, None) is None
    assert 512 * 80 < simulate.block_bytes(requests, 100) < 512 * 100, "last blocks are shorter"


@pytest.mark.parametrize(
    ("text", "block_bytes", "why"),
    [
        ("64GiB", None, "needs --bytes-per-token"),
        ("many", 100, "is neither a size"),
        ("0blocks", None, "does not hold one block"),
        ("1 KiB", 51_200, "does not hold one block"),
    ],
)
def test_a_wrong_budget_is_refused(text, block_bytes, why) -> None:
    with pytest.raises(ConfigError, match=why):
        simulate.budget_blocks(text, block_bytes)


def test_the_command_writes_rows_that_others_read(tmp_path, monkeypatch, capsys) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    policies = [f"--policy={ROOT / 'policies' / name}.toml" for name in ("balanced", "latency")]
    monkeypatch.setattr(
        "sys.argv",
        [
            "kvtcd", "policy", "simulate", f"--trace={SLICE}", *policies, "--budget=100blocks",
            "--budget=300blocks", "--ratio=1", "--ratio=4.5", f"--json={out}", f"--plot={plot}",
        ],
    )  # fmt: skip

    with pytest.raises(SystemExit) as done:
        cli.main()

    assert done.value.code == 0
    body = json.loads(out.read_text())
    assert body["command"] == "policy simulate"
    assert (body["requests"], body["references"]) == (600, 16_495)
    assert [(r["policy"], r["budget_blocks"], r["ratio"]) for r in body["rows"]] == [
        (policy, budget, ratio)
        for budget in (100, 300)
        for ratio in (1.0, 4.5)
        for policy in ("balanced", "latency")
    ]
    for row in body["rows"]:
        assert {"hit_ratio", "hit_ratio_raw_lru", "belady"} <= row.keys()
        assert 0 <= row["hit_ratio_raw_lru"] <= row["belady"] <= 1
        packed = int(row["budget_blocks"] * row["ratio"])
        policy = config.load_policy(ROOT / "policies" / f"{row['policy']}.toml")
        assert row["hit_ratio"] == hits(policy, packed, read_trace(SLICE)) / body["references"]
    assert "balanced" in capsys.readouterr().out
    assert "<svg" in plot.read_text()


def test_a_plot_that_cannot_be_written_is_an_error_of_ours(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from kvtcd.lab.simulate_plot import draw  # noqa: PLC0415 - only with matplotlib

    rows = [simulate.Row("p", 1, 1.0, 0.1, 0.1, 0.1, 0.2, 0.0)]
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(rows, tmp_path / "absent" / "out.png")


def test_without_matplotlib_a_plot_says_what_to_install(tmp_path, monkeypatch) -> None:
    from kvtcd.lab.simulate_plot import draw  # noqa: PLC0415 - only with matplotlib

    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(Unavailable, match="pip install"):
        draw([simulate.Row("p", 1, 1.0, 0.1, 0.1, 0.1, 0.2, 0.0)], tmp_path / "out.png")
