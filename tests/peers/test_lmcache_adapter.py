"""The adapter with LMCache's own keys, objects and events, on a daemon that is a real process."""

from __future__ import annotations

import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from daemons import LOSSLESS, REFUSING, emptied, new_daemon, purged, settled, told, until
from lmcache_server import adapter
from safetensors.torch import save_file
from support.patience import PATIENCE_S

from kvtcd.lab.daemon import Daemon

pytestmark = [
    pytest.mark.peers("lmcache"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what LMCache says while it is imported is not about us
]

MODEL = "org/model"
SIZE = (4, 16, 64)


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
    return checkpoint(tmp_path / "m", 0)


def checkpoint(folder: Path, seed: int, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    save_file({"w": torch.rand(64, generator=draw)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Server:
    """An adapter in the hands of a controller."""

    def __init__(self, ours: Any) -> None:
        self.ours = ours

    def _wait(self, event: int) -> None:
        from lmcache.v1.platform import consume_fd  # noqa: PLC0415 - where LMCache is

        poll = select.poll()
        poll.register(event, select.POLLIN)
        assert poll.poll(1000 * PATIENCE_S)
        consume_fd(event)

    def store(self, keys: list[Any], objects: list[Any]) -> Any:
        task = self.ours.submit_store_task(keys, objects)
        while task not in (ended := self.ours.pop_completed_store_tasks()):
            self._wait(self.ours.get_store_event_fd())
        return ended[task]

    def find(self, keys: list[Any], layouts: dict[int, Any] | None = None) -> list[int]:
        """Return 1 for each key that is there, 0 for each other."""
        task = self.ours.submit_lookup_and_lock_task(keys, layouts or {})
        while (bits := self.ours.query_lookup_and_lock_result(task)) is None:
            self._wait(self.ours.get_lookup_and_lock_event_fd())
        assert self.ours.query_lookup_and_lock_result(task) is None
        return [int(bits.test(i)) for i in range(len(keys))]

    def load(self, keys: list[Any], objects: list[Any]) -> list[int]:
        task = self.ours.submit_load_task(keys, objects)
        while (bits := self.ours.query_load_result(task)) is None:
            self._wait(self.ours.get_load_event_fd())
        assert self.ours.query_load_result(task) is None
        return [int(bits.test(i)) for i in range(len(keys))]


@contextmanager
def server(daemon: Daemon, model: Path, **parameters: Any) -> Iterator[Server]:
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter  # noqa: PLC0415 - where LMCache is
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import (  # noqa: PLC0415 - the same
        PluginL2AdapterConfig,
    )

    spec = json.loads(adapter(daemon.socket, **{"models": {MODEL: str(model)}} | parameters))
    ours = create_l2_adapter(PluginL2AdapterConfig.from_dict(spec))
    try:
        yield Server(ours)
    finally:
        ours.close()


def keys(count: int, first: int = 0, **changes: Any) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey  # noqa: PLC0415 - where LMCache is

    facts = {"model_name": MODEL, "kv_rank": 0x01000100} | changes
    return [ObjectKey(chunk_hash=bytes([first + i]) * 32, **facts) for i in range(count)]


def objects(
    count: int, seed: int | None = None, size: tuple[int, ...] = SIZE, dtype: torch.dtype = torch.bfloat16
) -> list[Any]:
    from lmcache.v1.memory_management import (  # noqa: PLC0415 - where LMCache is
        MemoryFormat,
        MemoryObjMetadata,
        TensorMemoryObj,
    )

    made = []
    draw = torch.Generator().manual_seed(seed or 0)
    for _ in range(count):
        raw = torch.zeros(size, dtype=dtype) if seed is None else torch.rand(size, generator=draw).to(dtype)
        nbytes = raw.numel() * raw.element_size()
        facts = MemoryObjMetadata(raw.shape, dtype, raw.data_ptr(), nbytes, 1, fmt=MemoryFormat.KV_2LTD)
        made.append(TensorMemoryObj(raw.view(-1).view(torch.uint8), facts, parent_allocator=None))
    return made


def layouts(size: tuple[int, ...] = SIZE, dtype: torch.dtype = torch.bfloat16) -> dict[int, Any]:
    from lmcache.v1.distributed.api import MemoryLayoutDesc  # noqa: PLC0415 - where LMCache is

    return {0: MemoryLayoutDesc([torch.Size(size)], [dtype])}


def same(ones: list[Any], others: list[Any]) -> bool:
    return all(bytes(a.byte_array) == bytes(b.byte_array) for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_it_passes_the_check_of_lmcache(daemon: Daemon, model: Path, dtype: str) -> None:
    """The conformance tool that LMCache ships; its keys are four bytes long."""
    given = adapter(daemon.socket, models={"/lmcache_test_model/": str(model)}, short_hashes=True)
    command = [
        sys.executable, "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--l2-adapter", given,
        "--kv-dtype", dtype, "--obj-size", "4096",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ") and "Rate" not in line]
    assert len(rows) == 4, result.stdout
    assert all("5/5" in row for row in rows), result.stdout


def test_the_interface_is_the_one_that_is_installed() -> None:
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface  # noqa: PLC0415 - where LMCache is

    from kvtcd.integrations.lmcache_l2 import KvtcdL2Adapter  # noqa: PLC0415 - the same

    assert not KvtcdL2Adapter.__abstractmethods__
    for name in L2AdapterInterface.__abstractmethods__:
        wanted = list(inspect.signature(getattr(L2AdapterInterface, name)).parameters)
        assert list(inspect.signature(getattr(KvtcdL2Adapter, name)).parameters) == wanted, name


def test_what_one_server_stored_the_next_one_loads(folder: Path, model: Path) -> None:
    """Another life of both, and the shape is known from the lookup alone."""
    given, wanted = keys(5, 10), objects(5, seed=1)
    owner = new_daemon(folder / "lives")
    with owner, server(owner, model) as first:
        events = {first.ours.get_store_event_fd(), first.ours.get_load_event_fd()}
        assert len(events | {first.ours.get_lookup_and_lock_event_fd()}) == 3
        assert first.find(given, layouts()) == [0] * 5
        stored = first.store(given, wanted)
        assert stored.is_successful()
        assert stored.bytes_transferred() == sum(one.get_size() for one in wanted)
        assert first.store(given, wanted).bytes_transferred() == 0  # they are there
        assert first.ours.get_usage().total_bytes_used == stored.bytes_transferred()
        settled(owner)
        with owner.client() as client:
            (info,) = client.namespaces()
            assert info.codec == "lossless"

    with owner, server(owner, model) as second:
        asked = [*given[:3], *keys(1, 99), *given[3:]]
        assert second.find(asked, layouts()) == [1, 1, 1, 0, 1, 1]
        filled = objects(5)
        assert second.load(given, filled) == [1] * 5
        assert same(filled, wanted)
        second.ours.submit_unlock(asked)
        assert second.ours.report_status()["objects"]["loaded"] == 5


def test_objects_that_differ_never_meet(daemon: Daemon, model: Path, tmp_path: Path) -> None:
    """Dtype, shape, checkpoint under one name, rank, group, salt of request or adapter, a variant, a RoPE."""
    given = keys(2, 20)
    with server(daemon, model) as first:
        assert first.store(given, objects(2, seed=2)).is_successful()
        assert first.find(given, layouts()) == [1, 1]
        assert first.find(given, layouts(dtype=torch.float16)) == [0, 0]
        assert first.find(given, layouts((4, 16, 128), torch.float8_e4m3fn)) == [0, 0]
        assert first.find(given, layouts((4, 32, 32))) == [0, 0]
        for change in (
            {"kv_rank": 0x02000200}, {"kv_rank": 0x02010201}, {"object_group_id": 1}, {"cache_salt": "a"},
        ):  # fmt: skip
            assert first.find(keys(2, 20, **change), {0: layouts()[0], 1: layouts()[0]}) == [0, 0], change
    others = {
        "weights": (checkpoint(tmp_path / "other", 1), {}),
        "config": (checkpoint(tmp_path / "rope", 0, rope_scaling=2), {}),
        "variant": (model, {"variant": "vllm 2"}),
        "salt": (model, {"salt": "a"}),
    }
    for name, (path, parameters) in others.items():
        with server(daemon, path, **parameters) as other:
            assert other.find(given, layouts()) == [0, 0], name
            assert other.store(given, objects(2, seed=3)).is_successful(), name
            assert other.find(given, layouts()) == [1, 1], name
    with server(daemon, model) as again:
        filled = objects(2)
        assert again.find(given, layouts()) == [1, 1]
        assert again.load(given, filled) == [1, 1]
        assert same(filled, objects(2, seed=2))


def test_a_model_whose_files_are_not_known_or_change_is_left_alone(daemon: Daemon, model: Path) -> None:
    with server(daemon, model) as ours:
        stranger = keys(1, 30, model_name="org/stranger")
        assert not ours.store(stranger, objects(1, seed=4)).is_successful()
        assert ours.find(stranger, layouts()) == [0]
        assert ours.store(keys(1, 30), objects(1, seed=4)).is_successful()
        checkpoint(model, 7)  # under a running engine: whose cache is it from now on?
        assert ours.find(keys(1, 30), layouts()) == [0]
        assert not ours.store(keys(1, 31), objects(1, seed=4)).is_successful()


def test_hashes_that_anybody_can_make_collide_are_left_alone(daemon: Daemon, model: Path) -> None:
    with server(daemon, model) as ours:
        short = [replace(key, chunk_hash=key.chunk_hash[:8]) for key in keys(1, 40)]
        assert not ours.store(short, objects(1, seed=5)).is_successful()
        assert ours.find(short, layouts()) == [0]


def test_an_object_that_is_gone_is_lost_alone(daemon: Daemon, model: Path) -> None:
    given, wanted = keys(3, 50), objects(3, seed=6)
    with server(daemon, model) as ours:
        assert ours.store(given, wanted).is_successful()
        ours.ours.delete(given[1:2])

        def is_gone() -> bool:
            found = ours.find(given)
            ours.ours.submit_unlock(given)
            return not found[1]

        until(is_gone)
        filled = objects(3)
        assert ours.load(given, filled) == [1, 0, 1]
        assert same([filled[0], filled[2]], [wanted[0], wanted[2]])
        assert not any(bytes(filled[1].byte_array))


def test_a_daemon_killed_and_started_again(folder: Path, model: Path) -> None:
    given, wanted = keys(2, 60), objects(2, seed=7)
    owner = new_daemon(folder / "k")
    with server(owner, model) as ours:  # which is not there yet
        assert ours.find(given, layouts()) == [0, 0]
        assert not ours.store(given, wanted).is_successful()
        with owner:
            until(
                lambda: ours.store(given, wanted).is_successful()
            )  # it waits a little before it looks again
            settled(owner)
            owner.kill()
            assert ours.find(given, layouts()) == [0, 0]
            assert ours.load(given, objects(2)) == [0, 0]
            assert not ours.ours.report_status()["up"]
            assert ours.ours.report_status()["is_healthy"]  # LMCache serves on without us
            owner.start()
            until(lambda: ours.find(given, layouts()) == [1, 1])
            filled = objects(2)
            assert ours.load(given, filled) == [1, 1]
            assert same(filled, wanted)


def test_a_daemon_that_changes_costs_misses_and_nothing_else(folder: Path, model: Path) -> None:
    """Purged before a lookup and before a store, told to refuse, emptied: never an outage."""
    given, wanted, more = keys(2, 80), objects(2, seed=9), keys(2, 90)
    owner = new_daemon(folder / "c", policy=LOSSLESS)
    with owner, server(owner, model) as ours:
        assert ours.store(given, wanted).is_successful()
        purged(owner)
        assert ours.find(given, layouts()) == [0, 0]
        assert ours.store(given, wanted).is_successful()
        purged(owner)
        assert ours.store(given, wanted).is_successful()
        told(owner, REFUSING)
        assert not ours.store(more, objects(2, seed=10)).is_successful()
        assert ours.find([*given, *more], layouts()) == [1, 1, 0, 0]
        assert ours.ours.report_status()["up"]
        assert ours.ours.report_status()["objects"]["dropped"] == 2
        told(owner, LOSSLESS)
        emptied(owner)
        assert ours.find(given, layouts()) == [0, 0]
        until(lambda: ours.store(given, wanted).is_successful())
        filled = objects(2)
        assert ours.load(given, filled) == [1, 1]
        assert same(filled, wanted)


def test_a_daemon_that_hangs_costs_a_deadline_and_no_more(folder: Path, model: Path) -> None:
    owner = new_daemon(folder / "h")
    with owner, server(owner, model, lookup_seconds=0.5, timeout_seconds=0.5) as ours:
        until(lambda: ours.store(keys(1, 70), objects(1, seed=8)).is_successful())
        os.kill(owner.pid, signal.SIGSTOP)
        try:
            assert ours.find(keys(1, 70)) == [0]
            assert ours.load(keys(1, 70), objects(1)) == [0]
            assert not ours.store(keys(1, 71), objects(1, seed=8)).is_successful()
        finally:
            os.kill(owner.pid, signal.SIGCONT)


def test_what_waits_when_the_server_ends_has_failed(folder: Path, model: Path) -> None:
    owner = new_daemon(folder / "e")
    with owner, server(owner, model, lookup_seconds=0.5, timeout_seconds=0.5) as ours:
        os.kill(owner.pid, signal.SIGSTOP)
        try:
            tasks = [ours.ours.submit_store_task(keys(1, 80 + i), objects(1, seed=9)) for i in range(20)]
            ours.ours.close()
        finally:
            os.kill(owner.pid, signal.SIGCONT)
        ended = ours.ours.pop_completed_store_tasks()
        assert sorted(ended) == sorted(tasks)
        assert not any(result.is_successful() for result in ended.values())
