"""`kvtcd purge` on a running daemon."""

from __future__ import annotations

import asyncio

import pytest
from support.faults import unreadable
from support.http import NS, TENANT_HEADER, running
from support.toy import BLOCK_TOKENS, block
from typer.testing import CliRunner

from kvtcd import cli
from kvtcd.core.access import Caller, Scope
from kvtcd.core.errors import BadRequest, ServerError, StoreFailed, Unavailable


@pytest.mark.asyncio
async def test_a_namespace_that_is_not_there_is_answered_with_those_that_are() -> None:
    async with running() as daemon:
        purge = ["purge", "nosuch", str(daemon.socket), "--yes"]
        none = await asyncio.to_thread(CliRunner().invoke, cli.app, purge)
        await daemon.register()
        other = await asyncio.to_thread(CliRunner().invoke, cli.app, purge)
        gone = await asyncio.to_thread(CliRunner().invoke, cli.app, ["purge", "demo", *purge[2:]])

    assert isinstance(none.exception, BadRequest)
    assert str(none.exception).endswith("; there is none at all")
    assert f"'nosuch' is none of yours on {daemon.socket}; there are demo" in str(other.exception)
    assert gone.exit_code == 0


def as_operator(request):
    """Who says no name is the operator; whoever else has no right to what is of others."""
    tenant = request.headers.get(TENANT_HEADER)
    return Caller(tenant or "uid:0", frozenset(Scope) - ({Scope.ADMIN} if tenant else set()))


async def purge(daemon, *words: str):
    arguments = ["purge", "demo", str(daemon.socket), "--yes", *words]
    return await asyncio.to_thread(CliRunner().invoke, cli.app, arguments)


@pytest.mark.asyncio
async def test_an_operator_purges_what_another_tenant_has_and_nothing_else_goes() -> None:
    async with running(authenticate=as_operator) as daemon:
        for tenant in ("uid:7", "team-a"):
            await daemon.register(**{TENANT_HEADER: tenant})
            path = f"{NS}/blocks/ab?tokens={BLOCK_TOKENS}&first_token=0"
            headers = {TENANT_HEADER: tenant, "Content-Type": "application/octet-stream"}
            async with daemon.request("PUT", path, data=block(1), headers=headers) as answer:
                assert answer.status == 201
        mine = await purge(daemon)
        nobody = await purge(daemon, "--tenant", "team-b")
        gone = await purge(daemon, "--tenant", "uid:7")
        left = {name: [*tenant.namespaces] for name, tenant in daemon.toy.service._registry.tenants.items()}

    assert "none of yours" in str(mine.exception)
    assert "none of tenant team-b" in str(nobody.exception)
    assert (gone.exit_code, "1 blocks of demo are gone" in gone.output) == (0, True), gone.output
    assert left == {"uid:7": [], "team-a": ["demo"]}


@pytest.mark.asyncio
async def test_without_the_scope_nothing_of_others_is_purged() -> None:
    async with running() as daemon:
        await daemon.register(**{TENANT_HEADER: "uid:7"})
        refused = await purge(daemon, "--tenant", "uid:7")
        async with daemon.request("DELETE", "/v1/tenants/uid:7/namespaces/demo") as answer:
            assert answer.status == 403
        assert [*daemon.toy.service._registry.tenants["uid:7"].namespaces] == ["demo"]
    assert isinstance(refused.exception, ServerError)


@pytest.mark.asyncio
async def test_an_operator_is_told_that_a_tenant_is_left_out(tmp_path) -> None:
    async with running(state=tmp_path / "s", authenticate=as_operator) as daemon:
        await daemon.register(**{TENANT_HEADER: "uid:7"})
        tag = daemon.toy.service._registry.tenants["uid:7"].keys.tag.hex()
    unreadable(tmp_path / "s" / "tenants" / tag)
    async with running(state=tmp_path / "s", authenticate=as_operator) as daemon:
        refused = await purge(daemon, "--tenant", "uid:7")
    assert isinstance(refused.exception, StoreFailed)


@pytest.mark.asyncio
async def test_an_operator_purges_what_was_set_aside_of_a_tenant(tmp_path) -> None:
    async with running(state=tmp_path / "s", authenticate=as_operator) as daemon:
        await daemon.register(**{TENANT_HEADER: "uid:7"})
        tag = daemon.toy.service._registry.tenants["uid:7"].keys.tag.hex()
    environment = tmp_path / "s" / "tenants" / tag
    next(environment.glob("*/data.mdb")).write_bytes(b"not a data file")
    async with running(state=tmp_path / "s", authenticate=as_operator) as daemon:
        nobody = await purge(daemon, "--tenant", "uid:8")
        assert [*environment.glob("*.bad-*")]
        gone = await purge(daemon, "--tenant", "uid:7")
        assert not [*environment.glob("*.bad-*")]
        again = await purge(daemon, "--tenant", "uid:7")

    assert "'demo' is none of tenant uid:8" in str(nobody.exception)
    said = " ".join(gone.output.split())
    assert gone.exit_code == 0
    assert "what of tenant uid:7 had been set aside as damaged is gone as well" in said
    assert "'demo' is none of tenant uid:7" in str(again.exception)


@pytest.mark.asyncio
async def test_a_purge_whose_daemon_ends_under_it_is_said_to_be_of_unknown_outcome(monkeypatch) -> None:
    async with running(authenticate=as_operator) as daemon:
        await daemon.register(**{TENANT_HEADER: "uid:7"})

        async def killed(*_) -> None:
            for connection in daemon.runner.server.connections:
                connection.transport.abort()
            await asyncio.Event().wait()

        monkeypatch.setattr(daemon.toy.service, "purge", killed)
        cut = await purge(daemon, "--tenant", "uid:7")

    assert isinstance(cut.exception, Unavailable)
    assert "whether demo is gone is not known: run this again once the daemon is there" in str(cut.exception)
