"""The doctor finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

import asyncio
import json

import pytest
from rich.console import Console
from support.fake_driver import Machine, Process
from support.http import running

from kvtcd import cli
from kvtcd.admin import doctor
from kvtcd.admin.doctor import examine
from kvtcd.client import Client
from kvtcd.cuda.imports import Imports

pytestmark = pytest.mark.asyncio


async def findings(socket) -> dict[str, tuple[str, str]]:
    def ask() -> dict[str, tuple[str, str]]:
        with Client(socket) as client:
            return {one.what: (one.state, one.said) for one in examine(client)}

    return await asyncio.to_thread(ask)


async def test_a_healthy_daemon_is_found_so_and_left_as_it_was(tmp_path):
    async with running(host=128 << 20) as daemon:
        await daemon.register()
        found = await findings(daemon.socket)
        assert {state for state, _ in found.values()} == {"ok"}, found
        assert "GB/s" in found["by http"][1]
        assert "GB/s" in found["by region"][1]
        assert found["namespace demo"][1] == "packed by toy"
        assert daemon.blocks() == 0
        names = [namespace.name for namespace in daemon.toy.service._registry.all()]
        assert names == ["demo", doctor.NAMESPACE]
        again = await findings(daemon.socket)
        assert again.keys() == found.keys(), "it can come again"

        out = tmp_path / "doctor.json"
        well = await asyncio.to_thread(
            doctor.command, address=str(daemon.socket), json=out, console=Console(quiet=True)
        )
        assert well
        assert {row["state"] for row in json.loads(out.read_text())["findings"]} == {"ok"}


async def test_what_is_not_well_is_said_with_its_reason():
    async with running(host=128 << 20) as daemon:
        while daemon.runner.side_sockets:
            daemon.runner.side_sockets.pop().close()
        found = await findings(daemon.socket)
        assert found["by region"][0] == "note"
        assert "HTTP instead" in found["by region"][1]

    async with running(host=1 << 20) as daemon:
        found = await findings(daemon.socket)
        assert found["by http"][0] == "note"
        assert "too-large" in found["by http"][1]


async def test_a_device_that_holds_less_than_it_should_is_noted(monkeypatch):
    monkeypatch.setattr("kvtcd.core.shelf.Shelf.withheld", 5 << 30)
    async with running(host=128 << 20) as daemon:
        state, said = (await findings(daemon.socket))["tier disk"]
        assert state == "note"
        assert "is full and holds 5.4 GB less" in said


async def test_other_bytes_than_were_stored_are_a_fault(monkeypatch):
    async with running(host=128 << 20) as daemon:
        monkeypatch.setattr(
            Client, "fill", lambda _self, _name, _keys, out: out[0].__setitem__(0, out[0][0] ^ 1)
        )
        found = await findings(daemon.socket)
        assert found["by http"] == ("wrong", "other bytes came back than were stored; report this")


async def test_memory_of_a_gpu_is_tried_where_there_is_one(monkeypatch):
    machine = Machine()
    driver = Process(machine).driver()
    monkeypatch.setattr("kvtcd.cuda.driver.Driver.load", lambda: driver)
    monkeypatch.setattr("kvtcd.api.side.is_own", lambda _: False)
    async with running(host=128 << 20, devices=Imports(Process(machine).driver)) as daemon:
        state, said = (await findings(daemon.socket))["by device"]
        assert (state, "GB/s" in said) == ("ok", True), said
    async with running(host=128 << 20) as daemon:
        state, said = (await findings(daemon.socket))["by device"]
        assert state == "note"
        assert "regions is false in [gpu]" in said
    assert machine.faults == []


async def test_a_gpu_without_room_is_said_to_be_so(monkeypatch):
    process = Process(Machine())
    driver = process.driver()
    process.script["cuMemAlloc_v2"] = 2
    monkeypatch.setattr("kvtcd.cuda.driver.Driver.load", lambda: driver)
    async with running(host=128 << 20) as daemon:
        state, said = (await findings(daemon.socket))["by device"]
        assert state == "note"
        assert "no memory of a GPU is to be had: cuMemAlloc_v2" in said


async def test_without_a_daemon_the_command_fails(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(cli.app, ["doctor", str(tmp_path / "nobody")])
    assert ended.value.code == 1
    assert "no daemon answers" in " ".join(capsys.readouterr().out.split())


async def test_a_shared_store_that_is_away_or_full_of_foreign_things_is_noted() -> None:
    names = ["queue_blocks", "written", "there", "dropped", "hits", "misses", "refused", "failed", "pending"]
    quiet = {"breaker": "closed"} | dict.fromkeys(names, 0)
    well = doctor._remote(quiet | {"hits": 12})
    away = doctor._remote(quiet | {"breaker": "open", "pending": 1})
    planted = doctor._remote(quiet | {"refused": 3})

    assert (well.state, away.state, planted.state) == ("ok", "note", "note")
    assert "12 hits" in well.said
    assert "breaker open" in away.said
    assert "1 purges or deletes are still to be done there" in away.said
    assert "3 objects there were no records of ours" in planted.said
