"""The tier in the hands of a scheduler as vLLM's is, on a daemon that is a real process."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import vllm_twin as twin
from support.models import tiny_llama_config
from support.patience import PATIENCE_S
from support.vllm_scheduler import ROW_BYTES, engine, fill, keys_of, stored

from kvtcd.core.errors import BadRequest
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORT = 2.0
"""Where the daemon is silent on purpose. Elsewhere `PATIENCE_S`: a hit is a hit on a busy machine too."""
LOSSLESS = """
[match]
[codec]
name = "lossless"
"""


def new_daemon(folder: Path) -> Daemon:
    folder.mkdir(exist_ok=True)
    (folder / "lossless.toml").write_text(LOSSLESS)
    return Daemon(
        folder, host=64 << 20, disk=256 << 20, profiles=folder / "profiles", policy=folder / "lossless.toml"
    )


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    with new_daemon(folder / "d") as daemon:
        yield daemon


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that no other test has."""
    save_file({"w": torch.rand(64)}, tmp_path / "model.safetensors")
    tiny_llama_config().save_pretrained(tmp_path)
    return tmp_path


def finds(address: Path, model: Path, keys: list[bytes], **rest: Any) -> list[str]:
    with engine(address, model, **rest) as scheduler:
        return scheduler.lookup("r", keys)


def test_what_one_engine_stored_the_next_one_loads(daemon: Daemon, model: Path) -> None:
    keys = keys_of(4)
    with engine(daemon.socket, model) as scheduler:
        data = stored(scheduler, keys)
        assert scheduler.counts() == {"miss": 4, "stored": 4}
    with engine(daemon.socket, model, wait=False) as scheduler:  # not even the first request comes too early
        assert scheduler.lookup("r", keys) == ["HIT"] * 4
        result = scheduler.transfer("r", keys, [9, 8, 7, 6], load=True)

        assert result.success
        assert result.transfer_bytes == 4 * ROW_BYTES
        assert np.array_equal(scheduler.primary[[9, 8, 7, 6], :ROW_BYTES], data)
        assert not scheduler.primary[:6].any()  # nothing else was touched
        assert scheduler.counts() == {"hit": 4, "loaded": 4}


def test_the_daemon_has_the_rows_without_their_padding(daemon: Daemon, model: Path) -> None:
    keys = keys_of(3, seed=1)
    with engine(daemon.socket, model) as scheduler, daemon.client() as client:
        data = stored(scheduler, keys)
        (info,) = [n for n in client.namespaces() if n.identity.model == model.name]

        assert info.identity.page_format == "vllm-cpu-vec:32"
        assert bytes(client.get(info.name, keys[2])) == data[2].tobytes()


def test_what_is_there_is_not_sent_again(daemon: Daemon, model: Path) -> None:
    keys = keys_of(3, seed=2)
    with engine(daemon.socket, model) as scheduler:
        stored(scheduler, keys[:2])
        scheduler.counts()
        assert scheduler.transfer("s", keys, [0, 1, 2], load=False).success
        assert scheduler.counts() == {"duplicate": 2, "stored": 1}
        assert scheduler.lookup("t", keys) == ["HIT"] * 3


def test_a_chunk_that_went_away_between_lookup_and_load_is_lost_alone(daemon: Daemon, model: Path) -> None:
    keys = keys_of(3, seed=3)
    with engine(daemon.socket, model) as scheduler, daemon.client() as client:
        data = stored(scheduler, keys)
        assert scheduler.lookup("r", keys) == ["HIT"] * 3
        (name,) = [n.name for n in client.namespaces() if n.identity.model == model.name]
        client.delete(name, keys[1])
        result = scheduler.transfer("r", keys, [4, 5, 6], load=True)

        assert not result.success
        assert set(result.successful_keys) == {keys[0], keys[2]}
        assert np.array_equal(scheduler.primary[[4, 6], :ROW_BYTES], data[[0, 2]])
        assert scheduler.lookup("r", keys) == ["HIT", "MISS", "HIT"]  # not tried for ever


def test_a_namespace_that_an_operator_purged_is_registered_again(daemon: Daemon, model: Path, caplog) -> None:
    keys = keys_of(2, seed=4)
    with engine(daemon.socket, model) as scheduler, daemon.client() as client:
        stored(scheduler, keys)
        (name,) = [n.name for n in client.namespaces() if n.identity.model == model.name]
        client.purge(name)

        assert scheduler.transfer("s", keys, [0, 1], load=False).success, "none has failed for it"
        assert scheduler.lookup("t", keys) == ["HIT"] * 2
    said = [line for line in caplog.messages if "purged" in line]
    assert said == [f"kvtcd: namespace {name} was purged; it begins anew"]
    assert "until the daemon can be used again" not in caplog.text


def test_keys_that_are_no_cryptographic_hash_are_misses(daemon: Daemon, model: Path) -> None:
    short = [b"\x07" * 16 + bytes(4), b"\x07" * 32 + b"\0\0\0\x09"]
    with engine(daemon.socket, model) as scheduler:
        assert scheduler.lookup("r", short) == ["MISS"] * 2
        assert not scheduler.transfer("r", short, [0, 1], load=True).success  # rows that nobody filled
        assert scheduler.counts()["foreign"] == 2


def test_engines_that_differ_never_share_a_hit(daemon: Daemon, model: Path, tmp_path: Path) -> None:
    keys = keys_of(1, seed=5)
    lora = tmp_path / "lora"
    lora.mkdir()
    save_file({"a": torch.ones(2)}, lora / "adapter_model.safetensors")
    others: list[dict[str, Any]] = [
        {"salt": "b"},
        {"adapters": [str(lora)]},
        {"variant": "another RoPE"},
        {"isa": "amx"},
        {"engine": {"dtype": "bfloat16", "token_bytes": 192}},
        {"engine": {"block": 64, "per_chunk": 1}},
        {"engine": {"kv_cache_layout": "LBNHC"}, "isa": "amx"},
    ]
    with engine(daemon.socket, model, salt="a") as scheduler:
        stored(scheduler, keys)

    assert finds(daemon.socket, model, keys, salt="a") == ["HIT"]
    for other in others:
        assert finds(daemon.socket, model, keys, **({"salt": "a"} | other)) == ["MISS"], other
    save_file({"w": torch.rand(64)}, model / "model.safetensors")  # another checkpoint under the same name
    assert finds(daemon.socket, model, keys, salt="a") == ["MISS"]


def test_an_adapter_replaced_under_the_same_name(daemon: Daemon, model: Path, tmp_path: Path) -> None:
    keys = keys_of(1, seed=6)
    lora = tmp_path / "lora"
    lora.mkdir()
    file = lora / "adapter_model.safetensors"
    save_file({"a": torch.ones(2)}, file)
    with engine(daemon.socket, model, adapters=[str(lora)]) as scheduler:
        stored(scheduler, keys)
        assert scheduler.lookup("r", keys) == ["HIT"]
        save_file({"a": torch.zeros(2)}, file)  # while the engine runs: nobody knows any more what it holds
        assert not scheduler.transfer("r", keys, [1], load=True).success
        assert scheduler.lookup("s", keys) == ["MISS"]
        assert not scheduler.transfer("s", keys_of(1, seed=60), [0], load=False).success

    assert finds(daemon.socket, model, keys, adapters=[str(lora)]) == ["MISS"]
    save_file({"a": torch.ones(2)}, file)
    assert finds(daemon.socket, model, keys, adapters=[str(lora)]) == ["HIT"]


def test_many_jobs_each_get_one_result(daemon: Daemon, model: Path) -> None:
    keys = keys_of(12, seed=7)
    with engine(daemon.socket, model) as scheduler:
        fill(scheduler, list(range(12)), 7)
        context = scheduler.request("r", keys)
        for number, key in enumerate(keys):
            scheduler.tier.submit_store(twin.TransferJob(number, [key], np.array([number]), False, context))
        scheduler.tier.drain_jobs()

        results = scheduler.tier.get_finished_jobs()
        assert sorted(result.job_id for result in results) == list(range(12))
        assert all(result.success for result in results)
        assert list(scheduler.tier.get_finished_jobs()) == []


@pytest.mark.slow
def test_a_daemon_killed_and_started_again(folder: Path, model: Path) -> None:
    """Misses while it is away, at once and counted; hits again when it is back."""
    keys, more = keys_of(3, seed=8), keys_of(2, seed=9)
    daemon = new_daemon(folder / "killed")
    with daemon, engine(daemon.socket, model) as scheduler:
        data = stored(scheduler, keys)
        with daemon.client() as client:
            (name,) = [n.name for n in client.namespaces() if n.identity.model == model.name]
            client.flush(name)
        assert scheduler.lookup("r", keys) == ["HIT"] * 3
        daemon.kill()

        result = scheduler.transfer("r", keys, [4, 5, 6], load=True)
        assert not result.success
        assert result.successful_keys is None
        assert (scheduler.lookup("s", keys), scheduler.steps) == (["MISS"] * 3, 1)
        assert not scheduler.transfer("s", more, [0, 1], load=False).success
        counts = scheduler.counts()
        assert counts["lost"] == 3
        assert counts["away"] == 3
        assert counts["failed"] == 2

        daemon.start()
        scheduler.connected()
        assert scheduler.lookup("t", keys) == ["HIT"] * 3
        assert scheduler.transfer("t", keys, [7, 8, 9], load=True).success
        assert np.array_equal(scheduler.primary[[7, 8, 9], :ROW_BYTES], data)


@pytest.mark.slow
def test_an_engine_that_starts_before_its_daemon(folder: Path, model: Path) -> None:
    daemon = new_daemon(folder / "late")
    keys = keys_of(2, seed=10)
    with engine(daemon.socket, model, wait=False) as scheduler:
        assert scheduler.lookup("r", keys) == ["MISS"] * 2
        with daemon:
            scheduler.connected()
            stored(scheduler, keys)
            assert scheduler.lookup("s", keys) == ["HIT"] * 2


@pytest.mark.slow
def test_a_daemon_that_hangs(folder: Path, model: Path) -> None:
    """It takes connections and says nothing: a lookup is a miss after a while, the next ones are at once."""
    keys = keys_of(2, seed=11)
    with (
        new_daemon(folder / "hangs") as daemon,
        engine(daemon.socket, model, timeout_seconds=4 * PATIENCE_S, retry_seconds=SHORT) as scheduler,
    ):
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            assert scheduler.lookup("r", keys) == ["MISS"] * 2
            assert time.monotonic() - started >= SHORT
            time.sleep(SHORT)  # the daemon owes an answer since a little after the lookup began
            assert (scheduler.lookup("s", keys_of(2, seed=12)), scheduler.steps) == (["MISS"] * 2, 1)
            assert scheduler.counts()["late"] >= 4
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert scheduler.transfer("t", keys, [0, 1], load=False).success
        assert scheduler.lookup("u", keys) == ["HIT"] * 2


def test_something_else_on_the_socket(folder: Path, model: Path) -> None:
    """It answers in no HTTP at all."""
    address = folder / "other.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        stop = threading.Event()

        def answer() -> None:
            listener.settimeout(0.1)
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall(b"220 mail\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with engine(address, model, wait=False) as scheduler:
                keys = keys_of(1)
                assert scheduler.lookup("r", keys) == ["MISS"]
                assert not scheduler.transfer("r", keys, [0], load=True).success
        finally:
            stop.set()
            thread.join()


def test_settings_that_cannot_be_meant_end_the_start(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="weights"), engine(daemon.socket, tmp_path / "none"):
        pass
    tiny_llama_config().save_pretrained(tmp_path)
    for given in ({"sokcet": "x"}, {"retry_seconds": 0}, {"timeout_seconds": "10"}, {"full_digest": "yes"}):
        (name,) = given
        with pytest.raises(BadRequest, match=f"^{name}: "), engine(daemon.socket, tmp_path, **given):
            pass
