"""The whole daemon as a process: stopped, killed, started twice, started on wrong files."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.patience import PATIENCE_S
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY

from kvtcd.client import BlockHead
from kvtcd.core.errors import ConfigError, KvtcdError, Unavailable
from kvtcd.core.keys import EngineKey
from kvtcd.lab.daemon import Daemon
from kvtcd.lab.recording import read_requests


def daemon(folder: Path, **changes) -> Daemon:
    settings = {"host": 64 * BLOCK_BYTES + (1 << 20), "disk": 256 << 20, "profiles": folder / "profiles"}
    return Daemon(folder, **(settings | {"stop_seconds": PATIENCE_S} | changes))


def key(number: int) -> EngineKey:
    return EngineKey(number.to_bytes(32, "big"))


def body(number: int) -> bytes:
    """Random bytes stand for their number: a block served under another key is seen at once."""
    return np.random.default_rng(number).integers(0, 255, BLOCK_BYTES, dtype=np.uint8).tobytes()


def until(true: Callable[[], object]) -> None:
    """Wait until something is true; fail if it does not become so."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def put(client, number: int, *, durable: bool) -> str:
    head = BlockHead(key(number), tokens=BLOCK_TOKENS, first_token=0)
    return client.put("n", head, body(number), durable=durable).outcome


def test_blocks_survive_a_stop(tmp_path: Path) -> None:
    running = daemon(tmp_path)
    with running, running.client() as client:
        client.register("n", IDENTITY)
        assert [put(client, n, durable=False) for n in range(20)] == ["stored"] * 20
    with running, running.client() as client:
        assert client.namespace("n").identity == IDENTITY
        assert all(bytes(client.get("n", key(n))) == body(n) for n in range(20))
    assert "Traceback" not in running.log.read_text()


@pytest.mark.slow
def test_twenty_kills_during_writes_lose_nothing_that_was_durable(tmp_path: Path) -> None:
    running, rng = daemon(tmp_path), random.Random(7)
    acknowledged: set[int] = set()
    deleted: set[int] = set()
    numbers = iter(range(10**6))
    with running, running.client() as client:
        client.register("n", IDENTITY)

    def write() -> None:
        with running.client() as client:
            while True:
                number = next(numbers)
                try:
                    if put(client, number, durable=True) == "stored":
                        acknowledged.add(number)
                    if number % 7 == 3 and (gone := number - 3) in acknowledged:
                        acknowledged.discard(gone)  # until the answer, it may be there or not
                        client.delete("n", key(gone))
                        deleted.add(gone)
                except KvtcdError:
                    return

    for _ in range(20):
        running.start()
        with running.client() as client:
            known = acknowledged | deleted
            found = {n for n in known if client.match("n", [key(n)]).blocks[0].tier is not None}
            assert found == acknowledged, "every durable block is there, every deleted one is gone"
            for number in rng.sample(sorted(acknowledged), min(30, len(acknowledged))):
                assert bytes(client.get("n", key(number))) == body(number)
        before, more = len(acknowledged), rng.randrange(12)
        writer = threading.Thread(target=write)
        writer.start()
        until(lambda before=before, more=more: len(acknowledged) >= before + more)
        time.sleep(rng.uniform(0, 0.1))
        running.kill()
        writer.join()
    with running, running.client() as client:
        assert all(bytes(client.get("n", key(number))) == body(number) for number in acknowledged)
    assert len(acknowledged) > 50
    assert "Traceback" not in running.log.read_text()


def test_a_stop_in_mid_traffic_cuts_no_answer(tmp_path: Path) -> None:
    running = daemon(tmp_path)
    outcomes: list[int] = []
    running.start()
    with running.client() as client:
        client.register("n", IDENTITY)

    def traffic(first: int) -> None:
        with running.client() as client:
            for number in range(first, first + 10_000):
                try:
                    if put(client, number, durable=False) == "stored":
                        outcomes.append(number)
                except KvtcdError:
                    return

    threads = [threading.Thread(target=traffic, args=(10_000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(outcomes) > 100)
    assert running.stop() == 0
    for thread in threads:
        thread.join()
    with running, running.client() as client:
        stats = client.stats()
        kept = [n for n in outcomes if client.match("n", [key(n)]).blocks[0].tier is not None]
        assert all(bytes(client.get("n", key(n))) == body(n) for n in kept[:50])
    assert stats["blocks"] == len(kept)
    assert set(outcomes[-20:]) <= set(kept), "what was acknowledged last was written before the end"


def test_policies_are_reloaded_on_request_and_on_hangup_unless_a_file_is_wrong(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[codec]\nname = "lossless"\n')
    running = daemon(tmp_path, policy=policy)
    with running, running.client() as client:
        client.register("n", IDENTITY)
        assert put(client, 1, durable=False) == "stored"
        policy.write_text("[codec]\nratio = 0.5\n")
        with pytest.raises(ConfigError) as caught:
            client.reload_policies()
        assert (caught.value.path, caught.value.field) == (str(policy), "codec.ratio")
        assert client.policies()[0]["codec"]["name"] == "lossless"
        policy.write_text("[codec]\nratio = 8\n")
        assert client.reload_policies()[0]["codec"]["ratio"] == 8
        assert "no profile" in (client.namespace("n").codec_reason or "")
        assert running._process
        policy.write_text("nonsense")
        running._process.send_signal(signal.SIGHUP)
        until(lambda: "nothing was reloaded" in running.log.read_text())
        policy.write_text("[codec]\nratio = 32\n")
        running._process.send_signal(signal.SIGHUP)
        until(lambda: client.policies()[0]["codec"]["ratio"] == 32)
        assert bytes(client.get("n", key(1))) == body(1)


def test_a_daemon_records_and_goes_on_in_a_new_file_when_it_is_told_to(tmp_path: Path) -> None:
    running, record = daemon(tmp_path), tmp_path / "record"
    command = [
        sys.executable,
        "-m",
        "kvtcd",
        "serve",
        "--config",
        str(running.config),
        "--record",
        str(record),
    ]
    process = subprocess.Popen(command)
    with running.client() as client:
        until(client.ready)
        client.register("n", IDENTITY)
        assert put(client, 1, durable=False) == "stored"
        until(lambda: len(record.read_text().splitlines()) == 3)
        record.rename(tmp_path / "old")
        process.send_signal(signal.SIGHUP)
        until(record.exists)
        client.get("n", key(1))
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert [len(request.blocks) for request in read_requests(record)] == [1]
    assert [len(request.blocks) for request in read_requests(tmp_path / "old")] == [1]
    assert record.stat().st_mode & 0o777 == 0o600


def test_a_second_daemon_on_the_same_state_leaves_with_75(tmp_path: Path) -> None:
    running = daemon(tmp_path)
    with running, running.client() as client:
        second = subprocess.run(
            [sys.executable, "-m", "kvtcd", "serve", "--config", str(running.config)],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert client.ready()
    assert second.returncode == 75
    assert "another kvtcd holds" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_daemon_whose_socket_is_taken_leaves_with_75_and_makes_no_state(tmp_path: Path) -> None:
    path, taken = tmp_path / "config.toml", tmp_path / "socket"
    path.write_text(f"[daemon]\nsocket = '{taken}'\nstate = '{tmp_path / 'new'}'\n")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(taken))
        listener.listen()
        result = subprocess.run(
            [sys.executable, "-m", "kvtcd", "serve", "--config", str(path)],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    assert result.returncode == 75, result.stderr
    assert str(taken) in result.stderr
    assert not (tmp_path / "new").exists()


def test_a_wrong_configuration_leaves_with_2_and_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[host]\ncapacity = 'much'\n")
    result = subprocess.run(
        [sys.executable, "-m", "kvtcd", "serve", "--config", str(path)],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip

    assert result.returncode == 2
    assert result.stderr.startswith(f"kvtcd: {path}: host.capacity: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_daemon_that_cannot_start_is_named_with_its_log(tmp_path: Path) -> None:
    running = daemon(tmp_path)
    running.config.write_text("nonsense")

    with pytest.raises(Unavailable, match="is not TOML"):
        running.start()


def test_without_a_daemon_a_client_says_what_to_do(tmp_path: Path) -> None:
    with daemon(tmp_path).client() as client:
        assert not client.ready()
        with pytest.raises(Unavailable, match=r"kvtcd\.sock"):
            client.info()


def test_sigterm_during_start_is_a_clean_stop(tmp_path: Path) -> None:
    running = daemon(tmp_path)
    running.start()
    running.stop()
    process = subprocess.Popen([sys.executable, "-m", "kvtcd", "serve", "--config", str(running.config)])
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGTERM)

    assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM)
    with running:
        pass
