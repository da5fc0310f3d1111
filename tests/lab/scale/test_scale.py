"""Fleets against caches that are sets, queues against sums done by hand, break-even by trial."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd import cli
from kvtcd.core.errors import ConfigError
from kvtcd.core.keys import RecordKey
from kvtcd.core.policy import Admit, Policy
from kvtcd.lab.replay import Replay
from kvtcd.lab.scale import command
from kvtcd.lab.scale.command import Site
from kvtcd.lab.scale.fleet import Costs, Fleet, Host, Line
from kvtcd.lab.speeds import Cost, Speeds
from kvtcd.lab.trace import Request, read_trace

TRACE = Path(__file__).parents[2] / "data" / "mooncake-600.jsonl"
POLICY = Policy("balanced")
ROOMY, BLOCK = 1 << 30, 10
"""Blocks; tokens of a block."""
SECOND_A_TOKEN, FREE = Cost(linear=1.0), Cost()


def asks(at: float, blocks: str, spare: int = 1) -> Request:
    """A request whose blocks say these letters, of the last so many tokens; what came before is in a key."""
    keys = tuple(RecordKey(blocks[: n + 1].ljust(32).encode()) for n in range(len(blocks)))
    return Request(at, (len(blocks) - 1) * BLOCK + spare, keys, BLOCK)


def fleet(
    hosts: int = 1, *, unpack: Cost = FREE, latency: float = 0.0, link: float = 1e12, out: float = 1e12,
    routing="spread", shared: bool = True, own: int = ROOMY, policy: Policy = POLICY,
) -> Fleet:  # fmt: skip
    """Hosts where reading takes a second a token, and a token has one byte."""
    machines = [Host(Line(link), Replay(policy, own)) for _ in range(hosts)]
    store = Replay(policy, ROOMY) if shared else None
    return Fleet(machines, Costs(SECOND_A_TOKEN, unpack, 1.0, latency), routing, store, Line(out))


def serve(served_by: Fleet, *requests: Request) -> list[float]:
    for request in requests:
        served_by.request(request)
    return served_by.served.seconds


def test_what_one_host_has_read_another_takes_from_the_store() -> None:
    both = fleet(2)
    assert serve(both, asks(0, "abc"), asks(100, "abc")) == pytest.approx([21, 1])
    assert (both.served.local, both.served.remote, both.served.read) == (0, 20, 22)


def test_the_last_token_is_read_even_if_its_block_is_there() -> None:
    assert serve(fleet(), asks(0, "ab", BLOCK), asks(100, "ab", BLOCK)) == pytest.approx([20, 1])


def test_the_cache_of_the_host_comes_before_the_store() -> None:
    one = fleet(link=1.0)
    serve(one, asks(0, "abc"), asks(100, "abc"))
    assert (one.served.local, one.served.remote) == (20, 0)


def test_a_transfer_takes_latency_the_slower_line_and_what_unpacking_takes_longer() -> None:
    again = asks(0, "abc"), asks(100, "abc")
    assert serve(fleet(2, latency=0.5, link=4.0, out=40.0), *again)[1] == pytest.approx(0.5 + 20 / 4 + 1)
    assert serve(fleet(2, latency=0.5, link=40.0, out=4.0), *again)[1] == pytest.approx(0.5 + 20 / 4 + 1)
    slow = Cost(constant=0.25, linear=0.5)
    assert serve(fleet(2, latency=0.5, link=4.0, unpack=slow), *again)[1] == pytest.approx(
        0.5 + 0.25 + 20 * 0.5 + 1
    )


def test_a_store_that_would_be_later_than_reading_is_left_alone() -> None:
    both = fleet(2, link=0.9)
    assert serve(both, asks(0, "abc"), asks(100, "abc")) == pytest.approx([21, 21])
    assert both.served.remote == 0


def test_the_bytes_of_one_request_come_after_those_of_another() -> None:
    three = fleet(3, out=4.0)
    seconds = serve(three, asks(0, "abc"), asks(100, "abc"), asks(100, "abc"))
    assert seconds[1:] == pytest.approx([20 / 4 + 1, 2 * 20 / 4 + 1])
    assert three.hosts[1].link.busy == pytest.approx(20 / 1e12)


def test_an_accelerator_reads_one_request_after_the_other() -> None:
    one = fleet(shared=False)
    assert serve(one, asks(0, "abc"), asks(1, "xyz"), asks(100, "uvw")) == pytest.approx([21, 41, 21])
    assert one.hosts[0].reading == pytest.approx(63)


def test_the_first_token_comes_earliest_where_the_prefix_is_or_where_nobody_waits() -> None:
    two = fleet(2, routing="first-token", shared=False)
    serve(two, asks(0, "abc"), asks(50, "abc"))
    assert two.served.local == 20, "the second goes where the first was"
    queued = fleet(2, routing="first-token", shared=False)
    assert serve(queued, asks(0, "abc"), asks(1, "abc")) == pytest.approx([21, 21]), "20 s of queue, or 21"


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return read_trace(TRACE)[:200]


def prefix_tokens(requests: list[Request]) -> int:
    """Tokens that a cache without bounds finds, all hosts together."""
    seen: set[RecordKey] = set()
    found = 0
    for request in requests:
        blocks = next((n for n, key in enumerate(request.blocks) if key not in seen), len(request.blocks))
        found += min(blocks * request.block_tokens, request.tokens - 1)
        seen.update(request.blocks)
    return found


def test_a_store_makes_many_hosts_find_what_one_would(requests) -> None:
    four = fleet(4)
    serve(four, *requests)
    assert four.served.local + four.served.remote == prefix_tokens(requests)
    alone = fleet(shared=False)
    serve(alone, *requests)
    assert alone.served.local == prefix_tokens(requests)
    apart = fleet(4, shared=False)
    serve(apart, *requests)
    assert apart.served.local < prefix_tokens(requests)


ASKED = st.tuples(st.floats(0, 30), st.text("abcd", min_size=1, max_size=4), st.integers(1, BLOCK))


@given(
    st.lists(ASKED, min_size=1, max_size=12), st.integers(1, 3), st.sampled_from(["spread", "first-token"]),
    st.floats(0.1, 100),
)  # fmt: skip
def test_every_token_comes_from_somewhere_and_nothing_before_it_can(asked, hosts, routing, link) -> None:
    at, requests = 0.0, []
    for later, blocks, spare in asked:
        at += later
        requests.append(asks(at, blocks, spare))
    tried = fleet(hosts, routing=routing, link=link, latency=0.1, own=4)
    seconds = serve(tried, *requests)
    served = tried.served
    assert served.local + served.remote + served.read == sum(request.tokens for request in requests)
    assert sum(host.reading for host in tried.hosts) == pytest.approx(served.read)
    assert all(took >= 1 - 1e-9 for took in seconds), "one token is read at least"


def test_what_is_not_admitted_is_nowhere() -> None:
    short = fleet(2, policy=Policy("p", admit=Admit(min_tokens=1000)))
    serve(short, asks(0, "abc"), asks(100, "abc"))
    assert short.served.read == 42


SITE = Site(
    Speeds(Cost(linear=1e-3, square=1e-7), {"host-packed": Cost(0.05, 2e-4), "host-raw": Cost(0.04, 1e-5)}),
    token_bytes=1e5, block_bytes=5e7, budget=100, store_budget=None, link=1e9, store=100 * command.GBIT,
    latency=0.01, policy=POLICY,
)  # fmt: skip


def test_break_even_is_where_trial_finds_it() -> None:
    for one in command.least_tokens(SITE, [1.0, 16.0]):
        unpack = SITE.speeds.reuse["host-raw" if one.ratio == 1 else "host-packed"]

        def fetch(n: int, one=one, unpack=unpack) -> float:
            transfer = n * SITE.token_bytes / one.ratio / min(one.link_gbit_s * 1.25e8, SITE.store)
            return SITE.latency + unpack.constant + max(transfer, unpack.linear * n)

        wins = [n for n in range(1, 20_000) if fetch(n) < SITE.speeds.prefill.at(n)]
        assert (wins[0] if wins else None) == one.tokens, one
    tokens = {(one.link_gbit_s, one.ratio): one.tokens for one in command.least_tokens(SITE, [1.0, 16.0])}
    assert tokens[1.0, 16.0] < tokens[1.0, 1.0], "packed bytes pay earlier on a slow link"
    assert tokens[400.0, 1.0] < tokens[400.0, 16.0], "on a fast one nothing beats raw ones"


def test_more_hosts_and_a_store_bring_the_first_token_earlier(requests) -> None:
    rows = command.scale(requests, SITE, hosts=[2, 64], ratios=[16.0], routing="spread")
    assert [(row.hosts, row.caches) for row in rows] == [
        (hosts, caches) for hosts in (2, 64) for caches in ("none", "own", "shared")
    ]
    for few, many in zip(rows[:3], rows[3:], strict=True):
        assert many.first_token_p95_s < few.first_token_p95_s
        assert many.busy < few.busy
    for trio in (rows[:3], rows[3:]):
        assert all(after.busy < before.busy for before, after in pairwise(trio))
        assert trio[2].remote > 0
        assert trio[2].fetched_bytes == pytest.approx(
            trio[2].remote * sum(request.tokens for request in requests) * 1e5 / 16
        )


def test_the_command_writes_its_figures_and_draws(tmp_path, monkeypatch, capsys) -> None:
    out, plot = tmp_path / "scale.json", tmp_path / "scale.png"
    monkeypatch.setattr("sys.argv", [
        "kvtcd", "lab", "scale", "--trace", str(TRACE), "--bytes-per-token", "1000", "--prefill", "20000",
        "--reuse", "1000", "--hosts", "2", "--ratio", "16", "--budget", "256MiB", "--store-budget", "1GiB",
        "--json", str(out), "--plot", str(plot),
    ])  # fmt: skip
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "A trace served" in printed
    assert "Gbit/s" in printed
    figures = json.loads(out.read_text())
    assert figures["command"] == "lab scale"
    assert [row["caches"] for row in figures["rows"]] == ["none", "own", "shared"]
    assert figures["store_blocks"] == pytest.approx(4 * figures["budget_blocks"], rel=0.01)
    assert len(figures["least"]) == len(command.LINKS)
    assert plot.stat().st_size > 1000


def test_what_is_missing_is_said() -> None:
    said = {
        "trace": TRACE, "hosts": [1], "ratios": [1.0], "budget": "100blocks", "store_budget": None,
        "link_gbit_s": 1.0, "store_gbit_s": 1.0, "latency_ms": 1.0, "routing": "spread", "policy": None,
        "bytes_per_token": 1000, "bench": None, "prefill": None, "reuse": None, "overhead_ms": 5.0,
        "json": None, "plot": None,
    }  # fmt: skip
    for wrong, why in (
        ({}, "say --bench, or --prefill and --reuse"),
        ({"prefill": 1.0}, "say both speeds"),
        ({"bytes_per_token": None}, "this trace does not say it"),
        ({"prefill": 1.0, "reuse": 1.0, "budget": "much"}, "--budget"),
    ):
        with pytest.raises(ConfigError, match=why):
            command.command(**said | wrong)
