"""The tier in the hands of a scheduler as vLLM's is, on a daemon that is a real process."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import vllm_twin as twin
from support.models import tiny_llama_config
from support.patience import PATIENCE_S

from kvtcd.client.connections import Connection
from kvtcd.core.errors import BadRequest
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS = 64
ROW_BYTES = TOKENS * 384
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


@dataclass
class Scheduler:
    """What vLLM's scheduler and tiering manager do with a tier, as far as a tier sees it.

    Attributes:
        steps: how often the last lookup had to ask.
        asked: threads that sent something to the daemon, each time.
    """

    tier: Any
    primary: np.ndarray
    jobs: int = 0
    requests: dict[str, twin.ReqContext] = field(default_factory=dict)
    steps: int = 0
    asked: list[threading.Thread] = field(default_factory=list)

    def _call(self, call: Any, *arguments: Any) -> Any:
        before = len(self.asked)
        result = call(*arguments)
        assert threading.current_thread() not in self.asked[before:], "the scheduler waited for the daemon"
        return result

    def request(self, name: str, keys: list[bytes]) -> twin.ReqContext:
        context = twin.ReqContext(name, ends={key: (i + 1) * TOKENS for i, key in enumerate(keys)})
        self._call(self.tier.on_new_request, context)
        return self.requests.setdefault(name, context)

    def lookup(self, name: str, keys: list[bytes]) -> list[str]:
        """Ask until nothing is RETRY, a step at a time; the longest that may take is the tier's own."""
        context = self.request(name, keys)
        deadline, self.steps = time.monotonic() + 2 * PATIENCE_S, 0
        while True:
            self.steps += 1
            answers = [self._call(self.tier.lookup, key, context).name for key in keys]
            if "RETRY" not in answers:
                return answers
            assert time.monotonic() < deadline, "RETRY has no end"
            self._call(self.tier.on_schedule_end, None)
            time.sleep(0.01)

    def transfer(self, name: str, keys: list[bytes], chunk_rows: list[int], *, load: bool) -> twin.JobResult:
        self.jobs += 1
        job = twin.TransferJob(self.jobs, keys, np.array(chunk_rows), load, self.request(name, keys))
        self._call(self.tier.submit_load if load else self.tier.submit_store, job)
        return self.results(1)[0]

    def results(self, count: int) -> list[twin.JobResult]:
        results: list[twin.JobResult] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(results) < count:
            results += self._call(self.tier.get_finished_jobs)
            assert time.monotonic() < deadline, "a job has no result"
            time.sleep(0.01)
        return results

    def counts(self) -> dict[str, float]:
        return {labels[0]: value for (_, labels), value in self.tier.get_stats().counters.items()}

    def connected(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.tier.get_stats().gauges["vllm:kvtcd_up"] != 1.0:
            assert time.monotonic() < deadline, "the tier does not find its daemon"
            time.sleep(0.02)


@contextmanager
def engine(
    address: Path, model: Path, *, wait: bool = True, isa: str = "vec", engine: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Scheduler]:  # fmt: skip
    """An engine's life."""
    with pytest.MonkeyPatch.context() as patch:
        tier_class = twin.install(patch, isa).KvtcdTier
        primary = twin.rows(16, ROW_BYTES)
        tier = tier_class(
            offloading_spec=twin.spec(str(model), **(engine or {})), primary_kv_view=memoryview(primary),
            tier_type="KvtcdTier", backpressure_detector=None, socket=str(address),
            **({"retry_seconds": PATIENCE_S, "timeout_seconds": PATIENCE_S} | settings),
        )  # fmt: skip
        scheduler, exchange = Scheduler(tier, primary), Connection.exchange

        def noted(connection: Connection, *arguments: Any) -> Any:
            scheduler.asked.append(threading.current_thread())
            return exchange(connection, *arguments)

        patch.setattr(Connection, "exchange", noted)
        try:
            if wait:
                scheduler.connected()
            yield scheduler
        finally:
            tier.shutdown()


def keys_of(count: int, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(32) + bytes(4) for _ in range(count)]


def fill(scheduler: Scheduler, chunk_rows: list[int], seed: int) -> np.ndarray:
    data = np.random.default_rng(seed).integers(-100, 100, (len(chunk_rows), ROW_BYTES), dtype=np.int8)
    scheduler.primary[chunk_rows, :ROW_BYTES] = data
    return data


def stored(scheduler: Scheduler, keys: list[bytes], seed: int = 0) -> np.ndarray:
    data = fill(scheduler, list(range(len(keys))), seed)
    assert scheduler.lookup("store", keys) == ["MISS"] * len(keys)
    assert scheduler.transfer("store", keys, list(range(len(keys))), load=False).success
    scheduler.tier.on_request_finished(scheduler.requests.pop("store"))
    return data


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
