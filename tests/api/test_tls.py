"""TLS: which certificates are taken, what clients see of them, and that they are replaced while it serves."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from api.test_auth import KEY, SECRETS, TOKENS, by
from support.authority import Authority
from support.http import closed, running
from support.patience import PATIENCE_S
from support.toy import BLOCK_TOKENS, IDENTITY, block

from kvtcd.api import app
from kvtcd.api.auth import authenticate
from kvtcd.api.listeners import adopt, bind_tcp
from kvtcd.api.tls import Tls
from kvtcd.client import AsyncClient, BlockHead, Client
from kvtcd.core.errors import BadRequest, ConfigError, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAMES = ("127.0.0.1", "localhost", "cache.example", "*.hosts.example")


@pytest.fixture
def authority(tmp_path) -> Authority:
    made = Authority(tmp_path)
    assert made.root.exists()
    return made


@asynccontextmanager
async def by_tls(authority: Authority, *names: str) -> AsyncIterator[tuple[Tls, int]]:
    """Run a daemon that listens on TCP with TLS too, and yield what it has of that, and its port."""
    tls = await asyncio.to_thread(lambda: Tls(*authority.issue(*names)))
    async with running(authenticate=authenticate(TOKENS), tls=tls) as daemon:
        listener = await asyncio.to_thread(bind_tcp, "127.0.0.1", 0)
        await app.Site(daemon.runner, listener.socket, ssl_context=tls.context).start()
        yield tls, listener.socket.getsockname()[1]


async def ask(port: int, context: ssl.SSLContext, host: str, *headers: str) -> tuple[int, str]:
    """Send a request by TLS under a name; return the status, and the version that was agreed on."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="cache.example"
    )
    version = writer.get_extra_info("ssl_object").version()
    lines = ["GET /v1 HTTP/1.1", f"Host: {host}", "Connection: close", by("one"), *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    await closed(writer)
    return int(answer.split()[1]), version


def trusting(authority: Authority, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.root)
    if version:
        context.minimum_version = context.maximum_version = version
    return context


@pytest.mark.asyncio
async def test_both_clients_move_blocks_by_tls_and_check_whom_they_talk_to(authority) -> None:
    async with by_tls(authority, *NAMES) as (_, port):
        address, head = f"https://localhost:{port}", BlockHead(KEY, tokens=BLOCK_TOKENS, first_token=0)
        async with AsyncClient(address, token=SECRETS["one"], ca=authority.root) as client:
            await client.register("n", IDENTITY)
            assert (await client.put("n", head, block(1))).outcome == "stored"
            assert client.address.tls.verify_mode is ssl.CERT_REQUIRED
        with Client(address, token=SECRETS["one"], ca=authority.root) as client:
            for _ in range(2):  # the second on the kept connection
                assert bytes(await asyncio.to_thread(client.get, "n", KEY)) == block(1)
            region = await asyncio.to_thread(client.region, 1 << 20)
            assert region.path == "http", "memory is shared on a host alone"
            region.close()


@pytest.mark.asyncio
async def test_a_certificate_of_another_authority_or_for_another_name_is_not_trusted(
    authority, tmp_path, monkeypatch
) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other").root
    async with by_tls(authority, "localhost") as (_, port):
        for address, ca, why in (
            (f"https://127.0.0.1:{port}", authority.root, "IP address mismatch"),
            (f"https://localhost:{port}", other, "self-signed|unable to get|signature"),
            (f"https://localhost:{port}", None, "self-signed|unable to get"),
        ):
            async with AsyncClient(address, token=SECRETS["one"], ca=ca) as client:
                with pytest.raises(Unavailable, match=f"cannot be trusted .*({why})"):
                    await client.info()
            with (
                Client(address, token=SECRETS["one"], ca=ca) as client,
                pytest.raises(Unavailable, match=f"cannot be trusted .*({why})"),
            ):
                await asyncio.to_thread(client.info)
        monkeypatch.setenv("KVTCD_CA", str(authority.root))
        with Client(f"https://127.0.0.1:{port}") as client, pytest.raises(Unavailable, match="mismatch"):
            await asyncio.to_thread(client.info)


@pytest.mark.asyncio
async def test_versions_before_1_2_are_refused_and_1_3_is_preferred(authority) -> None:
    async with by_tls(authority, *NAMES) as (_, port):
        host = f"cache.example:{port}"
        assert await ask(port, trusting(authority), host) == (200, "TLSv1.3")
        assert await ask(port, trusting(authority, ssl.TLSVersion.TLSv1_2), host) == (200, "TLSv1.2")
        old = ssl.create_default_context(cafile=authority.root)
        with pytest.warns(DeprecationWarning, match="TLSv1 is deprecated"):
            old.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await ask(port, old, host)


@pytest.mark.asyncio
async def test_only_names_of_the_certificate_and_of_this_host_are_answered(authority) -> None:
    async with by_tls(authority, *NAMES) as (_, port):
        context = trusting(authority)
        for host, status in {
            f"cache.example:{port}": 200,
            f"CACHE.example:{port}": 200,
            f"one.hosts.example:{port}": 200,
            f"127.0.0.1:{port}": 200,
            f"localhost:{port}": 200,
            f"a.b.hosts.example:{port}": 421,
            f"hosts.example:{port}": 421,
            f"evil.example:{port}": 421,
            "cache.example": 421,
            f"cache.example:{port + 1}": 421,
        }.items():
            assert (await ask(port, context, host))[0] == status, host
        page = ("Sec-Fetch-Site: same-origin", f"Origin: https://cache.example:{port}")
        assert (await ask(port, context, f"cache.example:{port}", *page))[0] == 200
        plain = ("Sec-Fetch-Site: same-origin", f"Origin: http://cache.example:{port}")
        assert (await ask(port, context, f"cache.example:{port}", *plain))[0] == 403


@pytest.mark.asyncio
async def test_who_does_not_encrypt_gets_no_answer(authority) -> None:
    async with by_tls(authority, *NAMES) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /v1 HTTP/1.1\r\nHost: localhost:{port}\r\n{by('one')}\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            try:
                answer = await reader.read()
            except ConnectionResetError:
                answer = b""
        await closed(writer)
        assert b"HTTP" not in answer
        with Client(f"http://127.0.0.1:{port}", token=SECRETS["one"]) as client, pytest.raises(Unavailable):
            await asyncio.to_thread(client.info)


@pytest.mark.asyncio
async def test_a_renewed_certificate_holds_for_new_connections_and_old_ones_go_on(authority) -> None:
    async with by_tls(authority, "localhost") as (tls, port):
        old = AsyncClient(f"https://localhost:{port}", token=SECRETS["one"], ca=authority.root)
        new = AsyncClient(f"https://127.0.0.1:{port}", token=SECRETS["one"], ca=authority.root)
        await old.info()
        with pytest.raises(Unavailable, match="mismatch"):
            await new.info()
        await asyncio.to_thread(authority.issue, "127.0.0.1")
        await asyncio.to_thread(lambda: tls.take(tls.read()))
        await new.info()
        await old.info()
        await old.close()
        with pytest.raises(Unavailable, match="mismatch"):
            await old.info()
        await old.close()
        await new.close()


@pytest.mark.asyncio
async def test_metrics_tell_when_the_certificate_ends(authority) -> None:
    async with by_tls(authority, "localhost") as (tls, port):
        await asyncio.to_thread(authority.issue, "localhost", days=20)
        await asyncio.to_thread(lambda: tls.take(tls.read()))
        async with AsyncClient(
            f"https://localhost:{port}", token=SECRETS["watcher"], ca=authority.root
        ) as client:
            (line,) = [
                line
                for line in await metrics_of(client)
                if line.startswith("kvtcd_certificate_ends_seconds ")
            ]
    assert abs(float(line.split()[1]) - time.time() - 20 * 86400) < 3600


async def metrics_of(client: AsyncClient) -> list[str]:
    url = f"{client.address}/metrics"
    async with client._connected().get(url, headers=client.address.headers()) as answer:
        return (await answer.text()).splitlines()


def test_a_wrong_certificate_changes_nothing(authority) -> None:
    certificate, key = authority.issue("localhost")
    tls = Tls(certificate, key)
    _, other = authority.issue("localhost", stem="other")
    key.write_bytes(other.read_bytes())
    with pytest.raises(ConfigError, match="is not the certificate of the key"):
        tls.read()
    assert tls.speaks_for("localhost:7337", 7337)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda certificate, _: certificate.unlink(), r"server\.pem: cannot be read: No such file"),
        (lambda _, key: key.unlink(), r"server\.key: cannot be read: No such file"),
        (lambda _, key: key.chmod(0o644), r"server\.key: everybody may read it \(mode 0644\)"),
        (lambda certificate, _: certificate.write_text("none"), "is no PEM"),
        (lambda _, key: key.write_text("none"), "is no PEM"),
    ],
)
def test_what_cannot_be_used_is_named(authority, damage, why) -> None:
    files = authority.issue("localhost")
    damage(*files)
    with pytest.raises(ConfigError, match=why):
        Tls(*files)


def test_a_certificate_without_names_is_refused_and_one_that_ends_is_warned_of(authority, caplog) -> None:
    with pytest.raises(ConfigError, match="names no host"):
        Tls(*authority.issue())
    Tls(*authority.issue("localhost", days=30))
    assert not caplog.records
    Tls(*authority.issue("localhost", days=9.5))
    Tls(*authority.issue("localhost", days=-1))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "ends within 10 days" in caplog.text
    assert "has ended" in caplog.text


def test_port_443_needs_no_number_and_addresses_of_version_6_have_brackets(authority) -> None:
    tls = Tls(*authority.issue("cache.example", "2001:db8::1"))
    assert tls.speaks_for("cache.example", 443)
    assert tls.speaks_for("[2001:db8::1]:7337", 7337)
    assert not tls.speaks_for("cache.example", 7337)


def test_a_socket_for_other_hosts_is_taken_over_only_with_tls() -> None:
    with socket.create_server(("0.0.0.0", 0)) as found:  # noqa: S104 - what is tested; nothing accepts
        with pytest.raises(ConfigError, match=r"name tcp\.certificate"):
            adopt("tcp", found)
        assert adopt("tcp", found, encrypted=True).socket is found


def test_a_client_says_which_authority_it_cannot_use(tmp_path) -> None:
    (tmp_path / "empty.pem").write_text("")
    for file, why in (("empty.pem", "no certificate in PEM"), ("none.pem", "No such file")):
        with pytest.raises(BadRequest, match=why):
            Client("https://localhost:7337", ca=tmp_path / file)
