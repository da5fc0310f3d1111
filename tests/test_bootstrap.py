"""What of a daemon depends on the machine: where it packs, what it pins, what it refuses.

A whole one runs on the CPU with stand-ins for all of CUDA, and on CUDA where there is one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import fake_cuda, fake_cudart, fake_nvcomp
from support import twin as pretended
from support.codec_world import World, kv
from support.faults import unreadable
from support.patience import PATIENCE_S
from support.toy import soon
from typer.testing import CliRunner

from kvtcd import bootstrap, cli, machine
from kvtcd.codec import nvcomp
from kvtcd.codec.profile import store
from kvtcd.codec.residency import Residency
from kvtcd.codec.staged import StagedEncoder
from kvtcd.config import Config, dump, load, load_policies
from kvtcd.core.errors import ConfigError, DeviceLost
from kvtcd.core.keys import EngineKey, TenantKeys
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import Tier
from kvtcd.engine.cuda import CudaStream
from kvtcd.engine.namespaces import TENANT_NAME
from kvtcd.serve import serve
from kvtcd.tiers import memory
from kvtcd.tiers.device import GRANULE, DeviceMemory
from kvtcd.tiers.disk import Environment
from kvtcd.tiers.state import StateDirectory

WORLD = World(kv())
TENANT, TOKENS, BLOCKS = "uid:1", 32, 4
POLICY = """
[codec]
name = "{name}"
ratio = 8
window = 0
[promote]
to = "{to}"
"""


@pytest.fixture(autouse=True)
def _process():
    """What a daemon sets for its whole process."""
    mask, threads = os.umask(0o077), torch.get_num_threads()
    yield
    os.umask(mask)
    torch.set_num_threads(threads)


def configuration(
    folder, *, device="auto", gpu="auto", host=4 << 20, name="lossless", to="host", where=None
) -> Config:
    (folder / "profiles").mkdir(exist_ok=True)
    policy = folder / "policy.toml"
    text = POLICY.format(name=name, to=to)
    if where:
        text = text.replace("[codec]", f'[codec]\ndevice = "{where}"')
    policy.write_text(text.replace("ratio = 8\nwindow = 0\n", "") if name == "lossless" else text)
    return Config.model_validate(
        {
            "daemon": {"state": folder / "state", "socket": folder / "socket", "stop_seconds": 20.0},
            "host": {"capacity": host},
            "gpu": {"capacity": gpu},
            "disk": {"capacity": 64 << 20},
            "codec": {"device": device, "profiles": folder / "profiles", "threads": 1},
            "policies": [policy],
        }
    )


def gauge(service, name: str) -> float:
    lines = service.metrics_text().decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[1])


@pytest.fixture
def twin(monkeypatch) -> fake_cudart.FakeRuntime:
    """One CUDA device, which is the CPU."""
    return pretended.install(monkeypatch)


def test_one_tenant_of_another_key_is_named_with_its_size_and_left_as_it_is(tmp_path, caplog) -> None:
    config = configuration(tmp_path)
    state = StateDirectory(config.daemon.state)
    tags = [TenantKeys.derive(master, "uid:1").tag.hex() for master in (state.master_key(), b"k" * 32)]
    for tag in tags:
        environment = Environment(state.tenant(tag), quota=1 << 24)
        environment.put_namespace(TENANT_NAME, b"uid:1")
        environment.close()
    state.close()

    async def begun() -> None:
        async with bootstrap.service(config) as service:
            assert service.ready

    asyncio.run(begun())
    (said,) = [each.message for each in caplog.records if "another master key" in each.message]
    assert f"{state.tenant(tags[1])} (0." in said

    assert sorted(state.tenants()) == sorted(tags), "it may be all that a rekey which was killed has left"


def stored_under(config: Config, *tenants: tuple[str, bytes]) -> list[Path]:
    """Have tenants stored under keys; return where."""
    state = StateDirectory(config.daemon.state)
    state.master_key()
    paths = []
    for name, master in tenants:
        paths.append(state.tenant(TenantKeys.derive(master, name).tag.hex()))
        environment = Environment(paths[-1], quota=1 << 24)
        environment.put_namespace(TENANT_NAME, name.encode())
        environment.close()
    state.close()
    return paths


RIGHT, WRONG = b"r" * 32, b"w" * 32


def refused(config: Config, master: bytes) -> str:
    """Return what a start and a check beforehand say; nothing on disk changes by it."""

    async def begun() -> None:
        async with bootstrap.service(config, master=master):
            pytest.fail("it has started")

    (config.daemon.state / "master.key").unlink(missing_ok=True)
    with pytest.raises(ConfigError) as checked:
        bootstrap.examine(config, master=master, remote=None)
    with pytest.raises(ConfigError) as started:
        asyncio.run(begun())
    assert str(checked.value) == str(started.value)
    return str(started.value)


def test_a_start_under_a_wrong_key_is_refused_whatever_cannot_be_read(tmp_path) -> None:
    config = configuration(tmp_path)
    first, *_ = stored_under(config, ("uid:1", RIGHT), ("uid:2", RIGHT), ("uid:3", RIGHT))
    unreadable(first)
    assert "(2 tenants) is under another master key than this one, and 1 cannot be read" in refused(
        config, WRONG
    )


def test_a_start_is_refused_where_nobody_can_tell_whether_the_key_is_right(tmp_path) -> None:
    config = configuration(tmp_path)
    (only,) = stored_under(config, ("uid:1", RIGHT))
    unreadable(only)
    for master in (RIGHT, WRONG):
        said = refused(config, master)
        assert "can be read, so nobody can tell whether it is under this master key" in said
        assert f"{only} ([Errno 21] Is a directory: '{only}/00000001/data.mdb')" in said
        mend, anew = said.index(f"must belong to uid {os.geteuid()}"), said.index("remove ")
        assert mend < anew, "what ends it comes before what loses it all"


def test_where_some_tenants_fit_all_else_is_degraded_and_said(tmp_path, caplog) -> None:
    config = configuration(tmp_path)
    _, closed, _ = stored_under(config, ("uid:1", RIGHT), ("uid:2", RIGHT), ("uid:3", WRONG))
    unreadable(closed)
    (config.daemon.state / "master.key").unlink()

    async def begun() -> dict[str, int]:
        async with bootstrap.service(config, master=RIGHT) as service:
            assert service.ready
            return dict(service.overview.degraded)

    assert asyncio.run(begun()) == {"left-out": 1, "other-key": 1}
    assert any("is under another master key" in each.message for each in caplog.records)
    assert any("is left out" in each.message for each in caplog.records)


def test_what_is_set_aside_is_said_at_every_start_and_check(tmp_path, caplog) -> None:
    config = configuration(tmp_path)
    (environment,) = stored_under(config, ("uid:1", RIGHT))
    (config.daemon.state / "master.key").unlink()
    next(environment.glob("*/data.mdb")).write_bytes(b"not a data file")

    async def begun() -> None:
        async with bootstrap.service(config, master=RIGHT) as service:
            assert service.overview.degraded == {"set-aside": 1}

    for _ in range(2):
        caplog.clear()
        asyncio.run(begun())
        said = f"{environment} has files (*.bad-*) that were set aside as damaged; purge its tenant, or move"
        assert any(said in each.message for each in caplog.records)
    assert any(said in note for note in bootstrap.examine(config, master=RIGHT, remote=None).notes)


async def there_and_back(service, name="n", identity=WORLD.identity) -> list[bool]:
    """Store blocks, drop them to the disk, fetch them; tell which came back as they were."""
    deadline = soon()
    namespace = await service.register(TENANT, name, identity)
    bodies = {
        EngineKey(bytes([n]) * 32): WORLD.block(TOKENS, seed=n, first_token=64).numpy().tobytes()
        for n in range(BLOCKS)
    }
    for key, body in bodies.items():
        async with service.blocks.batch(namespace, b"", deadline, durable=False) as batch:
            slot = await batch.reserve(BlockHead(key, TOKENS, first_token=64), len(body))
            slot.write(memoryview(body))
            await batch.commit()
    await service.blocks.demote(namespace, list(bodies), b"", deadline)
    same = []
    for key, body in bodies.items():
        async with service.blocks.read(namespace, key, b"", deadline) as lease:
            got = b"".join(bytes(piece) for piece in lease.pieces())
        if namespace.codec.name == "lossless":
            same.append(got == body)
        else:
            got, want = (
                WORLD.values(torch.from_numpy(np.frombuffer(data, np.uint8).copy()), TOKENS)["v"]
                for data in (got, body)
            )
            same.append(float((got - want).norm() / want.norm()) < 0.1)
    return same


@pytest.mark.asyncio
async def test_without_cuda_everything_is_on_threads_and_nothing_is_pinned(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runtime = fake_cudart.install(monkeypatch, RuntimeError("must not be asked"))
    async with bootstrap.service(configuration(tmp_path)) as service:
        streams = [lane for lane in service._lanes if isinstance(lane, CudaStream)]
        same, pinned = await there_and_back(service), gauge(service, "kvtcd_host_pinned")

    assert (same, pinned, streams, runtime.threads) == ([True] * BLOCKS, 0, [], set())


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["lossless", "kvtc", "kvtc2"])
async def test_a_whole_daemon_on_the_twin_of_a_gpu(tmp_path, twin, name) -> None:
    config = configuration(tmp_path, gpu=1 << 20, name=name)
    await asyncio.to_thread(store, WORLD.profile()[1], config.codec.profiles)
    async with bootstrap.service(config) as service:
        held, pinned = dict(twin.registered), gauge(service, "kvtcd_host_pinned")
        same = await there_and_back(service)
        codec = service.namespace(TENANT, "n").codec
        used = [(made.encodes, made.decodes) for made in fake_nvcomp.Codec.made[1:]]

    assert same == [True] * BLOCKS
    assert (pinned, list(held.values()), twin.registered) == (1, [4 << 20], {})
    assert isinstance(codec.encoder, StagedEncoder)
    assert sorted(used) == [(0, BLOCKS), (BLOCKS, 0)], "one codec each way, on the stream of its stage"


@pytest.mark.asyncio
@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(
    ("device", "where", "want"),
    [("auto", "cpu", "cpu"), ("auto", "cuda", "cuda"), ("cpu", "cuda", "cuda"), ("cpu", "cpu", "cpu")],
)
async def test_a_policy_says_where_its_blocks_are_packed(tmp_path, device, where, want) -> None:
    config = configuration(tmp_path, gpu=0, device=device, name="kvtc2", where=where)
    await asyncio.to_thread(store, WORLD.profile()[1], config.codec.profiles)
    async with bootstrap.service(config) as service:
        same = await there_and_back(service)
        namespace = service.namespace(TENANT, "n")
        threads = {thread.name.rsplit("_", 1)[0] for thread in threading.enumerate()}
    by_nvcomp = sum(made.encodes + made.decodes for made in fake_nvcomp.Codec.made[1:])

    assert same == [True] * BLOCKS
    assert (namespace.codec.device, namespace.lossless.device) == (want, want)
    assert isinstance(namespace.codec.encoder, StagedEncoder) == (want == "cuda")
    assert by_nvcomp == (2 * BLOCKS if want == "cuda" else 0)
    on_threads = "kvtcd-analyze-cpu" if device == "auto" else "kvtcd-analyze"
    assert want == "cuda" or on_threads in threads
    assert ("kvtcd-analyze-reaper" in threads) == (want == "cuda")


@pytest.mark.asyncio
@pytest.mark.usefixtures("twin")
async def test_each_gpu_that_a_policy_names_has_streams_of_its_own(tmp_path, monkeypatch) -> None:
    gpus = {"cuda": torch.device("cpu"), "cuda:1": torch.device("cpu", 0)}  # which torch tells apart
    monkeypatch.setattr(machine, "_cuda", lambda _config, asked: gpus[asked.name])
    config = configuration(tmp_path, gpu=0, device="auto", name="kvtc2", where="cuda:1")
    await asyncio.to_thread(store, WORLD.profile()[1], config.codec.profiles)
    async with bootstrap.service(config) as service:
        same = await there_and_back(service)
        namespace = service.namespace(TENANT, "n")
        threads = {thread.name.rsplit("_", 1)[0] for thread in threading.enumerate()}

    assert same == [True] * BLOCKS
    assert (namespace.codec.device, namespace.lossless.device) == ("cuda:1", "cuda:1")
    assert {f"kvtcd-{name}-cuda1" for name in ("inflate", "synthesize", "analyze", "deflate")} <= threads
    assert "kvtcd-analyze" not in threads, "nothing was packed on the other"
    assert "kvtcd-read-cuda1" not in threads, "one reads the disk for all"


@pytest.mark.usefixtures("twin")
def test_two_names_of_one_gpu_are_one_accelerator(tmp_path) -> None:
    config = configuration(tmp_path, device="auto", name="kvtc2", where="cuda:0")
    found = machine.accelerators(config, load_policies(config.policies), Residency(), print, print)

    assert list(found) == ["cuda", "cuda:0"]
    assert found["cuda"] is found["cuda:0"]
    assert found["cuda"].name == "cuda"


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("cuda", {"cuda": "cuda:0"}), ("cuda:1", {"cuda": "cuda:0", "cuda:1": "cuda:1"}),
        ("cuda:2", r"policies: asks for the CUDA device 2 \(codec.device of policy\), and CUDA finds 2"),
    ],
)  # fmt: skip
def test_a_policy_may_have_blocks_packed_on_any_gpu_that_is_there(tmp_path, monkeypatch, name, want) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = configuration(tmp_path, device="cuda", gpu=0, where=name)
    policies = load_policies(config.policies)
    if name == "cuda:2":
        with pytest.raises(ConfigError, match=want):
            machine.verify(config, policies)
    else:
        machine.verify(config, policies)
        packing = machine._packing(config, policies)
        assert {asked.name: str(machine._cuda(config, asked)) for asked in packing} == want


@pytest.mark.parametrize(
    ("number", "to", "want"),
    [
        (0, "host", ["cuda:0"]), (1, "gpu", ["cuda:1"]), (0, "cuda:0", ["cuda:0"]),
        (1, "cuda:0", ["cuda:1", "cuda:0"]),
        (0, "cuda:2", r"policies: asks for the CUDA device 2 \(promote.to of policy\), and CUDA finds 2"),
        (2, "cuda:0", r"gpu.capacity: asks for the CUDA device 2 \(gpu.device\), and CUDA finds 2"),
    ],
)  # fmt: skip
def test_blocks_lie_on_the_gpu_of_the_configuration_and_those_of_policies(
    tmp_path, monkeypatch, number, to, want
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = configuration(tmp_path, device="cpu", gpu=1 << 20, to=to)
    config = config.model_copy(update={"gpu": config.gpu.model_copy(update={"device": number})})
    policies = load_policies(config.policies)
    if isinstance(want, str):
        with pytest.raises(ConfigError, match=want):
            machine.verify(config, policies)
    else:
        machine.verify(config, policies)
        assert [str(machine._cuda(config, asked)) for asked in machine._holding(config, policies)] == want
        assert [asked.name for asked in machine._holding(config, policies)] == want


@pytest.mark.usefixtures("twin")
def test_each_gpu_that_holds_blocks_has_the_whole_capacity(tmp_path, monkeypatch) -> None:
    config = configuration(tmp_path, device="cpu", gpu=1 << 20, to="cuda:1")
    policies = load_policies(config.policies)
    said = machine.device_memories(config, policies)
    auto = machine.device_memories(configuration(tmp_path, device="cpu", gpu="auto", to="cuda:1"), policies)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    none = machine.device_memories(configuration(tmp_path, device="cpu", gpu="auto", to="cuda:1"), policies)

    assert {name: memory.capacity for name, memory in said.items()} == {"cuda:0": 1 << 20, "cuda:1": 1 << 20}
    fiftieth = (1 << 30) // machine.AUTO_GPU // GRANULE * GRANULE
    assert {name: memory.capacity for name, memory in auto.items()} == {
        "cuda:0": fiftieth, "cuda:1": fiftieth,
    }  # fmt: skip
    assert none == {}


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), ConfigError),
        (torch.AcceleratorError("CUDA error: out of memory"), ConfigError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
    ],
    ids=repr,
)
def test_a_gpu_tier_that_finds_no_memory_is_a_fault_of_the_configuration(
    tmp_path, monkeypatch, error, raised
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(machine, "DeviceMemory", refuse)
    with pytest.raises(raised, match=r"gpu\.capacity.*cannot be had" if raised is ConfigError else "illegal"):
        machine.device_memories(configuration(tmp_path, device="cpu", gpu=1 << 20), ())


def test_a_policy_that_names_a_gpu_where_none_holds_blocks_is_said_before_a_start(tmp_path) -> None:
    for to, said in (("cuda:1", 1), ("gpu", 0), ("host", 0)):
        config = configuration(tmp_path, device="cpu", gpu=0, to=to)
        notes = bootstrap.examine(config, master=None, remote=None).notes
        assert len([note for note in notes if "policy policy has blocks lifted to cuda:1" in note]) == said


RANK_1 = """
[match]
parallel = "tp2-rank1"
[codec]
name = "lossless"
[promote]
to = "cuda:1"
"""


@pytest.mark.asyncio
@pytest.mark.usefixtures("twin")
async def test_the_ranks_of_a_model_are_lifted_to_two_gpus_each_on_its_own_streams(
    tmp_path, monkeypatch
) -> None:
    gpus = {"cuda:0": torch.device("cpu"), "cuda:1": torch.device("cpu", 0)}  # which torch tells apart
    monkeypatch.setattr(machine, "_cuda", lambda _config, asked: gpus[asked.name])
    upload, launched = DeviceMemory.upload, []

    def noted(memory, key, pieces) -> None:
        launched.append((memory.device, fake_cuda.here(), key))
        fake_cuda.launch(lambda: upload(memory, key, pieces))

    monkeypatch.setattr(DeviceMemory, "upload", noted)
    nbytes = -(-WORLD.block(TOKENS, seed=0).numel() // GRANULE) * GRANULE
    config = configuration(tmp_path, device="cpu", gpu=2 * nbytes, to="gpu")
    (tmp_path / "rank1.toml").write_text(RANK_1)
    config = config.model_copy(update={"policies": (tmp_path / "rank1.toml", *config.policies)})
    async with bootstrap.service(config) as service:
        identities = [replace(WORLD.identity, parallel=f"tp2-rank{number}") for number in range(2)]
        same = [await there_and_back(service, f"rank{n}", each) for n, each in enumerate(identities)]
        ranks = [service.namespace(TENANT, f"rank{number}") for number in range(2)]
        for namespace in ranks:
            keys = [EngineKey(bytes([number]) * 32) for number in range(BLOCKS)]
            await service.blocks.prefetch(namespace, keys, b"", soon(), tier=Tier.GPU)
        entries = service._driver.catalog.residents.entries
        found = {(there, entries[key].namespace) for there, _, key in launched}
        stats = service.overview.stats(TENANT).tiers["gpu"].devices
        names = [lane.name for lane in service._lanes if isinstance(lane, CudaStream)]

    assert same == [[True] * BLOCKS] * 2
    assert found == {(gpus["cuda:0"], ranks[0].number), (gpus["cuda:1"], ranks[1].number)}
    assert all(memory == stream for memory, stream, _ in launched)
    held = 2 * nbytes
    assert {(each.capacity, each.used, each.blocks) for each in stats.values()} == {(held, held, 2)}
    assert stats.keys() == gpus.keys()
    assert names == ["copy", "copy-cuda1"]


@pytest.mark.asyncio
@pytest.mark.usefixtures("twin")
async def test_a_gpu_that_only_a_later_policy_asks_for_is_the_cpu(tmp_path, caplog) -> None:
    asking = configuration(tmp_path, gpu=0, device="cpu", where="cuda")
    later = await asyncio.to_thread(load_policies, asking.policies)
    with caplog.at_level(logging.WARNING):
        async with bootstrap.service(configuration(tmp_path, gpu=0, device="cpu")) as service:
            await service.reload(later)
            same = await there_and_back(service)
            device = service.namespace(TENANT, "n").codec.device

        degraded = service.overview.degraded

    assert (same, device, degraded) == ([True] * BLOCKS, "cpu", {"unknown-gpu": 1})
    assert "policy policy has blocks packed on cuda, for which this start has prepared nothing" in caplog.text


@pytest.mark.parametrize(
    ("device", "found", "want"),
    [
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
        ("cuda:1", 1, r"asks for the CUDA device 1 \(codec.device\)"),
    ],
)
def test_codecs_may_have_another_gpu_than_blocks(tmp_path, monkeypatch, device, found, want) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    config = configuration(tmp_path, device=device, gpu=1 << 20)
    (packing,), (holding,) = machine._packing(config, ()), machine._holding(config, ())
    if found == int(device[5:] or 0):
        with pytest.raises(ConfigError, match=want):
            machine._cuda(config, packing)
    else:
        assert str(machine._cuda(config, packing)) == want
    assert str(machine._cuda(config, holding)) == "cuda:0"


@pytest.mark.asyncio
async def test_where_pinning_fails_the_daemon_goes_on(tmp_path, twin, caplog) -> None:
    twin.answer = fake_cudart.OUT_OF_MEMORY
    with caplog.at_level(logging.WARNING):
        async with bootstrap.service(configuration(tmp_path, gpu=1 << 20)) as service:
            same, pinned = await there_and_back(service), gauge(service, "kvtcd_host_pinned")

    assert (same, pinned) == ([True] * BLOCKS, 0)
    assert len([record for record in caplog.records if "LimitMEMLOCK" in record.getMessage()]) == 1


@pytest.mark.asyncio
async def test_a_part_that_is_pinned_is_used_and_told(tmp_path, twin, monkeypatch, caplog) -> None:
    monkeypatch.setattr(memory, "CHUNK", 1 << 20)
    twin.answer, twin.good = fake_cudart.OUT_OF_MEMORY, 3
    with caplog.at_level(logging.WARNING):
        async with bootstrap.service(configuration(tmp_path, gpu=1 << 20)) as service:
            held = list(twin.registered.values())
            same, share = await there_and_back(service), gauge(service, "kvtcd_host_pinned")

    assert (same, share, held, twin.registered) == ([True] * BLOCKS, 0.75, [1 << 20] * 3, {})
    assert twin.devices == {torch.device("cpu")}, "which is the only device of the twin"
    assert any("1,048,576 of 4,194,304 bytes" in record.getMessage() for record in caplog.records)


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [0, 1])
async def test_for_regions_alone_memory_is_pinned_by_the_device_that_is_named(tmp_path, twin, number) -> None:
    config = configuration(tmp_path, device="cpu", gpu=0)
    gpu = config.gpu.model_copy(update={"regions": True, "device": number})
    config = config.model_copy(update={"gpu": gpu})
    async with bootstrap.service(config) as service:
        assert gauge(service, "kvtcd_host_pinned") == 1

    assert twin.devices == {torch.device("cuda", number)}


@pytest.mark.asyncio
@pytest.mark.usefixtures("twin")
async def test_a_gpu_that_only_holds_blocks_packs_none(tmp_path) -> None:
    config = configuration(tmp_path, device="cpu", gpu=1 << 20)
    async with bootstrap.service(config) as service:
        streams = [lane.name for lane in service._lanes if isinstance(lane, CudaStream)]
        same, pinned = await there_and_back(service), gauge(service, "kvtcd_host_pinned")
        codec = service.namespace(TENANT, "n").codec

    assert (same, pinned, streams) == ([True] * BLOCKS, 1, ["copy"])
    assert not isinstance(codec.encoder, StagedEncoder)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("asked", "field", "why"),
    [
        ({"device": "cuda", "gpu": 0}, "codec.device", "CUDA finds 0"),
        ({"device": "cpu", "gpu": 1 << 20}, "gpu.capacity", "CUDA finds 0"),
        ({"host": 1 << 44}, "host.capacity", "16 TiB is more than the .* GiB of memory of this machine"),
    ],
)
async def test_what_this_machine_does_not_have_is_refused_alike_by_a_start_and_by_check(
    tmp_path, monkeypatch, asked, field, why
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = configuration(tmp_path, **asked)
    path = tmp_path / "config.toml"
    await asyncio.to_thread(path.write_text, dump(config))
    with pytest.raises(ConfigError, match=why) as started:
        async with bootstrap.service(await asyncio.to_thread(load, path)):
            pass
    checked = await asyncio.to_thread(CliRunner().invoke, cli.app, ["check", "--config", str(path)])

    assert (started.value.path, started.value.field) == (str(path), field)
    assert isinstance(checked.exception, ConfigError)
    assert str(checked.exception) == str(started.value)
    assert not (tmp_path / "state").exists()


@pytest.mark.asyncio
async def test_a_start_that_has_no_folder_for_its_socket_makes_nothing(tmp_path) -> None:
    config = configuration(tmp_path)
    elsewhere = config.daemon.model_copy(update={"socket": tmp_path / "run" / "kvtcd.sock"})
    with pytest.raises(ConfigError, match=f"create it for uid {os.geteuid()}") as error:
        await serve(config.model_copy(update={"daemon": elsewhere}))

    assert error.value.field == "daemon.socket"
    assert not (tmp_path / "state").exists()


@pytest.mark.asyncio
async def test_a_port_that_is_taken_is_refused_by_the_file_and_field_that_ask_for_it(tmp_path) -> None:
    path, tokens = tmp_path / "other.toml", tmp_path / "tokens.toml"
    tokens.write_text(f'[[token]]\nsha256 = "{"a" * 64}"\ntenant = "team"\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        path.write_text(
            f'[daemon]\nstate = "state"\nsocket = "socket"\n[host]\ncapacity = "4 MiB"\n'
            f'[disk]\ncapacity = 0\n[tcp]\nlisten = "{address}"\ntokens = "{tokens}"\n'
        )
        with pytest.raises(ConfigError) as error:
            await serve(await asyncio.to_thread(load, path))

    assert (error.value.path, error.value.field) == (str(path), "tcp.listen")
    assert f"{address} cannot be bound: Address already in use" in str(error.value)


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(("asked", "limit"), [("auto", (1 << 30) // machine.AUTO_CODEC), (5000, 5000)])
def test_what_codecs_have_of_a_gpu_is_bounded(tmp_path, monkeypatch, asked, limit) -> None:
    products = SimpleNamespace(allow_bf16_reduced_precision_reduction=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", products)
    config = configuration(tmp_path)
    config = config.model_copy(update={"codec": config.codec.model_copy(update={"memory": asked})})
    residency, spared, cpu = Residency(), [], torch.device("cpu")
    (made,) = machine.accelerators(config, (), residency, spared.append, print).values()
    made.spared("memory")
    residency.take(cpu, limit - 100)
    with residency.hold("fits", cpu, 100, list):
        pass
    with pytest.raises(torch.OutOfMemoryError), residency.hold("does not", cpu, 101, list):
        pass

    assert (made.residency, spared) == (residency, ["memory"])
    assert products.allow_bf16_reduced_precision_reduction is False, "sums are float32"


@pytest.mark.asyncio
@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("call", ["record", "synchronize"])
async def test_what_only_the_host_has_when_the_gpu_is_lost_is_written_by_the_cpu(
    tmp_path, monkeypatch, call
) -> None:
    told, deadline, key = [], soon(), EngineKey(b"k" * 32)
    body = WORLD.block(TOKENS, seed=9, first_token=64).numpy().tobytes()
    config = configuration(tmp_path, gpu=1 << 20, name="kvtc2")
    await asyncio.to_thread(store, WORLD.profile()[1], config.codec.profiles)
    async with bootstrap.service(config, lost=told.append) as service:
        same = await there_and_back(service)
        namespace = service.namespace(TENANT, "n")
        before = list(told)
        fake_cuda.break_down(monkeypatch, call)
        async with service.blocks.batch(namespace, b"", deadline, durable=False) as batch:
            slot = await batch.reserve(BlockHead(key, TOKENS, first_token=64), len(body))
            slot.write(memoryview(body))
            await batch.commit()
        written = await service.blocks.flush(namespace, [key], b"", deadline)
        async with service.blocks.read(namespace, key, b"", deadline) as lease:
            still = b"".join(bytes(piece) for piece in lease.pieces())
        counted = service.metrics.registry.get_sample_value(
            "kvtcd_lossless_fallbacks_total", {"reason": "device-lost"}
        )
    async with bootstrap.service(configuration(tmp_path, device="cpu", gpu=0, name="kvtc2")) as service:
        namespace = service.namespace(TENANT, "n")
        async with service.blocks.read(namespace, key, b"", soon()) as lease:
            again = b"".join(bytes(piece) for piece in lease.pieces())

    assert (same, before) == ([True] * BLOCKS, [])
    assert isinstance(told[0], DeviceLost)
    assert [result.outcome for result in written] == ["stored"]
    assert (still == body, again == body) == (True, True), "losslessly, although its policy says kvtc2"
    assert counted == 1


@pytest.mark.asyncio
@pytest.mark.usefixtures("twin")
async def test_a_process_whose_gpu_is_lost_ends_with_that_error(tmp_path, monkeypatch) -> None:
    on_each, listening = bootstrap.on_each, asyncio.Event()
    loop, listeners = asyncio.get_running_loop(), []

    def made(devices, lost):
        listeners.append(lost)
        loop.call_soon_threadsafe(listening.set)
        return on_each(devices, lost)

    monkeypatch.setattr(bootstrap, "on_each", made)
    running = asyncio.create_task(serve(configuration(tmp_path, gpu=1 << 20)))
    async with asyncio.timeout(PATIENCE_S):
        await listening.wait()
        await asyncio.to_thread(listeners[0], DeviceLost("cuda:0", "an illegal memory access"))
        with pytest.raises(DeviceLost):
            await running


@pytest.mark.gpu
@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["lossless", "kvtc", "kvtc2"])
async def test_a_whole_daemon_on_a_gpu(tmp_path, name, monkeypatch) -> None:
    monkeypatch.setattr(nvcomp, "CROSSOVER", 1)
    config = configuration(tmp_path, gpu=1 << 20, name=name)
    await asyncio.to_thread(store, WORLD.profile()[1], config.codec.profiles)
    async with bootstrap.service(config) as service:
        same = await there_and_back(service)

    assert same == [True] * BLOCKS
