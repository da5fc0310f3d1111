"""Real stores do what the one in a dict does: the same histories, the same answers."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
from support import redis_servers
from support.fake_store import FakeStore
from support.s3_service import BUCKET, s3

from kvtcd.tiers.remote.redis_store import RedisStore
from kvtcd.tiers.remote.s3_store import S3Store

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]
MOST = 1 << 20
ENTRY = {"key_id": "k", "secret": "s"}
SECRET, WRONG = "a-secret", "another-secret"
NAMES = [f"{tag}/{space}/{number}" for tag in ("aa", "a*") for space in ("n", "m") for number in range(4)]
REDIS = pytest.param("redis", marks=redis_servers.needed)
CLUSTER = pytest.param("cluster", marks=redis_servers.needed)


@asynccontextmanager
async def store_of(kind: str, folder):
    """Run a real store, and yield a client of it."""
    if kind == "s3":
        with s3() as url:
            store = S3Store(
                BUCKET,
                prefix="some/where",
                timeout=60,
                endpoint=url,
                region="us-east-1",
                key_id="k",
                secret="s",  # noqa: S106 - of a server of this test
            )
            try:
                yield store
            finally:
                await store.close()
        return
    scope = redis_servers.single if kind == "redis" else redis_servers.cluster
    async with scope(folder) as found:
        nodes = found if isinstance(found, list) else [found]
        store = RedisStore(
            [("127.0.0.1", node.port) for node in nodes], cluster=kind == "cluster", timeout=60
        )
        try:
            yield store
        finally:
            await store.close()


@pytest.mark.parametrize("kind", [REDIS, CLUSTER, "s3"])
async def test_random_histories_have_the_answers_of_the_model(tmp_path, kind: str) -> None:
    luck, model = random.Random(kind), FakeStore()
    async with store_of(kind, tmp_path) as real:
        for _ in range(60):
            some = luck.sample(NAMES, luck.randint(1, len(NAMES)))
            match luck.choice(["put", "put", "get", "exists", "delete", "list"]):
                case "put":
                    items = [(name, luck.randbytes(luck.choice([1, 100, 70_000])), 1000) for name in some]
                    assert await real.put(items) == await model.put(items)
                case "get":
                    assert await real.get(some, MOST) == await model.get(some, MOST)
                case "exists":
                    assert await real.exists(some) == await model.exists(some)
                case "delete":
                    assert await real.delete(some) == await model.delete(some)
                case _:
                    for prefix in ("aa/n/", "a*/m/", "none/"):
                        listed = {name async for name in real.listing(prefix)}
                        assert listed == {name async for name in model.listing(prefix)}


@pytest.mark.parametrize("kind", [REDIS, CLUSTER, "s3"])
async def test_no_more_is_read_than_a_value_may_have(tmp_path, kind: str) -> None:
    async with store_of(kind, tmp_path) as store:
        await store.put([("a", b"x" * 5000, None)])
        (answer,) = await store.get(["a"], 100)

    assert isinstance(answer, bytes)
    assert len(answer) <= 101


@redis_servers.needed
async def test_a_value_has_its_time_to_live_and_what_is_no_value_is_no_record(tmp_path) -> None:
    async with redis_servers.single(tmp_path) as server:
        store = RedisStore([("127.0.0.1", server.port)], cluster=False, timeout=60)
        await store.put([("a", b"1", 500), ("b", b"2", None)])
        await server.ask("RPUSH", "list", "x")
        ttls = [await server.ask("TTL", name) for name in ("a", "b")]
        answer = await store.get(["list"], MOST)
        await store.close()

    assert 0 < ttls[0] <= 500
    assert ttls[1] == -1
    assert answer == [b"\0"]


@redis_servers.needed
async def test_a_node_that_is_away_costs_its_own_names_alone(tmp_path) -> None:
    names = [f"name/{number}" for number in range(200)]
    async with redis_servers.cluster(tmp_path) as nodes:
        store = RedisStore([("127.0.0.1", node.port) for node in nodes], cluster=True, timeout=5)
        assert await store.put([(name, name.encode(), None) for name in names]) == [None] * 200
        await asyncio.to_thread(nodes[1].kill)
        for _ in range(5):
            answers = await store.get(names, MOST)
            there = [answer for name, answer in zip(names, answers, strict=True) if answer == name.encode()]
            assert 100 < len(there) < 160
            assert all(isinstance(answer, Exception) for answer in answers if not isinstance(answer, bytes))
        with pytest.raises(Exception, match=r".+"):
            _ = [name async for name in store.listing("name/")]
        nodes[1].start()
        await nodes[1].ready()
        async with asyncio.timeout(60):
            while any(isinstance(a, Exception) for a in await store.get(names, MOST)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        await store.close()


@redis_servers.needed
async def test_a_password_is_given_and_in_no_error(tmp_path) -> None:
    async with redis_servers.single(tmp_path) as server:
        await server.ask("CONFIG", "SET", "requirepass", SECRET)
        entered = RedisStore([("127.0.0.1", server.port)], cluster=False, timeout=60, password=SECRET)
        assert await entered.put([("a", b"1", None)]) == [None]
        await entered.close()
        refused = RedisStore(
            [("127.0.0.1", server.port)],
            cluster=False,
            timeout=60,
            password="another-secret",  # noqa: S106 - of a server of this test
        )
        with pytest.raises(Exception, match=r".+") as told:
            await refused.get(["a"], MOST)
        await refused.close()

    assert WRONG not in str(told.value) + repr(refused)


@pytest.mark.parametrize("kind", ["redis", "cluster", "s3"])
async def test_a_store_that_is_not_there_raises(kind: str) -> None:
    if kind == "s3":
        store = S3Store(
            BUCKET,
            prefix="",
            timeout=1,
            endpoint="http://127.0.0.1:9",
            region="r",
            key_id="k",
            secret="s",  # noqa: S106 - of a server of this test
        )
    else:
        store = RedisStore([("127.0.0.1", 9)], cluster=kind == "cluster", timeout=1)
    with pytest.raises(Exception, match=r".+"):
        await store.get(["a"], MOST)
    with pytest.raises(Exception, match=r".+"):
        await store.put([("a", b"1", None)])
    await store.close()
