"""What a card has to prove besides bytes: memory that ends, a policy's device, a process lost with its card.

Each on a twin as well, so that what is run on a card for the first time has run before.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from support import twin
from support.codec_world import World, kv
from support.patience import PATIENCE_S
from support.staged import FIRST, TOKENS, decode, encode
from support.toy import soon

from kvtcd import bootstrap
from kvtcd.client import Client
from kvtcd.codec.choose import codec_for
from kvtcd.codec.profile import store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.residency import Residency
from kvtcd.codec.staged import Accelerator, StagedEncoder
from kvtcd.config import Config, dump
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.policy import CodecChoice
from kvtcd.lab.second_device import DEVICE, Operation, SecondDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parent.parent
KINDS = pytest.mark.parametrize("kind", ["twin", pytest.param("cuda", marks=pytest.mark.gpu)])
WORLD = World(kv())
KEY = EngineKey(b"k" * 32)
CARD = torch.device("cuda", 0)


@contextmanager
def without_memory(kind: str) -> Iterator[Callable[[], int]]:
    """Let nothing more be allocated on the device; give what says how often that was refused meanwhile."""
    if kind == "twin":
        times = []

        def refuse(operation: Operation) -> None:
            if operation.launches:
                times.append(operation.name)
                raise torch.OutOfMemoryError("CUDA out of memory")

        with SecondDevice(refuse):
            yield lambda: len(times)
        return
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(CARD).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(CARD) / whole, CARD)
    ballast = []
    try:
        for size in (1 << 20, 1 << 16, 512):  # what is left of segments in use
            with suppress(torch.OutOfMemoryError):
                while True:
                    ballast.append(torch.empty(size, dtype=torch.uint8, device=CARD))
        before = torch.cuda.memory_stats(CARD)["num_ooms"]
        yield lambda: torch.cuda.memory_stats(CARD)["num_ooms"] - before
    finally:
        ballast.clear()
        torch.cuda.set_per_process_memory_fraction(1.0, CARD)


@KINDS
@pytest.mark.parametrize(
    "choice", [CodecChoice("kvtc", 4, window=20), CodecChoice("kvtc2", 12, window=20)], ids=str
)
def test_where_a_device_has_no_memory_blocks_are_packed_all_the_same(tmp_path, kind, choice) -> None:
    store(WORLD.profile()[1], tmp_path)
    raw, spared = WORLD.block(TOKENS, seed=1, first_token=FIRST), []
    plain = codec_for(WORLD.identity, choice, ProfileFolder(tmp_path))
    with SecondDevice() if kind == "twin" else nullcontext():
        residency = Residency()
        accelerator = (
            Accelerator(DEVICE, residency=residency, spared=spared.append)
            if kind == "twin"
            else Accelerator.on(CARD, residency, spared.append)
        )
        staged = codec_for(WORLD.identity, choice, ProfileFolder(tmp_path, residency), accelerator)
        blob = encode(staged, raw).blob
        decode(staged, blob, raw.numel())
    assert spared == []
    with without_memory(kind) as refused:
        got = encode(staged, raw).blob
        back = decode(staged, blob, raw.numel())
        times = refused()
        if kind == "cuda":
            torch.cuda.synchronize(CARD)
    assert times > 0
    assert kind == "cuda" or spared == ["memory"] * 2  # on a card bases may have made room enough
    assert apart(back, decode(plain, blob, raw.numel())) < 0.01
    assert apart(decode(plain, got, raw.numel()), raw.numpy()) < 0.5


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """How far the values of two raw blocks are from each other, as a share."""
    tokens = TOKENS if one.nbytes == WORLD.identity.layout.nbytes(TOKENS) else 32
    first, second = (WORLD.values(torch.from_numpy(raw), tokens)["v"] for raw in (one, other))
    return float((first - second).norm() / second.norm())


def configuration(folder: Path, where: str) -> Config:
    """Of a daemon that packs with `kvtc2` on this device, and has a tier on a GPU."""
    (folder / "profiles").mkdir()
    policy = folder / "policy.toml"
    policy.write_text(
        f'[codec]\nname = "kvtc2"\nratio = 8\nwindow = 0\ndevice = "{where}"\n[promote]\nto = "gpu"\n'
    )
    return Config.model_validate(
        {
            "daemon": {"state": folder / "state", "socket": folder / "socket", "stop_seconds": PATIENCE_S},
            "host": {"capacity": 4 << 20},
            "gpu": {"capacity": 1 << 20},
            "disk": {"capacity": 64 << 20},
            "codec": {"device": "cuda", "profiles": folder / "profiles", "threads": 1},
            "policies": [policy],
        }
    )


@KINDS
@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["cpu", "cuda"])
async def test_blocks_are_packed_where_their_policy_says(tmp_path, monkeypatch, kind, where) -> None:
    if kind == "twin":
        twin.install(monkeypatch)
    config, raw = configuration(tmp_path, where), WORLD.block(32, seed=1, first_token=64).numpy()
    await asyncio.to_thread(store, WORLD.profile()[1], config.codec.profiles)
    async with bootstrap.service(config) as service:
        namespace = await service.register("uid:1", "n", WORLD.identity)
        async with service.blocks.batch(namespace, b"", soon(), durable=False) as batch:
            slot = await batch.reserve(BlockHead(KEY, 32, first_token=64), raw.nbytes)
            slot.write(memoryview(raw))
            await batch.commit()
        await service.blocks.demote(namespace, [KEY], b"", soon())
        async with service.blocks.read(namespace, KEY, b"", soon()) as lease:
            back = b"".join(bytes(piece) for piece in lease.pieces())
        threads = {thread.name.rsplit("_", 1)[0] for thread in threading.enumerate()}
        staged = isinstance(namespace.codec.encoder, StagedEncoder)
    assert apart(np.frombuffer(back, np.uint8).copy(), raw) < 0.1
    assert (namespace.codec.device, staged) == (where, where == "cuda")
    assert ("kvtcd-analyze-reaper" in threads) == (where == "cuda")
    assert ("kvtcd-analyze-cpu" in threads) == (where == "cpu")


LOSES = """
import os, sys, threading
from kvtcd import bootstrap, cli
from kvtcd.core.errors import DeviceLost
kind, config = sys.argv[1:]
if kind == "twin":
    import pytest
    from support import twin
    twin.install(pytest.MonkeyPatch())
on_each = bootstrap.on_each

def listening(devices, lost, **more):
    def tell():
        os.read(0, 1)
        lost(DeviceLost("cuda:0", "a fault that a test has made up"))
    threading.Thread(target=tell, daemon=True).start()
    return on_each(devices, lost, **more)

bootstrap.on_each = listening
sys.argv = ["kvtcd", "serve", "--config", config]
cli.main()
"""


@KINDS
def test_a_process_that_has_lost_its_device_ends_with_70(tmp_path, kind) -> None:
    config = configuration(tmp_path, "cuda")
    store(WORLD.profile()[1], config.codec.profiles)
    path = tmp_path / "config.toml"
    path.write_text(dump(config))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    raw = WORLD.block(32, seed=1, first_token=64).numpy().tobytes()
    with subprocess.Popen(
        [sys.executable, "-c", LOSES, kind, str(path)], stdin=subprocess.PIPE, env=environment
    ) as process:
        try:
            with Client(config.daemon.socket) as client:
                while not client.ready():
                    assert process.poll() is None
                    time.sleep(0.05)
                client.register("n", WORLD.identity)
                head = BlockHead(KEY, tokens=32, first_token=64)
                assert client.put("n", head, raw, durable=True).outcome == "stored", (
                    "so that the device packs it"
                )
            process.stdin.write(b"!")
            process.stdin.flush()
            assert process.wait(PATIENCE_S) == 70
        finally:
            process.kill()
