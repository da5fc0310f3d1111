"""What is wrong with some tenants, or with a shared store, is named, and all else is served."""

from __future__ import annotations

import asyncio
import re
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, get_args

import pytest
from support.fake_store import FakeStore
from support.faults import unreadable
from support.http import NS, TENANT_HEADER, running, until
from support.toy import BLOCK_TOKENS, IDENTITY, block
from typer.testing import CliRunner

from kvtcd import cli
from kvtcd.admin import compact
from kvtcd.admin.degraded import WORDS
from kvtcd.api import page
from kvtcd.api.app import ROUTES
from kvtcd.core.access import Scope
from kvtcd.core.errors import StoreFailed
from kvtcd.core.messages import Fault
from kvtcd.core.remote.breaker import FAILURES
from kvtcd.tiers.disk.faults import DATA

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.asyncio
OCTETS = {"Content-Type": "application/octet-stream"}


@asynccontextmanager
async def stored(state: Path, *tenants: str):
    """Run a daemon in which some tenants have stored a block, and leave that on disk."""
    async with running(state=state) as daemon:
        for tenant in tenants:
            await daemon.register(**{TENANT_HEADER: tenant})
            path = f"{NS}/blocks/ab?tokens={BLOCK_TOKENS}&first_token=0"
            headers = OCTETS | {TENANT_HEADER: tenant, "Prefer": "durable"}
            async with daemon.request("PUT", path, data=block(1), headers=headers) as answer:
                assert answer.status == 201
        yield {tenant: daemon.toy.service._registry.tenants[tenant].keys.tag.hex() for tenant in tenants}


async def told(daemon, tenant: str = "uid:1") -> tuple[list[str], dict[str, int], dict[str, float]]:
    """Return what is degraded by the probe, the figures and the metrics."""
    async with daemon.request("GET", "/readyz") as answer:
        assert answer.status == 200
        probe = (await answer.json())["degraded"]
    async with daemon.request("GET", "/v1/stats", headers={TENANT_HEADER: tenant}) as answer:
        figures = (await answer.json())["degraded"]
    async with daemon.request("GET", "/metrics") as answer:
        lines = re.findall(r'^kvtcd_degraded\{what="(.*)"\} (.*)$', await answer.text(), re.MULTILINE)
    assert {what for what, _ in lines} == set(get_args(Fault)), "all are there before anything is wrong"
    return probe, figures, {what: float(value) for what, value in lines if float(value)}


async def register(daemon, tenant: str) -> int:
    headers = {TENANT_HEADER: tenant}
    async with daemon.request("PUT", NS, json=IDENTITY.to_json(), headers=headers) as answer:
        return answer.status


async def test_a_daemon_without_faults_names_none() -> None:
    async with running() as daemon:
        assert await told(daemon) == ([], {}, {})


async def test_a_tenant_that_is_left_out_is_named_and_refused_and_the_others_are_served(tmp_path) -> None:
    async with stored(tmp_path / "s", "uid:1", "uid:2") as tags:
        pass
    unreadable(tmp_path / "s" / "tenants" / tags["uid:2"])
    async with running(state=tmp_path / "s") as daemon:
        assert await told(daemon) == (["left-out"], {"left-out": 1}, {"left-out": 1.0})
        assert await register(daemon, "uid:1") == 200
        assert await register(daemon, "uid:2") == 500


def of_tenants():
    """Return the routes about what a tenant has, each with a path that fits."""
    parts = {"{ns}": "demo", "{key}": "ab", "{id}": "0" * 32}
    for route in ROUTES:
        if route.scope == Scope.DATA and route.path not in {
            "/v1", "/v1/stats", "/v1/history", "/v1/openapi.json", "/", "/page/{file}",
        }:  # fmt: skip
            path = route.path
            for name, value in parts.items():
                path = path.replace(name, value)
            yield route.method, path


async def test_who_is_left_out_is_never_told_that_nothing_of_his_is_there(tmp_path) -> None:
    async with stored(tmp_path / "s", "uid:1", "uid:2") as tags:
        pass
    unreadable(tmp_path / "s" / "tenants" / tags["uid:2"])
    asked = [*of_tenants(), ("GET", "/v1/namespaces/kvtcd-doctor")]
    assert ("DELETE", NS) in asked
    async with running(state=tmp_path / "s") as daemon:
        for method, path in asked:
            async with daemon.request(method, path, headers={TENANT_HEADER: "uid:2"}) as answer:
                assert answer.status == 500, (method, path)
                if method != "HEAD":
                    problem = await answer.json()
                    assert problem["type"] == "urn:kvtcd:error:store-failed", (method, path)
                    assert str(tmp_path) not in str(problem)
        async with daemon.request("GET", "/v1/namespaces") as answer:
            assert [each["name"] for each in (await answer.json())["namespaces"]] == ["demo"]
        async with daemon.request("GET", "/v1/stats", headers={TENANT_HEADER: "uid:2"}) as answer:
            assert answer.status == 200, "it says what is degraded"


async def test_a_purge_by_command_says_that_the_tenant_is_left_out(tmp_path) -> None:
    async with stored(tmp_path / "s", "uid:1") as tags:
        pass
    unreadable(tmp_path / "s" / "tenants" / tags["uid:1"])
    async with running(state=tmp_path / "s") as daemon:
        purge = ["purge", "demo", str(daemon.socket), "--yes"]
        asked = await asyncio.to_thread(CliRunner().invoke, cli.app, purge)
    assert isinstance(asked.exception, StoreFailed)


async def test_a_client_is_told_no_file_of_this_host(tmp_path) -> None:
    """New tenants, whose environments cannot be made: the log has the words of the system."""
    async with stored(tmp_path / "s", "uid:1"):
        pass
    async with running(state=tmp_path / "s") as daemon:
        tenants = tmp_path / "s" / "tenants"
        shutil.move(tenants, tmp_path / "away")
        tenants.write_text("in its place")
        headers = {TENANT_HEADER: "uid:2"}
        async with daemon.request("PUT", NS, json=IDENTITY.to_json(), headers=headers) as answer:
            told = await answer.text()
            assert (answer.status, str(tmp_path) in told) == (500, False), told
        tenants.unlink()
        shutil.move(tmp_path / "away", tenants)


async def test_what_was_set_aside_is_named_until_its_tenant_purges(tmp_path) -> None:
    async with stored(tmp_path / "s", "uid:1", "uid:2") as tags:
        pass
    (data,) = (tmp_path / "s" / "tenants" / tags["uid:2"]).glob(f"*/{DATA}")
    data.write_bytes(b"not a data file")
    async with running(state=tmp_path / "s") as daemon:
        assert await told(daemon) == (["set-aside"], {"set-aside": 1}, {"set-aside": 1.0})
        assert await register(daemon, "uid:2") == 200
        assert (await told(daemon))[0] == ["set-aside"], "what lay there is cold"
        async with daemon.request("DELETE", NS, headers={TENANT_HEADER: "uid:2"}) as answer:
            assert answer.status == 200
        assert await told(daemon) == ([], {}, {})
        assert not [*data.parents[1].glob("*.bad-*")]
    async with running(state=tmp_path / "s") as daemon:
        assert await told(daemon) == ([], {}, {})


async def test_what_was_set_aside_is_named_after_every_start_until_it_is_seen_to(tmp_path) -> None:
    async with stored(tmp_path / "s", "uid:1", "uid:2") as tags:
        pass
    environment = tmp_path / "s" / "tenants" / tags["uid:2"]
    (data,) = environment.glob(f"*/{DATA}")
    data.write_bytes(b"not a data file")
    for _ in range(2):
        async with running(state=tmp_path / "s") as daemon:
            assert await told(daemon) == (["set-aside"], {"set-aside": 1}, {"set-aside": 1.0})
    assert not await asyncio.to_thread(compact.command, tmp_path / "s"), "it is named there, too, and stays"
    async with running(state=tmp_path / "s") as daemon:
        assert (await told(daemon))[0] == ["set-aside"]
    (kept,) = environment.glob("*.bad-*")
    kept.rename(tmp_path / "moved")
    async with running(state=tmp_path / "s") as daemon:
        assert await told(daemon) == ([], {}, {})


async def test_a_tenant_purges_what_was_set_aside_under_any_name_and_not_one_byte_is_left(tmp_path) -> None:
    """Nobody can tell which namespaces were in it, and he asks for one to be gone."""
    async with stored(tmp_path / "s", "uid:1", "uid:2") as tags:
        pass
    environment = tmp_path / "s" / "tenants" / tags["uid:2"]
    (data,) = environment.glob(f"*/{DATA}")
    data.write_bytes(b"MARKER" + data.read_bytes()[6:8192])
    async with running(state=tmp_path / "s") as daemon:
        async with daemon.request("DELETE", NS, headers={TENANT_HEADER: "uid:1"}) as answer:
            assert await answer.json() == {"removed": 1, "set_aside": False}
        assert (await told(daemon))[0] == ["set-aside"], "it is another's"
        async with daemon.request("DELETE", NS, headers={TENANT_HEADER: "uid:3"}) as answer:
            assert answer.status == 404
        async with daemon.request("DELETE", NS, headers={TENANT_HEADER: "uid:2"}) as answer:
            assert (answer.status, await answer.json()) == (200, {"removed": 0, "set_aside": True})
        assert not any(b"MARKER" in each.read_bytes() for each in environment.rglob("*") if each.is_file())
        assert await told(daemon) == ([], {}, {})
        async with daemon.request("DELETE", NS, headers={TENANT_HEADER: "uid:2"}) as answer:
            assert answer.status == 404
        assert await register(daemon, "uid:2") == 200, "and he is served as before"
    async with running(state=tmp_path / "s") as daemon:
        assert await told(daemon) == ([], {}, {})


async def test_an_environment_that_fails_while_it_is_used_is_named(tmp_path) -> None:
    async with running(state=tmp_path / "s") as daemon:
        await daemon.register()
        daemon.toy.service._registry.tenants["uid:1"].writer.environment.failed = True
        assert (await told(daemon))[0] == ["out-of-use"]


async def test_a_shared_store_that_is_away_is_named_until_it_is_back(tmp_path) -> None:
    store = FakeStore(down=True)
    async with running(state=tmp_path / "s", remote=store) as daemon:
        await daemon.register()
        body = {"keys": ["ab"]}

        async def asked() -> None:
            async with daemon.request("POST", f"{NS}/match", json=body) as answer:
                assert answer.status == 200

        for _ in range(FAILURES):
            await asked()
        await until(lambda: daemon.toy.service.overview.degraded)
        assert await told(daemon) == (["remote-away"], {"remote-away": 1}, {"remote-away": 1.0})
        async with daemon.request("GET", "/metrics") as answer:
            assert 'kvtcd_remote_breaker{state="closed"} 0.0' in await answer.text()


async def test_each_fault_has_words_and_a_paragraph() -> None:
    assert set(WORDS) == set(get_args(Fault))
    view = page.FILES["/page/view.js"].body.decode()
    assert all(f'"{fault}"' in view for fault in get_args(Fault))
