"""`kvtcd purge` on a running daemon."""

from __future__ import annotations

import asyncio

import pytest
from support.http import running
from typer.testing import CliRunner

from kvtcd import cli
from kvtcd.core.errors import BadRequest


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
