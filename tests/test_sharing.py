"""Two daemons, real processes with disks of their own, share a real store: Redis, three of them, or S3."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from support import redis_servers
from support.codec_world import World, kv
from support.models import random_model, real_model, tiny_llama_config
from support.patience import PATIENCE_S
from support.prefixes import BLOCK_TOKENS, assert_equal, identity_for, read, sequence
from support.s3_service import BUCKET, s3

from kvtcd.codec.profile import store
from kvtcd.config.remote import Remote
from kvtcd.core.errors import Busy, KvtcdError, NotFound
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import Tier
from kvtcd.integrations.transformers_cache import PrefixCache
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtcd.client import Client

pytestmark = pytest.mark.slow
ENTRY = 'key_id = "k"\nsecret = "s"\n'
KINDS = [
    pytest.param("redis", marks=redis_servers.needed),
    pytest.param("cluster", marks=redis_servers.needed),
    "s3",
]
WORLD = World(kv())


@contextmanager
def shared(kind: str, folder: Path) -> Iterator[tuple[Remote, list[redis_servers.Server]]]:
    """Run a store; yield what a configuration says of it, and its nodes."""
    patient = {"look": 10.0, "timeout": 10.0, "believe_absent": 0.0}
    if kind == "s3":
        entry = folder / "entry.toml"
        entry.touch(0o600)
        entry.write_text(ENTRY)
        with s3() as url:
            yield Remote(url=f"s3://{BUCKET}/shared", endpoint=url, credentials=str(entry), **patient), []
        return
    options = redis_servers.CLUSTER if kind == "cluster" else ()
    with redis_servers.servers(folder, 3 if kind == "cluster" else 1, *options) as nodes:
        asyncio.run(redis_servers.joined(nodes) if kind == "cluster" else nodes[0].ready())
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        yield Remote(url=f"redis{'+cluster' if kind == 'cluster' else ''}://{hosts}", **patient), nodes


@contextmanager
def daemons(
    remote: Remote,
    *,
    count: int = 2,
    codec: str = "lossless",
    profiles: tuple[Path | None, ...] = (None, None),
):
    """Run daemons with one master key and a store in common; yield their folders and clients."""
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name, ExitStack() as stack:
        found = []
        for number in range(count):
            folder = Path(name) / str(number)
            state = folder / "state"
            state.mkdir(mode=0o700, parents=True)
            (state / "master.key").touch(0o600)
            (state / "master.key").write_bytes(bytes(range(32)))
            policy = folder / "policy.toml"
            policy.write_text(f"[codec]\n{codec if '=' in codec else f'name = {codec!r}'}\n")
            daemon = Daemon(
                folder, host=64 << 20, disk=256 << 20, profiles=profiles[number] or folder / "profiles",
                policy=policy, remote=remote, stop_seconds=20.0,
            )  # fmt: skip
            stack.enter_context(daemon)
            found.append((folder, stack.enter_context(daemon.client())))
        yield found


def figures(client: Client) -> dict[str, int]:
    return client.stats()["remote"]


def until(true, what: str = "") -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def sent(client: Client) -> None:
    """Wait until nothing waits to be written."""
    until(lambda: figures(client)["queue_blocks"] == 0)


def body(number: int) -> bytes:
    """A block of the namespace that the tests without a model use."""
    return np.random.default_rng(number).integers(0, 9, WORLD.identity.layout.nbytes(32), np.uint8).tobytes()


def key(number: int) -> EngineKey:
    return EngineKey(number.to_bytes(32, "big"))


def put(client: Client, number: int) -> None:
    head = BlockHead(key(number), WORLD.identity.block_tokens, first_token=0)
    client.put("n", head, body(number), durable=True)


def until_had(client: Client, number: int) -> bytes:
    """Read a block; one whose profile is on its way is for later readers."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return client.get("n", key(number))
        except (NotFound, Busy):
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_stored_through_one_daemon_is_read_by_a_model_behind_the_other(tmp_path, kind: str) -> None:
    model, tokens = random_model(tiny_llama_config()), sequence(6 * BLOCK_TOKENS)
    with shared(kind, tmp_path) as (remote, _), daemons(remote) as ((_, one), (_, two)):
        own, other = (PrefixCache(client, identity_for(model, kind)) for client in (one, two))
        cache = read(model, tokens)
        own.save(cache, tokens, durable=True)
        sent(one)
        found = two.match_tokens(other.namespace, tokens)
        loaded = other.load([*tokens, 1])
        numbers = figures(two)

    assert set(found.tiers) == {Tier.REMOTE}
    assert found.prefix_tokens == len(tokens)
    assert_equal(loaded.cache, cache)
    assert (numbers["hits"], numbers["refused"], numbers["failed"]) == (6, 0, 0)


@redis_servers.needed
def test_a_node_killed_in_mid_traffic_is_no_error_to_anybody_and_hits_resume(tmp_path) -> None:
    with shared("cluster", tmp_path) as (remote, nodes), daemons(remote) as ((_, one), (_, two)):
        for client in (one, two):
            client.register("n", WORLD.identity)
        for number in range(60):
            put(one, number)
        sent(one)
        errors, wrong, stop = list[Exception](), list[int](), threading.Event()

        def traffic(client: Client, first: int, step: int) -> None:
            number = first
            while not stop.is_set():
                number += step
                try:
                    put(client, 1000 + number)
                    client.match("n", [key(n) for n in range(number, number + 8)])
                    if bytes(client.get("n", key(number % 60))) != body(number % 60):
                        wrong.append(number)
                except NotFound:
                    continue  # a miss
                except KvtcdError as error:
                    errors.append(error)

        threads = [threading.Thread(target=traffic, args=(client, 0, 1)) for client in (one, two, two)]
        for thread in threads:
            thread.start()
        until(lambda: figures(two)["hits"] > 5, "hits before")
        nodes[2].kill()
        after = figures(two)["misses"] + figures(two)["failed"] + figures(two)["hits"]
        until(
            lambda: sum(figures(two)[n] for n in ("misses", "failed", "hits", "written")) > after + 5,
            "traffic",
        )
        nodes[2].start()
        asyncio.run(nodes[2].ready())
        before = figures(one)["written"]
        until(
            lambda: figures(one)["written"] > before + 5 and figures(one)["breaker"] == "closed",
            "written again",
        )
        stop.set()
        for thread in threads:
            thread.join()
        batches = itertools.count(5000, 30)

        def found() -> bool:
            """Store new blocks through one daemon; tell whether the other finds all of them, on all nodes."""
            fresh = range(start := next(batches), start + 30)
            for number in fresh:
                put(one, number)
            sent(one)
            tiers = two.match("n", [key(n) for n in fresh]).tiers
            if set(tiers) != {Tier.REMOTE}:
                return False
            wrong.extend(n for n in fresh if bytes(two.get("n", key(n))) != body(n))
            return True

        until(found, "blocks of all nodes are found again")

    assert (errors, wrong) == ([], [])


@pytest.mark.parametrize("kind", [KINDS[1], "s3"])
def test_a_profile_that_a_blob_names_is_fetched_and_verified(tmp_path, kind: str) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    path = store(WORLD.profile()[1], mine)
    codec = 'name = "kvtc2"\nratio = 8\nwindow = 0'
    block = WORLD.block(32, seed=1, first_token=64).numpy().tobytes()
    with (
        shared(kind, tmp_path) as (remote, _),
        daemons(remote, codec=codec, profiles=(mine, theirs)) as ((_, one), (_, two)),
    ):
        packed = [client.register("n", WORLD.identity).codec for client in (one, two)]
        one.put("n", BlockHead(key(1), 32, first_token=64), block, durable=True)
        sent(one)
        got = bytes(until_had(two, 1))
        kept = [found.read_bytes() for found in theirs.glob("*.safetensors")]
        until(lambda: two.namespace("n").codec == packed[0], "the namespace is packed with it, too")

    want, have = (
        WORLD.values(torch.from_numpy(np.frombuffer(b, np.uint8).copy()), 32)["v"] for b in (block, got)
    )
    assert packed[0] != packed[1] == "lossless"
    assert kept == [path.read_bytes()]
    assert float((have - want).norm() / want.norm()) < 0.1


@pytest.mark.model
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", [KINDS[1], "s3"])
def test_a_real_model_goes_on_from_what_another_host_has_read(tmp_path, kind: str) -> None:
    """SmolLM2-135M: losslessly, so that what it says is what it would say from its own cache."""
    loaded = real_model("smollm2")
    from kvtcd.lab.models import identity, tokenize  # noqa: PLC0415 - with what runs models

    text = (Path(__file__).parent / "data" / "encyclopedia.txt").read_text("utf-8")
    tokens, named = tokenize(loaded, text)[:1025], identity(loaded)
    with shared(kind, tmp_path) as (remote, _), daemons(remote) as ((_, one), (_, two)):
        own, other = PrefixCache(one, named), PrefixCache(two, named)
        cache = read(loaded.model, tokens[:1024])
        own.save(cache, tokens[:1024], durable=True)
        sent(one)
        known = other.load(tokens)
        numbers = figures(two)
        said = [
            loaded.model.generate(torch.tensor([tokens]), cache=each, max_new_tokens=20, do_sample=False)[
                0
            ].tolist()
            for each in (known.cache, cache)
        ]

    assert numbers["hits"] == 1024 // named.block_tokens
    assert said[0] == said[1]
