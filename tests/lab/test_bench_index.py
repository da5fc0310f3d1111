"""The store that is measured is one that a daemon takes in whole; figures and plot are what they say."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from support.records import keys_in
from support.toy import toy_service

from kvtcd import cli
from kvtcd.core.errors import ConfigError
from kvtcd.core.keys import TenantKeys
from kvtcd.lab.bench_index import Row, memory_growth, restart_growth
from kvtcd.lab.index_plot import draw
from kvtcd.lab.many_blocks import CHAIN, IDENTITY, NAME, QUOTA, engine_key, fill
from kvtcd.tiers.disk import Environment
from kvtcd.tiers.state import StateDirectory

BLOCKS = 1500


def test_what_is_filled_is_intact_and_chained(tmp_path) -> None:
    written: list[int] = []
    fill(tmp_path / "state", BLOCKS, written.append)

    state = StateDirectory(tmp_path / "state")
    (tag,) = state.tenants()
    environment = Environment(state.tenant(tag), quota=BLOCKS * QUOTA)
    try:
        assert not environment.recovered, "it was closed cleanly"
        assert sum(written) == len(keys_in(environment)) == BLOCKS
        assert environment.used <= BLOCKS * QUOTA
    finally:
        environment.close()
        state.close()


@pytest.mark.asyncio
async def test_a_service_takes_all_of_it_in(tmp_path) -> None:
    await asyncio.to_thread(fill, tmp_path, BLOCKS, lambda _: None)

    master = await asyncio.to_thread((tmp_path / "master.key").read_bytes)

    async with toy_service(tmp_path) as toy:
        (name,) = [n for n in toy.service._registry.all() if n.name == NAME]
        found = toy.service.prefixes.match(name, [engine_key(n) for n in range(BLOCKS)], b"")
        entries = toy.catalog.residents.entries
        keys = TenantKeys.derive(master, name.tenant)
        record_key = keys.record_keys(IDENTITY.digest, b"")
        parents = [entries[record_key(engine_key(n))].parent for n in range(CHAIN + 1)]

    assert len(found.prefix) == BLOCKS
    assert parents[0] is None
    assert parents[1:CHAIN] == [record_key(engine_key(n)) for n in range(CHAIN - 1)]
    assert parents[CHAIN] is None, "the next sequence begins"


def test_growth_is_the_exponent_of_the_law() -> None:
    sizes = (1, 1000, 10_000, 100_000)
    rows = [Row(n, 400.0 + 1e6 / n, 1.0, 2.0, 2.0, 9.0, 2.0 + 3e-6 * n**1.5) for n in sizes]

    assert memory_growth(rows) == (pytest.approx(400.0, rel=0.01), pytest.approx(1.0, abs=0.001))
    assert memory_growth(rows).at(5000) == pytest.approx(2_000_000, rel=0.01)
    assert restart_growth(rows[:1]) is None
    assert restart_growth(rows).exponent == pytest.approx(1.5, abs=0.06), (
        "over the smallest, which is no zero"
    )


def test_a_plot_is_drawn_or_refused(tmp_path) -> None:
    rows = [Row(n, 400.0, 1.0, 2.0, 2.0, 3.0, 3.0) for n in (1000, 10_000)]
    draw(rows, tmp_path / "index.png")
    draw(rows[:1], tmp_path / "one.png")  # no law, and nothing above the shortest start

    assert (tmp_path / "index.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot be drawn"):
        draw(rows, tmp_path / "index.nonsense")


@pytest.mark.slow
def test_the_command_measures_a_real_daemon(tmp_path, monkeypatch) -> None:
    out = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["kvtcd", "bench", "index", "--blocks", "2000", "--json", str(out)])
    with pytest.raises(SystemExit) as ended:
        cli.main()

    (row,) = json.loads(out.read_text())["rows"]
    assert ended.value.code in {0, None}
    assert set(row) >= {"blocks", "bytes_per_block", "match_ms", "match_http_ms", "restart_s"}
    assert row["blocks"] == 2000
    assert row["restart_s"] > 0 < row["match_http_ms"]
    assert row["restart_cpu_s"] > 0 < row["match_http_cpu_ms"]
