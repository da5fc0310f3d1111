"""The application as a whole: its routes, its socket, its start and end, and what errors show."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from pathlib import Path
from unittest.mock import patch

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from support.http import NS, closed, running, unhurried, until
from support.patience import PATIENCE_S
from support.toy import BLOCK_TOKENS, block

from kvtcd import __version__
from kvtcd.api.listeners import bind
from kvtcd.api.state import IN_FLIGHT, TRAFFIC
from kvtcd.core.errors import AlreadyRunning, ConfigError, StoreFailed, UnknownProfile
from kvtcd.core.messages import Info

pytestmark = pytest.mark.asyncio

DOCUMENT = Path(__file__).parents[1] / "data" / "openapi.json"


def documented() -> set[tuple[str, str]]:
    """Return the routes that the document of the API had when it was last looked at."""
    paths = json.loads(DOCUMENT.read_text())["paths"]
    return {(method.upper(), path) for path, routes in paths.items() for method in routes}


async def test_these_are_all_the_routes_and_nobody_gets_past_any_without_a_tenant():
    def nobody(_request: web.Request) -> str:
        raise web.HTTPUnauthorized

    async with running(authenticate=nobody) as daemon:
        routes = {(route.method, route.resource.canonical) for route in daemon.app.router.routes()}
        assert routes == documented()
        for route in daemon.app.router.routes():
            path = route.resource.canonical.format(
                tenant="t", ns="demo", key="ab", id="0" * 32, file="none.js"
            )
            async with daemon.request(route.method, path) as answer:
                assert answer.status == (200 if path == "/" else 401), "the page says nothing"


async def test_info_probes_stats_and_metrics():
    async with running() as daemon:
        await daemon.register()
        service = daemon.toy.service
        async with daemon.request("GET", "/v1") as answer:
            assert Info.from_json(await answer.json()) == Info(__version__, 1, service.boot_id)
        async with daemon.request("GET", "/v1/stats") as answer:
            stats = await answer.json()
            assert (stats["boot_id"], stats["blocks"], stats["namespaces"]) == (service.boot_id, 0, 1)
        async with daemon.request("GET", "/metrics") as answer:
            assert answer.content_type == "text/plain"
            names = {family.name for family in text_string_to_metric_families(await answer.text())}
            assert "kvtcd_used_bytes" in names
        for status in (200, 503):
            if status == 503:
                service.drain()
            async with daemon.request("GET", "/readyz") as answer:
                assert answer.status == status
                if status == 200:
                    assert await answer.json() == {"status": "ready", "disk": "ok", "degraded": []}
            async with daemon.request("GET", "/healthz") as answer:
                assert answer.status == 200


async def test_a_full_disk_is_ready_and_said_to_be_full(monkeypatch):
    async with running() as daemon:
        monkeypatch.setattr("kvtcd.core.shelf.Shelf.withheld", 5 << 20)
        async with daemon.request("GET", "/readyz") as answer:
            assert (answer.status, await answer.json()) == (
                200,
                {"status": "ready", "disk": "full", "degraded": []},
            )
        async with daemon.request("GET", "/metrics") as answer:
            told = text_string_to_metric_families(await answer.text())
            assert [f.samples[0].value for f in told if f.name == "kvtcd_disk_withheld_bytes"] == [5 << 20]


async def test_unknown_paths_and_verbs_are_problems_too():
    async with running() as daemon:
        async with daemon.request("GET", "/v2") as answer:
            assert (answer.status, answer.content_type) == (404, "application/problem+json")
        async with daemon.request("PATCH", NS) as answer:
            assert answer.status == 405
            assert answer.headers["Allow"] == "DELETE,GET,PUT"
            assert (await answer.json())["type"] == "about:blank"


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (ZeroDivisionError("secret"), 500, False),
        (UnknownProfile(b"\1" * 32), 500, False),
        (StoreFailed("commit", "EIO"), 500, True),
    ],
)
async def test_unexpected_errors_are_logged_and_show_nothing(error, status, shown, caplog):
    async with running() as daemon:
        await daemon.register()
        with patch.object(type(daemon.toy.service.prefixes), "match", side_effect=error):
            async with daemon.request("POST", f"{NS}/match", json={"keys": ["abcdef12"]}) as answer:
                assert answer.status == status
                assert (str(error) in await answer.text()) == shown
        if not shown:
            assert str(error) in caplog.text
        assert "abcdef12" not in caplog.text
        async with daemon.request("POST", f"{NS}/match", json={"keys": ["ab"]}) as answer:
            assert answer.status == 200


async def test_the_socket_is_for_owner_and_group_and_goes_with_the_daemon():
    before = os.umask(0)
    try:
        async with running() as daemon:
            assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
            assert os.umask(0) == 0, "the process's umask is back"
            await daemon.runner.cleanup()
            assert not daemon.socket.exists()
    finally:
        os.umask(before)


async def test_the_socket_of_a_successor_is_left_alone():
    async with running() as daemon:
        daemon.socket.unlink()
        successor = await asyncio.to_thread(bind, daemon.socket)
        await daemon.runner.cleanup()
        assert daemon.socket.exists()
        successor.socket.close()


async def test_a_second_daemon_on_a_live_socket_is_refused_and_harms_nothing():
    async with running() as daemon:
        with pytest.raises(AlreadyRunning, match=f"{daemon.socket}; stop it, or choose another socket"):
            await asyncio.to_thread(bind, daemon.socket)
        async with daemon.request("GET", "/healthz") as answer:
            assert answer.status == 200


async def test_answers_say_no_version_of_what_gives_them_and_metrics_no_times_of_creation():
    async with running() as daemon:
        for path in ("/v1", "/nothing", "/v1/events", "/metrics"):
            async with daemon.request("GET", path) as answer:
                assert answer.headers.getall("Server") == ["kvtcd"], path
                if path == "/metrics":
                    assert "_created" not in await answer.text()


def short_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path()  # relative: a socket's path has at most 107 bytes


async def test_a_socket_left_behind_is_replaced(tmp_path, monkeypatch):
    path = short_folder(tmp_path, monkeypatch) / "s"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    listener = await asyncio.to_thread(bind, path)
    listener.socket.close()
    assert path.stat().st_ino == listener.inode


async def test_something_else_in_the_place_of_the_socket_is_left_alone(tmp_path, monkeypatch):
    path = short_folder(tmp_path, monkeypatch) / "s"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        await asyncio.to_thread(bind, path)
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot be bound"):
        await asyncio.to_thread(bind, path.parent / "missing" / "s")


async def test_requests_under_way_end_before_the_daemon_does():
    async with running() as daemon:
        await daemon.register()
        reader, writer = await asyncio.open_unix_connection(daemon.socket)
        writer.write(
            f"PUT {NS}/blocks/ab?tokens={BLOCK_TOKENS} HTTP/1.1\r\nHost: kvtcd\r\nContent-Length: "
            f"{len(block(1))}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
            + block(1)[:100]
        )
        await until(lambda: daemon.app[IN_FLIGHT].held)
        stopping = asyncio.create_task(daemon.runner.cleanup())
        await until(lambda: daemon.app[TRAFFIC].closing)
        await asyncio.sleep(0.1)
        assert not stopping.done()
        writer.write(block(1)[100:])
        assert (await reader.read()).startswith(b"HTTP/1.1 201 ")
        await stopping
        await closed(writer)
        assert daemon.blocks() == 1


async def test_a_request_that_outlasts_the_drain_is_cut_and_its_room_given_back():
    async with running(unhurried(shutdown_s=0.2)) as daemon:
        await daemon.register()
        reader, writer = await asyncio.open_unix_connection(daemon.socket)
        writer.write(
            f"PUT {NS}/blocks/ab?tokens={BLOCK_TOKENS} HTTP/1.1\r\nHost: kvtcd\r\nContent-Length: "
            f"{len(block(1))}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
        )
        await until(lambda: daemon.toy.catalog.residents.entries)
        async with asyncio.timeout(PATIENCE_S):
            await daemon.runner.cleanup()
        assert await reader.read() == b""
        await closed(writer)
        await daemon.settled()
        assert not daemon.toy.catalog.residents.entries


async def test_while_the_daemon_ends_each_answer_ends_its_connection():
    async with running() as daemon:
        daemon.app[TRAFFIC].closing = True
        answer = await daemon.raw(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"Connection: close\r\n" in answer
        answer = await daemon.raw(b"GET /v1/stats HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 5\r\n" in answer
        assert b"Connection: close\r\n" in answer
        assert b"urn:kvtcd:error:stopping" in answer
