"""Real stores do what the one in a dict does: the same histories, the same answers."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import ConnectionError, NoPermissionError, RedisError, TimeoutError  # noqa: A004
from support import redis_servers
from support.authority import Authority
from support.fake_store import FakeStore
from support.patience import PATIENCE_S
from support.ports import free_port
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
                timeout=PATIENCE_S,
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
            [("127.0.0.1", node.port) for node in nodes], cluster=kind == "cluster", timeout=PATIENCE_S
        )
        try:
            yield store
        finally:
            await store.close()


async def got(store, names, most: int = MOST) -> list[bytes | Exception | None]:
    """Return what a store hands out of each name, None if nothing, or its error."""
    values = {}

    def came(name: str, value) -> None:
        assert name not in values, "once is enough"
        values[name] = bytes(value)

    there = await store.get(names, most, came)
    assert [name in values for name in names] == [one is True for one in there]
    return [
        one if isinstance(one, Exception) else values.get(name)
        for name, one in zip(names, there, strict=True)
    ]


@pytest.mark.parametrize("kind", [REDIS, CLUSTER, "s3"])
async def test_random_histories_have_the_answers_of_the_model(tmp_path, kind: str) -> None:
    luck, model = random.Random(kind), FakeStore()
    async with store_of(kind, tmp_path) as real:
        for _ in range(60):
            some = luck.sample(NAMES, luck.randint(1, len(NAMES)))
            match luck.choice(["put", "put", "get", "exists", "delete", "list"]):
                case "put":
                    items = [(name, (luck.randbytes(luck.choice([1, 100, 70_000])),), 1000) for name in some]
                    assert await real.put(items) == await model.put(items)
                case "get":
                    assert await got(real, some, MOST) == await got(model, some, MOST)
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
        await store.put([("a", (b"x" * 5000,), None)])
        (answer,) = await got(store, ["a"], 100)

    assert isinstance(answer, bytes)
    assert len(answer) <= 101


@pytest.mark.parametrize("kind", [REDIS, CLUSTER, "s3"])
async def test_pieces_of_a_value_are_those_of_the_model(tmp_path, kind: str) -> None:
    value, model = random.Random(1).randbytes(200_000), FakeStore()
    bounds = [(0, 10), (0, 1 << 20), (199_999, 5), (200_000, 5), (300_000, 5), (70_000, 70_000)]
    async with store_of(kind, tmp_path) as store:
        for each in (store, model):
            assert await each.put([("a", (value,), None)]) == [None]
        for name in ("a", "none"):
            found = [bytes(await store.piece(name, *bound)) for bound in bounds]
            assert found == [await model.piece(name, *bound) for bound in bounds]


SIZES = [1, 65_535, 65_536, 65_537, 131_072, 1 << 20, (4 << 20) + 13]


@pytest.mark.parametrize("kind", [REDIS, CLUSTER, "s3"])
async def test_values_of_all_sizes_come_back_whole_and_together(tmp_path, kind: str) -> None:
    values = {f"value/{size}": random.Random(size).randbytes(size) for size in SIZES * 2}
    names = [*values, "none"]
    async with store_of(kind, tmp_path) as store:
        assert await store.put(
            [(name, (value[:100], memoryview(value)[100:]), None) for name, value in values.items()]
        ) == [None] * len(SIZES)
        found = await asyncio.gather(*(got(store, names, 8 << 20) for _ in range(4)))

    assert found == [[*values.values(), None]] * 4


@pytest.mark.parametrize("kind", [REDIS, CLUSTER])
async def test_large_values_are_received_by_themselves(tmp_path, kind: str) -> None:
    """So they are while the library is what its connections here were fitted to."""
    kinds = []
    async with store_of(kind, tmp_path) as store:
        await store.put([("large", (bytes(1 << 20),), None)])
        for _ in range(3):
            await store.get(["large"], MOST, lambda _, value: kinds.append(type(value)))

    assert kinds == [memoryview] * 3


async def _away(store: RedisStore) -> bool:
    try:
        await store.exists(["none"])
    except RedisError:
        return True
    return False


@redis_servers.needed
async def test_values_travel_encrypted_if_asked_for(tmp_path) -> None:
    authority = Authority(tmp_path)
    certificate, secret = authority.issue("127.0.0.1")
    tls = ("--port", "0", "--tls-port")
    options = (
        "--tls-cert-file", str(certificate), "--tls-key-file", str(secret),
        "--tls-ca-cert-file", str(authority.root), "--tls-auth-clients", "no",
    )  # fmt: skip
    values = {f"value/{size}": random.Random(size).randbytes(size) for size in SIZES}
    with redis_servers.servers(tmp_path, 1, *tls, str(port := free_port()), *options):
        store = RedisStore(
            [("127.0.0.1", port)], cluster=False, timeout=PATIENCE_S, tls=True, authority=str(authority.root)
        )
        async with asyncio.timeout(PATIENCE_S):
            while await _away(store):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        assert await store.put(
            [(name, (value[:100], memoryview(value)[100:]), None) for name, value in values.items()]
        ) == [None] * len(SIZES)
        found = await got(store, [*values], 8 << 20)
        await store.close()
        other = Authority(tmp_path / "other")
        other.folder.mkdir()
        refused = RedisStore(
            [("127.0.0.1", port)], cluster=False, timeout=PATIENCE_S, tls=True, authority=str(other.root)
        )
        with pytest.raises(RedisError, match="CERTIFICATE_VERIFY_FAILED"):
            await got(refused, [*values], 8 << 20)
        await refused.close()

    assert found == [*values.values()]


@redis_servers.needed
async def test_an_error_among_large_values_is_that_of_its_name_alone(tmp_path) -> None:
    large = random.Random(1).randbytes(1 << 20)
    async with redis_servers.single(tmp_path) as server:
        await server.ask("ACL", "SETUSER", "reader", "on", ">a-secret", "~mine/*", "+@all")
        await server.ask("SET", "theirs/1", large)
        store = RedisStore(
            [("127.0.0.1", server.port)],
            cluster=False,
            timeout=PATIENCE_S,
            username="reader",
            password=SECRET,
        )
        assert await store.put([("mine/1", (large,), None), ("mine/2", (large[1:],), None)]) == [None] * 2
        answers = await got(store, ["mine/1", "theirs/1", "mine/2"], MOST)
        (refused,) = await store.put([("theirs/1", (large,), None)])
        await store.close()

    assert isinstance(answers[1], NoPermissionError)
    assert isinstance(refused, NoPermissionError)
    assert [answers[0], answers[2]] == [large, large[1:]]


@redis_servers.needed
@pytest.mark.parametrize("what", ["killed", "silent"])
async def test_a_server_that_is_lost_in_mid_traffic_is_an_error_and_then_used_again(
    tmp_path, what: str
) -> None:
    large, names = bytes(8 << 20), [f"value/{number}" for number in range(8)]
    async with redis_servers.single(tmp_path) as server:
        address = [("127.0.0.1", server.port)]
        filling = RedisStore(address, cluster=False, timeout=PATIENCE_S)
        await filling.put([(name, (large,), None) for name in names])
        await filling.close()
        store = RedisStore(address, cluster=False, timeout=2 if what == "silent" else PATIENCE_S)
        assert await got(store, ["none"]) == [None]
        inlet = store._single.connection_pool._available_connections[0].inlet
        reading = asyncio.create_task(got(store, names, len(large)))
        async with asyncio.timeout(PATIENCE_S):
            while not inlet._rest:  # noqa: ASYNC110 - it is within a value
                await asyncio.sleep(0)
        if what == "killed":
            server.kill()
        else:
            server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(RedisError) as told:
            await reading
        if what == "killed":
            server.start()
            await server.ready()
        else:
            server.process.send_signal(signal.SIGCONT)
        assert await store.put([("value/0", (b"again",), None)]) == [None]
        assert await got(store, names[:1]) == [b"again"]
        await store.close()

    assert isinstance(told.value, TimeoutError if what == "silent" else ConnectionError)


@redis_servers.needed
async def test_a_value_has_its_time_to_live_and_what_is_no_value_is_no_record(tmp_path) -> None:
    async with redis_servers.single(tmp_path) as server:
        store = RedisStore([("127.0.0.1", server.port)], cluster=False, timeout=PATIENCE_S)
        await store.put([("a", (b"1",), 500), ("b", (b"2",), None)])
        await server.ask("RPUSH", "list", "x")
        ttls = [await server.ask("TTL", name) for name in ("a", "b")]
        await server.ask("SET", "empty", "")
        answer = await got(store, ["list", "empty", "missing"], MOST)
        await store.close()

    assert 0 < ttls[0] <= 500
    assert ttls[1] == -1
    assert answer == [b"\0", b"", None]


@redis_servers.needed
async def test_a_node_that_is_away_costs_its_own_names_alone(tmp_path) -> None:
    names = [f"name/{number}" for number in range(200)]
    async with redis_servers.cluster(tmp_path) as nodes:
        store = RedisStore([("127.0.0.1", node.port) for node in nodes], cluster=True, timeout=PATIENCE_S)
        assert await store.put([(name, (name.encode(),), None) for name in names]) == [None] * 200
        await asyncio.to_thread(nodes[1].kill)
        for _ in range(5):
            answers = await got(store, names, MOST)
            there = [answer for name, answer in zip(names, answers, strict=True) if answer == name.encode()]
            assert 100 < len(there) < 160
            assert all(isinstance(answer, OSError) for answer in answers if not isinstance(answer, bytes))
        with pytest.raises(Exception, match=r".+"):
            _ = [name async for name in store.listing("name/")]
        nodes[1].start()
        await nodes[1].ready()
        async with asyncio.timeout(PATIENCE_S):
            while any(isinstance(a, Exception) for a in await got(store, names, MOST)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        await store.close()


@redis_servers.needed
async def test_a_value_that_has_moved_to_another_node_is_handed_out_from_there(tmp_path) -> None:
    name, large = "moved", random.Random(2).randbytes(1 << 20)
    async with redis_servers.cluster(tmp_path) as nodes:
        store = RedisStore([("127.0.0.1", node.port) for node in nodes], cluster=True, timeout=PATIENCE_S)
        await store.put([(name, (large,), None), ("stays", (large[1:],), None)])
        slot = await nodes[0].ask("CLUSTER", "KEYSLOT", name)
        owner = slot * 3 // redis_servers.SLOTS
        target = nodes[(owner + 1) % 3]
        await target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", await nodes[owner].ask("CLUSTER", "MYID"))
        await nodes[owner].ask("CLUSTER", "SETSLOT", slot, "MIGRATING", await target.ask("CLUSTER", "MYID"))
        await nodes[owner].ask("MIGRATE", "127.0.0.1", target.port, name, 0, 60_000)
        # Alone: the library says ASKING on any free connection of the node, not on that of the command.
        asked = await got(store, [name])
        for node in nodes:
            await node.ask("CLUSTER", "SETSLOT", slot, "NODE", await target.ask("CLUSTER", "MYID"))
        moved = await got(store, [name, "stays", "none"])
        await store.close()

    assert asked == [large]
    assert moved == [large, large[1:], None]


@redis_servers.needed
async def test_a_password_is_given_and_in_no_error(tmp_path) -> None:
    async with redis_servers.single(tmp_path) as server:
        await server.ask("CONFIG", "SET", "requirepass", SECRET)
        entered = RedisStore([("127.0.0.1", server.port)], cluster=False, timeout=PATIENCE_S, password=SECRET)
        assert await entered.put([("a", (b"1",), None)]) == [None]
        await entered.close()
        refused = RedisStore(
            [("127.0.0.1", server.port)],
            cluster=False,
            timeout=PATIENCE_S,
            password="another-secret",  # noqa: S106 - of a server of this test
        )
        with pytest.raises(Exception, match=r".+") as told:
            await got(refused, ["a"], MOST)
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
        await got(store, ["a"], MOST)
    with pytest.raises(Exception, match=r".+"):
        await store.put([("a", (b"1",), None)])
    await store.close()
