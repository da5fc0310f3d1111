"""What `kvtcd top` shows of a daemon whose traffic is known, and of answers that are written by hand."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from support.fake_store import FakeStore
from support.http import running
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block
from typer.testing import CliRunner

from kvtcd.admin import top
from kvtcd.admin.top_figures import Answers, figures
from kvtcd.cli import app
from kvtcd.client import BlockHead, Client
from kvtcd.core.errors import NotFound, Unavailable
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import Info

if TYPE_CHECKING:
    from pathlib import Path


def key(number: int) -> EngineKey:
    return EngineKey(number.to_bytes(32, "big"))


def traffic(socket: Path) -> Answers:
    """Store three blocks, read two of them, one twice, and one that is nowhere."""
    with Client(socket) as client:
        client.register("docs", IDENTITY)
        for n in range(3):
            client.put("docs", BlockHead(key(n), BLOCK_TOKENS, 0), block(n), durable=True)
        client.match("docs", [key(0), key(7)])
        for n in (0, 1, 1):
            client.get("docs", key(n))
        with pytest.raises(NotFound):
            client.get("docs", key(9))
        return Answers.of(client)


@pytest.mark.asyncio
async def test_figures_are_those_of_the_traffic() -> None:
    async with running() as daemon:
        answers = await asyncio.to_thread(traffic, daemon.socket)
        shown = figures(answers)
        tiers = {held.name: held for held in shown.tiers}
        assert (shown.recent.blocks, shown.recent.hits, shown.recent.hit_ratio) == (4, 3, 0.75)
        assert (tiers["host"].copies, tiers["host"].bytes, tiers["host"].hits) == (3, 3 * BLOCK_BYTES, 3)
        assert tiers["disk"].copies == 3
        assert tiers["disk"].ratio == pytest.approx(3 * BLOCK_BYTES / tiers["disk"].packed_bytes)
        (own,) = shown.namespaces
        assert (own.name, own.hits, own.misses) == ("docs", 3, 1)
        assert shown.tenants is None, "this caller has no scope for them"
        text = shown_as_text(answers)
        for said in ("docs", "host", "disk", "75.0%", "3 blocks", key(0).hex()[:16]):
            assert said in text


def shown_as_text(answers: Answers) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(top.render(answers, figures(answers)))
    return out.getvalue()


@pytest.mark.asyncio
async def test_once_and_as_json_by_the_command_line(tmp_path) -> None:
    async with running() as daemon:
        await asyncio.to_thread(traffic, daemon.socket)
        out = tmp_path / "top.json"
        arguments = ["top", str(daemon.socket), "--once", "--json", str(out)]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert result.exit_code == 0, result.output
        assert "namespaces" in result.output
        written = json.loads(out.read_text())
        assert (written["command"], written["blocks"], written["misses"]) == ("top", 3, 1)
        assert written["recent"]["hits"] == 3
        assert [each["name"] for each in written["namespaces"]] == ["docs"]


@pytest.mark.asyncio
async def test_it_goes_on_while_the_daemon_is_away_and_ends_when_interrupted(monkeypatch, tmp_path) -> None:
    async with running() as daemon:
        socket, looks = daemon.socket, threading.Event()
        away = tmp_path / "away.sock"
        pauses = []

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 1:
                socket.rename(away)
            elif len(pauses) == 2:
                away.rename(socket)
            elif len(pauses) == 4:
                looks.set()
                raise KeyboardInterrupt

        # The kept connection would answer all the same.
        monkeypatch.setattr("kvtcd.client.connections.IDLE", 0)
        monkeypatch.setattr(top.time, "sleep", sleep)
        out = io.StringIO()
        console = Console(file=out, width=100)
        await asyncio.to_thread(
            top.command, address=str(socket), every_s=1.0, once=False, json=None, console=console
        )
        assert looks.is_set()
        assert pauses == [1.0] * 4


def test_without_a_daemon_once_is_an_error(tmp_path) -> None:
    with pytest.raises(Unavailable, match="no daemon answers"):
        top.command(address=str(tmp_path / "none"), every_s=1.0, once=True, json=None)


def form(blocks: int, nbytes: int, raw: int, hits: int) -> dict[str, object]:
    return {"blocks": blocks, "bytes": nbytes, "raw_bytes": raw, "hits": hits}


def answered(uptime: float, hits: int, misses: int, past: list[tuple[float, int, int]]) -> Answers:
    tiers = {"host": {"capacity": 100, "withheld": 0, "used": 50, "raw": form(1, 50, 50, hits)}}
    samples = [
        {
            "uptime_s": at,
            "misses": missed,
            "fetched": 0,
            "tiers": {"host": {"blocks": 1, "bytes": 50, "hits": found}},
        }
        for at, found, missed in past
    ]
    stats = {
        "uptime_s": uptime, "blocks": 1, "misses": misses, "fetched": 0, "moving": 2, "demoting": 1,
        "waiting": 0, "tiers": tiers, "own": {},
    }  # fmt: skip
    tenants = [{"tenant": "uid:7", "namespaces": ["n"], "misses": misses, "fetched": 0, "tiers": tiers}]
    return Answers(Info("1", 1, "boot"), stats, {"every_s": 10, "samples": samples}, (), [], tenants)


def test_rates_are_those_of_the_last_minute() -> None:
    past = [(0, 0, 0), (100, 100, 0), (130, 110, 90), (190, 120, 95)]
    shown = figures(answered(200, 130, 100, past))
    # The youngest sample that is a minute old is that of 130 s.
    assert (shown.recent.seconds, shown.recent.blocks, shown.recent.hits) == (70, 30, 20)
    assert shown.hour == [1.0, 0.1, pytest.approx(10 / 15), pytest.approx(10 / 15)]
    assert [each.name for each in shown.tenants] == ["uid:7"]


def test_what_came_from_the_shared_store_was_found() -> None:
    answers = answered(200, 130, 100, [(100, 100, 0)])
    shown = figures(replace(answers, stats={**answers.stats, "fetched": 7}))
    assert (shown.recent.blocks, shown.recent.hits) == (137, 37)


@pytest.mark.asyncio
async def test_the_shared_store_is_shown_and_that_it_is_away(tmp_path) -> None:
    for down in (False, True):
        async with running(state=tmp_path / str(down), remote=FakeStore(down=down)) as daemon:
            answers = await asyncio.to_thread(traffic, daemon.socket)
        away = dict(answers.stats["remote"]) | {"breaker": "open", "queue_blocks": 3333}
        stats = dict(answers.stats) | {"remote": away if down else answers.stats["remote"]}
        shown = io.StringIO()
        Console(file=shown, width=100).print(top.render(replace(answers, stats=stats), figures(answers)))
        (row,) = re.findall(r"^shared store *\n.*\n(.*)$", shown.getvalue(), re.MULTILINE)
        assert row.startswith("away ") == down
        assert (" 3,333 " in row) == down


def test_a_daemon_that_has_just_started_has_rates_since_then() -> None:
    shown = figures(answered(5, 3, 1, []))
    assert (shown.recent.seconds, shown.recent.hit_ratio, shown.hour) == (0, None, [])
    assert "uid:7" in shown_as_text(answered(5, 3, 1, []))


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([], ""), ([0.0, 1.0, None, 0.5], "▁█·▅"), ([0.0, 1.0] * 8, "▅▅▅▅▅▅▅▅"), ([None] * 16, "········")],
)
def test_the_hour_is_a_line_of_bars(values, drawn) -> None:
    assert top.spark(values, 8) == drawn


def test_of_several_gpus_each_has_a_row() -> None:
    answers = answered(5, 3, 1, [])
    one, two = ({"capacity": each, "used": each // 2, "blocks": each // 10} for each in (4000, 2000))
    gpu = {"capacity": 6000, "withheld": 0, "used": 3000, "raw": form(600, 3000, 3000, 9)}

    def lines(devices) -> list[list[str]]:
        tiers = {"gpu": gpu | {"devices": devices}} | answers.stats["tiers"]
        text = shown_as_text(replace(answers, stats={**answers.stats, "tiers": tiers}))
        return [
            words for line in text.splitlines() if (words := line.split()) and words[0][:2] in {"gp", "cu"}
        ]

    assert [row[0] for row in lines({"cuda:0": one, "cuda:1": two})] == ["gpu", "cuda:0", "cuda:1"]
    assert lines({"cuda:0": one, "cuda:1": two})[1][-1] == "400"
    assert [row[0] for row in lines({"cuda:0": one})] == ["gpu"], "of one there is nothing more to say"


def test_names_are_whole_on_a_terminal_of_80_columns() -> None:
    name = "team-a.llama-3.3-70b-instruct.fp8.tp4-rank0.context-131072.produ"
    answers = answered(5, 3, 1, [])
    own = {name: {"misses": 0, "fetched": 0, "tiers": answers.stats["tiers"]}}
    answers = replace(answers, stats={**answers.stats, "own": own, "degraded": {"set-aside": 1}})
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=False).print(top.render(answers, figures(answers)))
    lines = out.getvalue().splitlines()
    first = "".join(line.split()[0] for line in lines if line.strip() and line.split()[0] in name)
    assert "…" not in out.getvalue()
    assert name in first
    assert "set aside" in " ".join(out.getvalue().split())
