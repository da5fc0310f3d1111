"""The daemon under a service manager: what it says and when, what it is handed over, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.authority import Authority
from support.patience import PATIENCE_S
from support.ports import free_port
from support.supervised import Supervised, eventually, listening, supervised
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY

from kvtcd import serve
from kvtcd.client import BlockHead, Client
from kvtcd.config.daemon import Tcp
from kvtcd.core.access import digest, new_token
from kvtcd.core.errors import KvtcdError, ServerError, Stopping, Unavailable
from kvtcd.core.keys import EngineKey
from kvtcd.core.regions import side_socket
from kvtcd.engine.pulse import Pulse
from kvtcd.lab.daemon import Daemon

pytestmark = pytest.mark.slow


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(
        tmp_path,
        host=64 * BLOCK_BYTES + (1 << 20),
        disk=256 << 20,
        profiles=tmp_path / "p",
        stop_seconds=PATIENCE_S,
    )


def key(number: int) -> EngineKey:
    return EngineKey(number.to_bytes(32, "big"))


def body(number: int) -> bytes:
    return np.random.default_rng(number).integers(0, 255, BLOCK_BYTES, dtype=np.uint8).tobytes()


def put(client: Client, number: int, *, durable: bool) -> str:
    head = BlockHead(key(number), tokens=BLOCK_TOKENS, first_token=0)
    return client.put("n", head, body(number), durable=durable).outcome


def here(client: Client, numbers: list[int]) -> list[int]:
    return [n for n in numbers if client.match("n", [key(n)]).blocks[0].tier is not None]


SLOW_START = """
import asyncio, os
from kvtcd.engine.tenancy import Tenancy
recover = Tenancy.recover
async def slowly(self, tags):
    found = await recover(self, tags)
    while not os.path.exists(os.environ["KNOWN"]):
        await asyncio.sleep(0.02)
    return found
Tenancy.recover = slowly
from kvtcd import serve
serve.START_S = 0.3
"""


def test_ready_is_said_once_all_that_is_on_disk_is_known_and_more_time_is_asked_for_meanwhile(
    daemon, tmp_path
) -> None:
    with supervised(daemon) as first:
        first.until("READY=1")
        with first.client() as client:
            client.register("n", IDENTITY)
            assert [put(client, n, durable=True) for n in range(12)] == ["stored"] * 12
        first.signal(signal.SIGKILL)
        first.ended()
    with supervised(daemon, prelude=SLOW_START, KNOWN=str(tmp_path / "known")) as second:
        second.listen_until(lambda: len(second.heard) >= 3)
        assert not daemon.socket.exists() or not connectable(daemon.socket), "a client would find nothing yet"
        (tmp_path / "known").touch()
        ready = second.until("READY=1")
        with second.client() as client:
            assert here(client, list(range(12))) == list(range(12))
        before = second.heard[: second.heard.index(ready)]
        assert second.stop() == 0
        last = second.listen(0.2)[0]
    assert len(before) >= 3
    assert all(re.fullmatch(r"EXTEND_TIMEOUT_USEC=\d+", lines[0]) for lines in before[:3])
    assert before[0][1] == "STATUS=Taking in what is on disk"
    assert ready[1] == f"STATUS=Serving on {daemon.socket}"
    assert last[0] == "STOPPING=1"
    assert last[1] == f"EXTEND_TIMEOUT_USEC={PATIENCE_S + 15:.0f}000000", "stop_seconds, and a margin"


def connectable(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def test_a_hangup_is_answered_by_reloading_and_ready_whether_the_files_are_right_or_not(tmp_path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[codec]\nname = "lossless"\n')
    daemon = Daemon(tmp_path, host=1 << 20, disk=0, profiles=tmp_path / "p", policy=policy)
    with supervised(daemon) as running:
        running.until("READY=1")
        for text, status in [
            ("nonsense", f"Nothing was reloaded: {policy}: is not TOML"),
            ('[codec]\nname = "lossless"\n', "Configuration read anew"),
        ]:
            policy.write_text(text)
            before = time.monotonic_ns() // 1000
            running.signal(signal.SIGHUP)
            reloading = running.until("RELOADING=1")
            microseconds = int(reloading[1].removeprefix("MONOTONIC_USEC="))
            assert before <= microseconds <= time.monotonic_ns() // 1000
            ready = running.until("READY=1")
            assert ready[1].startswith("STATUS=" + status)
        assert running.stop() == 0


def test_a_hangup_says_what_holds_from_now_on_of_tokens_and_certificate(tmp_path) -> None:
    certificate, private = Authority(tmp_path).issue("localhost")
    tokens = tmp_path / "tokens.toml"
    entry = '[[token]]\nsha256 = "{}"\ntenant = "t"\n'
    tokens.write_text(entry.format("a" * 64))
    tcp = Tcp(
        listen=f"127.0.0.1:{free_port()}", tokens=tokens, certificate=str(certificate), key=str(private)
    )
    daemon = Daemon(tmp_path, host=1 << 20, disk=0, profiles=tmp_path / "p", tcp=tcp)
    daemon.config.write_text(daemon.config.read_text().replace('log_format = "text"', 'log_format = "json"'))
    with supervised(daemon) as running:
        running.until("READY=1")
        tokens.write_text(entry.format("a" * 64) + entry.format("b" * 64))
        said = daemon.config.read_text()
        daemon.config.write_text(said.replace('capacity = "1 MiB"', 'capacity = "2 MiB"'))
        running.signal(signal.SIGHUP)
        running.until("RELOADING=1")
        running.until("READY=1")
        daemon.config.write_text("nonsense")
        running.signal(signal.SIGHUP)
        running.until("RELOADING=1")
        running.until("READY=1")
        assert running.stop() == 0
    log = running.log.read_text()
    lines = [json.loads(line) for line in log.splitlines() if line]
    (changed,) = [line for line in lines if "has changed" in line["message"]]
    assert changed["message"] == f"{daemon.config} has changed, and needs a restart for: host.capacity"
    (wrong,) = [line for line in lines if "the next start would fail" in line["message"]]
    assert f"{daemon.config}: is not TOML" in wrong["message"]
    ready = next(line for line in lines if line["message"].startswith("ready on"))
    assert f"{tcp.listen} with" in ready["message"]
    assert "tokens in effect: 2" in log
    assert "the certificate in effect ends on 20" in log
    assert "policies in effect: balanced" in log


def test_a_hangup_ends_the_stream_of_a_token_that_is_gone(tmp_path) -> None:
    secret, tokens, port = new_token(), tmp_path / "tokens.toml", free_port()
    entry = '[[token]]\nsha256 = "{}"\ntenant = "t"\n'
    tokens.write_text(entry.format(digest(secret.encode()).hex()))
    tcp = Tcp(listen=f"127.0.0.1:{port}", tokens=tokens)
    daemon = Daemon(tmp_path, host=1 << 20, disk=0, profiles=tmp_path / "p", tcp=tcp)
    with supervised(daemon) as running:
        running.until("READY=1")
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stream:
            asked = (
                f"GET /v1/events HTTP/1.1\r\nHost: localhost:{port}\r\nAuthorization: Bearer {secret}\r\n\r\n"
            )
            stream.sendall(asked.encode())
            assert stream.recv(1 << 16).startswith(b"HTTP/1.1 200")
            tokens.write_text(entry.format("b" * 64))
            running.signal(signal.SIGHUP)
            with suppress(ConnectionError):
                while stream.recv(1 << 16):
                    pass
        assert running.stop() == 0
    assert "requests ended whose token holds no more, or less: 1" in running.log.read_text()


def test_a_stop_under_traffic_on_a_socket_handed_over_loses_nothing_and_leaves_the_socket(daemon) -> None:
    acknowledged: list[int] = []
    turned_away: list[KvtcdError] = []
    stop = threading.Event()

    def traffic(first: int) -> None:
        number = first
        while not stop.is_set():
            try:
                with Client(daemon.socket) as client:
                    while not stop.is_set():
                        number += 1
                        if put(client, number, durable=True) == "stored":
                            acknowledged.append(number)
            except KvtcdError as error:
                turned_away.append(error)
                time.sleep(0.01)

    with listening(daemon.socket) as kept:
        inode = daemon.socket.stat().st_ino
        with supervised(daemon, sockets=[("data", kept)]) as first:
            first.until("READY=1")
            with first.client() as client:
                client.register("n", IDENTITY)
            threads = [threading.Thread(target=traffic, args=(n << 20,)) for n in range(1, 4)]
            for thread in threads:
                thread.start()
            eventually(lambda: len(acknowledged) > 20)
            assert first.stop() == 0
        before = list(acknowledged)
        assert daemon.socket.stat().st_ino == inode
        with supervised(daemon, sockets=[("data", kept)]) as second:
            second.until("READY=1")
            eventually(lambda: len(acknowledged) > len(before))
            stop.set()
            for thread in threads:
                thread.join()
            with second.client() as client:
                assert here(client, acknowledged) == acknowledged
                assert all(bytes(client.get("n", key(n))) == body(n) for n in before[-10:])
            assert second.stop() == 0
        assert daemon.socket.stat().st_ino == inode
    away = " ".join(str(error) for error in turned_away if isinstance(error, Unavailable))
    assert "refused" not in away, "whoever comes between two daemons waits"
    assert "No such file" not in away
    assert "Traceback" not in daemon.log.read_text()


def test_during_a_stop_what_has_begun_ends_and_what_is_new_is_told_to_come_again(daemon) -> None:
    keep = f"from kvtcd.api import app; app.KEEPALIVE_S = {PATIENCE_S}"
    with supervised(daemon, prelude=keep) as running:
        running.until("READY=1")
        with running.client() as client, socket.socket(socket.AF_UNIX) as upload:
            client.register("n", IDENTITY)
            upload.connect(str(daemon.socket))
            upload.sendall(
                f"PUT /v1/namespaces/n/blocks/{key(1).hex()}?tokens={BLOCK_TOKENS}&first_token=0 HTTP/1.1\r\n"
                "Host: kvtcd\r\nContent-Type: application/octet-stream\r\n"
                f"Content-Length: {BLOCK_BYTES}\r\nExpect: 100-continue\r\n\r\n".encode()
            )
            assert upload.recv(1 << 16).startswith(b"HTTP/1.1 100 "), "it has begun"
            upload.sendall(body(1)[:100])
            running.signal(signal.SIGHUP)
            running.signal(signal.SIGTERM)
            running.until("STOPPING=1")
            running.signal(signal.SIGTERM)  # impatience changes nothing
            running.signal(signal.SIGHUP)
            time.sleep(0.3)
            with pytest.raises(Stopping) as refused:
                client.stats()
            assert refused.value.retry_after >= 1
            upload.sendall(body(1)[100:])
            assert upload.recv(1 << 16).startswith(b"HTTP/1.1 201 ")
        assert running.ended() == 0
    with supervised(daemon) as again, again.client() as client:
        again.until("READY=1")
        assert bytes(client.get("n", key(1))) == body(1), "it was written before the end"
        assert again.stop() == 0


STUCK = """
import os, time
from dataclasses import replace
from pathlib import Path
from kvtcd.api import app, operate
from kvtcd.engine import pulse
from kvtcd.tiers.disk import Environment
pulse.PATIENCE = 0.5
folder = Path(os.environ["FOLDER"])
def stand_still(name):
    (folder / f"{name} stands still").touch()
    while not (folder / f"{name} may go on").exists():
        time.sleep(0.02)
async def blocks_the_loop(request):
    stand_still("loop")
    return await operate.info.handler(request)
blocks_the_loop.__doc__ = operate.info.handler.__doc__
slow = replace(operate.info, handler=blocks_the_loop)
app.ROUTES = tuple(slow if route is operate.info else route for route in app.ROUTES)
write = Environment.write
def slowly(self, puts, drops):
    stand_still("disk")
    return write(self, puts, drops)
Environment.write = slowly
"""


def pings(said: list[list[str]]) -> int:
    return said.count(["WATCHDOG=1"])


def test_the_watchdog_is_fed_while_loop_and_threads_make_progress_and_no_longer(daemon, tmp_path) -> None:
    with supervised(daemon, prelude=STUCK, WATCHDOG_USEC="600000", FOLDER=str(tmp_path)) as running:
        running.until("READY=1")
        running.until("WATCHDOG=1")

        loop = threading.Thread(target=call, args=(running, lambda client: client.info()))
        loop.start()
        running.listen_until((tmp_path / "loop stands still").exists)
        running.forget()
        assert pings(running.listen(2.0)) == 0
        (tmp_path / "loop may go on").touch()
        running.until("WATCHDOG=1")
        loop.join()

        with running.client() as client:
            client.register("n", IDENTITY)
        thread = threading.Thread(target=call, args=(running, lambda client: put(client, 1, durable=True)))
        thread.start()
        running.listen_until((tmp_path / "disk stands still").exists)
        running.listen_until(lambda: any(map(tells_of_the_disk, running.heard)))
        running.forget()
        assert pings(running.listen(2.0)) == 0
        (tmp_path / "disk may go on").touch()
        running.until("WATCHDOG=1")
        thread.join()
        assert running.stop() == 0
    assert re.search(r"kvtcd-disk-\w+ has ended nothing for ", daemon.log.read_text())


def tells_of_the_disk(said: list[str]) -> bool:
    return bool(re.match(r"STATUS=The thread kvtcd-disk-\w+ is stuck", said[0]))


@pytest.mark.asyncio
@pytest.mark.parametrize(("period", "every"), [(0.6, 0.2), (15.0, 5.0), (3600.0, serve.LOOK_S)])
async def test_the_watchdog_is_fed_three_times_in_each_period(monkeypatch, period, every) -> None:
    told, slept = [], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr("kvtcd.serve.asyncio.sleep", sleep)
    supervisor = SimpleNamespace(watchdog=period, tell=lambda *fields: told.append(fields))
    with pytest.raises(asyncio.CancelledError):
        await serve._attest(supervisor, Pulse(list))
    assert (told, slept) == ([("WATCHDOG=1",)] * 3, [pytest.approx(every)] * 3)


def call(running: Supervised, ask) -> None:
    with running.client() as client:
        ask(client)


SECRET = new_token()
SOME_TOKENS = f'[[token]]\nsha256 = "{digest(SECRET.encode()).hex()}"\ntenant = "team"\n'.encode()


def credentials(daemon: Daemon, **content: bytes) -> dict[str, str]:
    """Make a folder of credentials, and return the variable that names it."""
    folder = daemon.config.parent / "credentials"
    folder.mkdir(exist_ok=True)
    for name, data in content.items():
        (folder / f"kvtcd.{name.replace('_', '-')}").write_bytes(data)
    return {"CREDENTIALS_DIRECTORY": str(folder)}


def test_a_master_key_from_a_credential_is_used_and_never_written_or_shown(daemon, tmp_path) -> None:
    environment = credentials(daemon, master_key=bytes(range(32)))
    master = tmp_path / "credentials" / "kvtcd.master-key"
    with supervised(daemon, **environment) as running, running.client() as client:
        running.until("READY=1")
        client.register("n", IDENTITY)
        assert put(client, 1, durable=True) == "stored"
        assert running.stop() == 0
    assert not (tmp_path / "state" / "master.key").exists()
    with supervised(daemon, **environment) as running, running.client() as client:
        running.until("READY=1")
        assert here(client, [1]) == [1]
        assert running.stop() == 0
    assert not [name for name in (tmp_path / "state").rglob("*") if is_file_with(name, master.read_bytes())]
    assert master.read_bytes().hex() not in daemon.log.read_text()

    (tmp_path / "state" / "master.key").write_bytes(b"m" * 32)
    (tmp_path / "state" / "master.key").chmod(0o600)
    with supervised(daemon, **environment) as refused:
        assert refused.ended() == 2, "going on with either would remove what is stored under the other"
    assert "kvtcd.master-key: differs from " in daemon.log.read_text()


def test_all_sockets_are_told_apart_and_tcp_takes_a_token_that_is_never_shown(daemon) -> None:
    beside = side_socket(str(daemon.socket))
    with (
        listening(daemon.socket) as local,
        listening(beside, socket.SOCK_SEQPACKET) as side,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        supervised(
            daemon,
            sockets=[("tcp", tcp), ("data", local), ("data", side)],
            **credentials(daemon, tokens=SOME_TOKENS),
        ) as running,
    ):
        running.until("READY=1")
        address = f"http://127.0.0.1:{tcp.getsockname()[1]}"
        with Client(address, token=SECRET) as client, running.client() as peer:
            client.register("n", IDENTITY)
            assert put(client, 1, durable=True) == "stored"
            assert bytes(client.get("n", key(1))) == body(1)
            assert peer.namespaces() == (), "a user of this host is another tenant"
        with running.client() as peer:
            region = peer.region(1 << 20)
            assert (region.path, region.why) == ("region", "")
            region.close()
        with Client(address, token=new_token()) as stranger, pytest.raises(ServerError, match="401"):
            stranger.info()
        assert running.stop() == 0
    assert daemon.socket.exists()
    assert Path(beside).exists()
    log = daemon.log.read_text()
    assert SECRET not in log
    assert digest(SECRET.encode()).hex() not in log


def test_tcp_by_configuration_needs_tokens(daemon) -> None:
    port = free_port()
    tokens = daemon.config.parent / "tokens.toml"
    text = daemon.config.read_text()
    text = text.replace('listen = ""', f'listen = "127.0.0.1:{port}"')
    daemon.config.write_text(text.replace("/etc/kvtcd/tokens.toml", str(tokens)))
    with supervised(daemon) as refused:
        assert refused.ended() == 2
    assert f"{tokens}: cannot be read: No such file or directory" in daemon.log.read_text()
    tokens.write_bytes(SOME_TOKENS)
    with supervised(daemon) as running, Client(f"http://127.0.0.1:{port}", token=SECRET) as client:
        running.until("READY=1")
        assert client.stats()["blocks"] == 0
        assert running.stop() == 0


def test_sighup_reads_tokens_and_certificate_anew_and_all_or_nothing(daemon, tmp_path) -> None:
    authority = Authority(tmp_path)
    certificate, secret = authority.issue("localhost")
    port = free_port()
    tokens, text = tmp_path / "tokens.toml", daemon.config.read_text()
    tokens.write_bytes(SOME_TOKENS)
    for old, new in {
        'listen = ""': f'listen = "127.0.0.1:{port}"',
        "/etc/kvtcd/tokens.toml": str(tokens),
        'certificate = ""': f'certificate = "{certificate}"',
        '\nkey = ""': f'\nkey = "{secret}"',
    }.items():
        assert old in text
        text = text.replace(old, new)
    daemon.config.write_text(text)
    other = new_token()

    def answers(host: str, token: str) -> bool:
        with Client(f"https://{host}:{port}", token=token, ca=authority.root) as client:
            try:
                return client.stats()["blocks"] == 0
            except (ServerError, Unavailable):
                return False

    def reloaded(running: Supervised) -> str:
        running.signal(signal.SIGHUP)
        running.until("RELOADING=1")
        return running.until("READY=1")[1]

    with supervised(daemon) as running:
        running.until("READY=1")
        assert (answers("localhost", SECRET), answers("localhost", other)) == (True, False)
        assert not answers("127.0.0.1", SECRET)

        tokens.write_text(SOME_TOKENS.decode().replace(digest(SECRET.encode()).hex(), "no digest"))
        authority.issue("127.0.0.1")
        assert "Nothing was reloaded" in reloaded(running)
        assert answers("localhost", SECRET), "a wrong file changes nothing of the others either"

        tokens.write_text(
            SOME_TOKENS.decode().replace(digest(SECRET.encode()).hex(), digest(other.encode()).hex())
        )
        assert "Configuration read anew" in reloaded(running)
        assert (answers("127.0.0.1", other), answers("127.0.0.1", SECRET)) == (True, False)
        assert not answers("localhost", other)
        assert running.stop() == 0
    assert "Traceback" not in daemon.log.read_text()


def is_file_with(path: Path, content: bytes) -> bool:
    return path.is_file() and content in path.read_bytes()


def test_a_socket_of_a_name_that_is_not_known_ends_the_start_with_2(daemon) -> None:
    with listening(daemon.socket) as handed, supervised(daemon, sockets=[("side", handed)]) as refused:
        assert refused.ended() == 2
    log = daemon.log.read_text()
    assert "FileDescriptorName= must be data for a Unix socket" in log
    assert "Traceback" not in log
    assert daemon.socket.exists()
