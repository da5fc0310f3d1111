"""The doctor finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from support.fake_driver import Machine, Process
from support.fake_store import FakeStore
from support.faults import unreadable
from support.http import NS, TENANT_HEADER, by_header, running, until
from support.records import keys_in
from support.toy import BLOCK_TOKENS, IDENTITY, block

from kvtcd import cli
from kvtcd.admin import doctor
from kvtcd.admin.doctor import examine
from kvtcd.client import Client
from kvtcd.core.access import Caller, Scope
from kvtcd.core.policy import DiskTier, Match, Policy, Promote
from kvtcd.cuda.imports import Imports
from kvtcd.tiers.disk import Put

pytestmark = pytest.mark.asyncio


WHO = ["uid:1"]
"""The tenant that whoever connects without a word is, on either socket."""


def whoever() -> dict[str, object]:
    WHO[0] = "uid:1"

    def authenticate(request) -> Caller:
        return by_header(request) if TENANT_HEADER in request.headers else peer(None)

    def peer(_) -> Caller:
        return Caller(WHO[0], frozenset(Scope) - {Scope.ADMIN})

    return {"authenticate": authenticate, "identify_peer": peer, "host": 128 << 20}


async def findings(socket, tenant: str = "uid:1") -> dict[str, tuple[str, str]]:
    WHO[0] = tenant

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
        assert "not tried" in found["by TCP"][1], "a socket says nothing of other ways in"
        assert "kvtcd doctor http://" in found["by TCP"][1]
        assert found["namespace demo"][1] == "packed by toy"
        assert daemon.blocks() == 0
        names = [namespace.name for namespace in daemon.toy.service._registry.all()]
        assert names == ["demo"], "what it tried is gone"
        again = await findings(daemon.socket)
        assert again.keys() == found.keys(), "it can come again"

        out, shown = tmp_path / "doctor.json", io.StringIO()
        well = await asyncio.to_thread(
            doctor.command, address=str(daemon.socket), json=out, console=Console(file=shown, width=1000)
        )
        assert well
        assert found["by TCP"][1] in shown.getvalue(), "brackets of a sentence are no markup"
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


async def test_records_that_failed_their_checks_are_wrong_and_counted():
    async with running(host=128 << 20, policy=Policy("toy", disk=DiskTier(write="evict"))) as daemon:
        await daemon.register()
        path = f"{NS}/blocks/ab"
        put = f"{path}?tokens={BLOCK_TOKENS}&first_token=0"
        headers = {"Content-Type": "application/octet-stream"}
        async with daemon.request("PUT", put, data=block(1), headers=headers) as answer:
            assert answer.status == 201
        async with daemon.request("POST", f"{NS}/demote", json={"keys": ["ab"]}) as answer:
            assert answer.status == 202
        await until(lambda: not daemon.toy.service._driver.origins)
        assert "records" not in await findings(daemon.socket)

        (tenant,) = daemon.toy.service._registry.tenants.values()
        (stored,) = keys_in(tenant.writer.environment)
        envelope, blob = tenant.writer.environment.read(stored)
        blob[len(blob) // 2] ^= 1
        await tenant.writer.exclusive(lambda env: env.write([Put(stored, envelope, blob)], []))
        async with daemon.request("GET", path) as answer:
            assert answer.status == 404
        state, said = (await findings(daemon.socket))["records"]
        assert state == "wrong"
        assert said.startswith("1 failed their checks since the start (1 BadChecksum)")
        assert "kvtcd inspect --verify" in said
        shown = Console(file=io.StringIO())
        assert not await asyncio.to_thread(doctor.command, address=str(daemon.socket), console=shown)


async def test_a_device_that_holds_less_than_it_should_is_noted(monkeypatch):
    monkeypatch.setattr("kvtcd.core.shelf.Shelf.withheld", 5 << 30)
    async with running(host=128 << 20) as daemon:
        state, said = (await findings(daemon.socket))["tier disk"]
        assert state == "note"
        assert "is full and holds 5.4 GB less" in said


async def test_each_gpu_is_looked_at_and_one_that_no_start_knew_is_wrong():
    policies = (Policy("far", Match(namespace="far"), promote=Promote("cuda:7")), Policy("rest"))
    async with running(
        host=128 << 20, gpu={"cuda:0": 1 << 20, "cuda:1": 2 << 20}, load=lambda: policies
    ) as daemon:
        before = await findings(daemon.socket)
        async with daemon.request("POST", "/v1/policies:reload", headers={TENANT_HEADER: "uid:0"}) as answer:
            assert answer.status == 200
        found = await findings(daemon.socket)
    tiers = {name: said for name, (state, said) in before.items() if name.startswith("tier gpu")}
    assert list(tiers) == ["tier gpu", "tier gpu, cuda:0", "tier gpu, cuda:1"]
    assert "degraded" not in before
    assert found["degraded"][0] == "wrong"
    assert "unknown-gpu (1)" in found["degraded"][1]
    assert "KvtcdUnknownGpu" in found["degraded"][1]


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


async def test_without_a_daemon_the_command_says_that_it_is_not_available(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kvtcd", "doctor", str(tmp_path / "nobody")])
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(cli.main)
    assert ended.value.code == 69
    assert "no daemon answers" in capsys.readouterr().err


async def test_a_file_of_authorities_that_is_not_there_is_a_fault_of_usage(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KVTCD_CA", str(tmp_path / "none.pem"))
    monkeypatch.setattr(sys, "argv", ["kvtcd", "doctor", "https://localhost:7337"])
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(cli.main)
    assert ended.value.code == 2
    assert f"{tmp_path / 'none.pem'}: No such file" in capsys.readouterr().err


async def test_a_look_leaves_nothing_and_counts_nowhere(tmp_path):
    state, trace = tmp_path / "s", tmp_path / "trace.jsonl"
    async with running(**whoever(), state=state, record=trace) as daemon:
        await daemon.register()
        before = await figures(daemon), sorted(state.rglob("*"))
        await findings(daemon.socket)
        found = await findings(daemon.socket, "uid:77")
        assert {said for said, _ in found.values()} == {"ok"}
        assert (await figures(daemon), sorted(state.rglob("*"))) == before
        assert daemon.toy.service._registry.tenants["uid:77"].guest
        assert await daemon.toy.service.register("uid:77", "real", IDENTITY), "and then he comes to stay"
        assert len([*(state / "tenants").iterdir()]) == 2
        await findings(daemon.socket, "uid:77")
        assert not daemon.toy.service._registry.tenants["uid:77"].guest
    assert '"namespace"' not in trace.read_text()


async def figures(daemon) -> dict[str, object]:
    """Return all that is told of blocks and tenants."""
    told: dict[str, object] = {}
    for tenant in ("uid:0", "uid:1", "uid:77"):
        for path in ("/v1/stats", "/v1/namespaces", "/v1/prefixes", "/v1/policies"):
            async with daemon.request("GET", path, headers={TENANT_HEADER: tenant}) as answer:
                told[f"{tenant} {path}"] = (await answer.json()) | {"uptime_s": None}
    async with daemon.request("GET", "/v1/tenants", headers={TENANT_HEADER: "uid:0"}) as answer:
        told["tenants"] = await answer.json()
    async with daemon.request("GET", "/metrics") as answer:
        counted = re.compile(
            r"^kvtcd_(?!loop_lag|regions|region_bytes|lane|stage|oldest|.*_created)\S+ .*$", re.MULTILINE
        )
        told["metrics"] = counted.findall(await answer.text())
    assert len(told["metrics"]) > 50
    return told


async def test_a_look_while_somebody_purges_is_not_kept_by_that(tmp_path):
    async with running(state=tmp_path / "s") as daemon:
        await daemon.register()
        identity = replace(IDENTITY, model="trial")
        service = daemon.toy.service
        trial = await service.register("uid:1", "kvtcd-doctor.1", identity)
        assert trial.trial
        await service.purge("uid:1", "demo")
        assert service.namespace("uid:1", "kvtcd-doctor.1") is trial
    async with running(state=tmp_path / "s") as daemon:
        assert daemon.toy.service._registry.all() == []


async def test_a_tenant_that_is_left_out_or_whose_blocks_are_cold_is_told_so(tmp_path):
    for fault in ("left-out", "set-aside"):
        state = tmp_path / fault
        async with running(**whoever(), state=state) as daemon:
            await daemon.register()
            tag = daemon.toy.service._registry.tenants["uid:1"].keys.tag.hex()
            await daemon.register(**{TENANT_HEADER: "uid:3"})
        environment = state / "tenants" / tag
        if fault == "left-out":
            unreadable(environment)
        else:
            next(environment.glob("*/data.mdb")).write_bytes(b"not a data file")
        async with running(**whoever(), state=state) as daemon:
            found = await findings(daemon.socket)
            assert found["degraded"][0] == "wrong"
            assert fault in found["degraded"][1]
            assert "KvtcdQuarantined" in found["degraded"][1]
            assert ("blocks" in found) == (fault == "left-out"), "who is refused is told so"
            others = await findings(daemon.socket, "uid:2")
            assert others["by http"][0] == "ok"


async def test_a_shared_store_that_is_away_is_found_out_even_if_nobody_has_asked_it_yet(tmp_path) -> None:
    for down in (False, True):
        async with running(host=128 << 20, state=tmp_path / str(down), remote=FakeStore(down=down)) as daemon:
            state, said = (await findings(daemon.socket))["tier remote"]
            assert state == ("wrong" if down else "ok"), said
            assert ("does not answer" in said) == down
            assert daemon.toy.service.overview.stats("uid:1").remote.pending == 0, "it leaves nothing"


async def test_how_a_shared_store_is_said_to_be() -> None:
    names = [
        "queue_blocks", "written", "there", "dropped", "hits", "misses", "refused", "failed", "pending",
        "answered", "failing", "refusing", "refused_profiles",
    ]  # fmt: skip
    quiet = {"breaker": "closed"} | dict.fromkeys(names, 0)
    well = doctor._remote(quiet | {"hits": 12})
    away = doctor._remote(quiet | {"breaker": "open", "pending": 1})
    planted = doctor._remote(quiet | {"refused": 3})

    full = doctor._remote(quiet | {"refusing": 7, "queue_blocks": 2})

    assert (well.state, away.state, planted.state, full.state) == ("ok", "wrong", "wrong", "wrong")
    assert "it takes no blocks; the log says what it answers" in full.said
    assert "12 hits" in well.said
    assert "breaker open" in away.said
    assert "1 purges or deletes are still to be done there" in away.said
    assert "3 objects there were no records of ours" in planted.said
