"""Both clients against a real daemon: the same cases, the same results."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from support.http import Daemon, closed, running, unhurried, until
from support.patience import PATIENCE_S
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, soon

from kvtcd import __version__
from kvtcd.api.region import HostRegion
from kvtcd.api.state import REGIONS
from kvtcd.client import AsyncClient, BlockHead, Client, groups
from kvtcd.core import errors, wire
from kvtcd.core.keys import EngineKey, chain
from kvtcd.core.messages import Found
from kvtcd.core.notices import What
from kvtcd.core.place import Tier
from kvtcd.core.problem import kind_of, problem
from kvtcd.engine.sessions import Lease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio


class InThread:
    """The sync client with the face of the async one, so that one loop can run client and daemon."""

    def __init__(self, address: str, **kwargs: Any) -> None:
        self.client = Client(address, **kwargs)

    async def close(self) -> None:
        self.client.close()

    async def get_many(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        for item in await asyncio.to_thread(lambda: list(self.client.get_many(*args, **kwargs))):
            yield item

    async def events(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        notices = self.client.events(*args, **kwargs)
        while (notice := await asyncio.to_thread(next, notices, None)) is not None:
            yield notice

    def __getattr__(self, name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return asyncio.to_thread(getattr(self.client, name), *args, **kwargs)

        return run


KINDS = {"sync": InThread, "async": AsyncClient}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest_asyncio.fixture
async def daemon():
    async with running() as daemon:
        yield daemon


@pytest_asyncio.fixture
async def client(kind, daemon: Daemon):
    client = kind(str(daemon.socket))
    await client.register("demo", IDENTITY)
    yield client
    await client.close()


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number]) * 32)


def head(number: int, **fields: Any) -> BlockHead:
    return BlockHead(key(number), BLOCK_TOKENS, **({"first_token": 0} | fields))


async def test_namespaces(client, daemon):
    info = await client.register("demo", IDENTITY)
    assert (info.name, info.digest, info.codec, info.identity) == ("demo", IDENTITY.digest, "toy", IDENTITY)
    assert await client.namespace("demo") == info
    assert await client.namespaces() == (info,)
    with pytest.raises(errors.IdentityConflict) as caught:
        await client.register("demo", replace(IDENTITY, weights="cd" * 32))
    assert caught.value.differs == ("weights",)
    await client.put("demo", head(1), block(1))
    assert (await client.purge("demo")).removed == 1
    assert await client.namespaces() == ()
    assert daemon.blocks() == 0
    with pytest.raises(errors.UnknownNamespace):
        await client.namespace("demo")


async def test_put_and_get(client, daemon):
    stored = await client.put("demo", head(1), block(1))
    assert (stored.key, stored.outcome, stored.reason) == (key(1), "stored", None)
    assert (await client.put("demo", head(1), bytearray(block(1)))).outcome == "duplicate"
    got = await client.get("demo", key(1))
    assert bytes(got) == block(1)
    out = bytearray(BLOCK_BYTES + 10)
    view = await client.get("demo", key(1), out=out)
    assert view.obj is out
    assert out == block(1) + bytes(10)
    with pytest.raises(errors.NotFound):
        await client.get("demo", key(9))
    for too_small in (bytearray(BLOCK_BYTES - 1), memoryview(bytes(BLOCK_BYTES))):
        with pytest.raises(errors.BadRequest) as caught:
            await client.get("demo", key(1), out=too_small)
        assert caught.value.field == "out"
    assert bytes(await client.get("demo", key(1))) == block(1), "the connection is not spoilt"
    assert daemon.blocks() == 1


async def test_data_of_any_shape_is_sent_as_its_bytes(client):
    typed = memoryview(bytearray(block(1))).cast("H").cast("B").cast("I", shape=[BLOCK_BYTES // 8, 2])
    await client.put("demo", head(1), typed)
    assert bytes(await client.get("demo", key(1))) == block(1)
    with pytest.raises(errors.BadRequest):
        await client.put("demo", head(2), memoryview(bytes(2 * BLOCK_BYTES))[::2])


async def test_put_many_and_get_many(client, daemon, monkeypatch):
    monkeypatch.setattr(groups, "GROUP_BYTES", 3 * BLOCK_BYTES)
    tokens = range(100, 100 + 7 * BLOCK_TOKENS + 3)
    links = list(chain(IDENTITY.digest, tokens, BLOCK_TOKENS))
    blocks = [(BlockHead(ln.key, ln.tokens, ln.first), block(n, ln.tokens)) for n, ln in enumerate(links)]
    results = await client.put_many("demo", iter(blocks))
    assert [(r.key, r.outcome) for r in results] == [(ln.key, "stored") for ln in links]
    service = daemon.toy.service
    ns = service.namespace("uid:1", "demo")
    records = [service._registry.record_keys(ns, b"")(link.key) for link in links]
    parents = [daemon.toy.catalog.residents.entries[record].parent for record in records]
    assert parents == [None, *records[:-1]], "groups do not break the chain"

    wanted = [links[3].key, key(9), links[7].key, links[0].key]
    got = [(k, data and bytes(data)) async for k, data in client.get_many("demo", wanted)]
    assert got == [
        (links[3].key, block(3)),
        (key(9), None),
        (links[7].key, block(7, 3)),
        (links[0].key, block(0)),
    ]
    assert [item async for item in client.get_many("demo", [])] == []
    assert await client.put_many("demo", []) == ()

    found = await client.match_tokens("demo", [*tokens, 1, 2])
    assert found.prefix_tokens == len(tokens)
    assert [m.key for m in found.prefix] == [ln.key for ln in links]
    found = await client.match("demo", [links[0].key, key(9), links[1].key])
    assert (len(found.prefix), [m.tier for m in found.blocks]) == (1, [Tier.HOST, None, Tier.HOST])


async def test_durability_demotion_and_deletion(client, daemon):
    await client.put("demo", head(1), block(1), durable=True)
    results = await client.put_many("demo", [(head(2), block(2)), (head(3), block(3))], durable=True)
    assert [r.outcome for r in results] == ["stored", "stored"]
    assert all(Tier.DISK in daemon.toy.catalog.tiers(k) for k in daemon.toy.catalog.residents.entries)
    assert [r.outcome for r in await client.flush("demo")] == ["stored"] * 3
    assert [r.outcome for r in await client.flush("demo", [key(1), key(9)])] == ["stored", "dropped"]

    operation = await client.demote("demo", [key(1), key(2)])
    assert (operation.state, len(operation.results)) == ("done", 2)
    assert await client.operation(operation.id) == operation
    assert (await client.match("demo", [key(1)])).blocks[0].tier is Tier.DISK
    assert bytes(await client.get("demo", key(1))) == block(1)
    operation = await client.prefetch("demo", [key(2), key(9)])
    assert (operation.state, operation.done, operation.total) == ("done", 2, 2)
    assert [r.reason for r in operation.results] == [None, "not-found"]
    assert (await client.match("demo", [key(2)])).blocks[0].tier is Tier.HOST
    assert await client.cancel(operation.id) == operation
    begun = await client.prefetch("demo", [key(2)], wait=False)
    assert (await client.ended(begun)).state == "done"
    begun = await client.demote("demo", [key(3)], wait=False)
    assert begun.state in ("running", "done")
    with pytest.raises(errors.NotFound):
        await client.operation("0" * 32)

    lease = await client.pin("demo", [key(1)], 60)
    with pytest.raises(errors.DeadlineExceeded, match="it goes on") as caught:
        await client.delete("demo", key(1), deadline=0.05)
    assert caught.value.goes_on
    assert await client.give_back(lease.id) is True
    await until(lambda: len(daemon.toy.catalog.residents.entries) == 2)
    assert await client.delete("demo", key(1)) is False
    assert await client.delete("demo", key(2)) is True


@pytest.mark.parametrize("deadline", [0, -1, float("nan")])
async def test_no_time_at_all_is_refused(client, deadline):
    with pytest.raises(errors.BadRequest, match="deadline"):
        await client.match("demo", [key(1)], deadline=deadline)


async def test_events_are_heard_as_they_happen_and_from_where_one_was(client, daemon):
    async def hear(count: int, **where: Any) -> list[Any]:
        notices = client.events("demo", **where)
        return [await anext(notices) for _ in range(count)]

    async with asyncio.timeout(PATIENCE_S):
        hearing = asyncio.create_task(hear(1))
        await until(daemon.toy.service.metrics.listeners._value.get)
        await client.put("demo", head(1), block(1))
        (first,) = await hearing
        assert (first.what, first.key, first.tier) == (What.STORED, key(1), Tier.HOST)
        await client.put("demo", head(2), block(2))
        stored = [n for n in await hear(3, after=first.id) if n.what is What.STORED]
        assert [n.key for n in stored] == [key(2)], "the others are moves to disk"
    with pytest.raises(errors.UnknownNamespace):
        await anext(client.events("none"))


async def test_all_ranks_and_partial_blocks_can_be_asked_for(client):
    await client.register("r0", replace(IDENTITY, parallel="tp2-rank0"), deadline=PATIENCE_S)
    await client.put("r0", head(1), block(1))
    await client.put("r0", BlockHead(key(2), 3, BLOCK_TOKENS, parent=key(1)), block(2, 3))
    assert (await client.match("r0", [key(1)])).partials == (3,)
    assert (await client.match("r0", [key(1)], all_ranks=True)).prefix == ()
    await client.register("r1", replace(IDENTITY, parallel="tp2-rank1"))
    await client.put("r1", head(1), block(1))
    assert (await client.match("r0", [key(1)], all_ranks=True)).prefix_tokens == BLOCK_TOKENS
    assert (await client.match_tokens("r0", [1, 2], all_ranks=True)).prefix == ()
    assert (await client.purge("r1", deadline=PATIENCE_S)).removed == 1


async def test_leases_are_taken_and_given_back(client):
    for number in (1, 2):
        await client.put("demo", head(number), block(number))
    lease = await client.pin("demo", [key(1), key(2)], 30)
    assert (lease.seconds, lease.blocks) == (30, 2)
    assert await client.give_back(lease.id) is True
    assert await client.give_back(lease.id) is False
    with pytest.raises(errors.NotFound):
        await client.pin("demo", [key(9)], 30)
    assert (await client.match("demo", [key(1)])).lease is None
    found = await client.match("demo", [key(1), key(9)], lease=0.5)
    assert found.lease
    assert (found.lease.seconds, found.lease.blocks) == (0.5, 1)
    assert (await client.match_tokens("demo", [1, 2], lease=30)).lease is None
    assert (await client.match("demo", [key(1)], all_ranks=True, lease=30)).lease


async def test_policies_are_shown_and_reloaded_or_refused(client):
    assert [(p["name"], p["namespaces"]) for p in await client.policies()] == [("toy", ["demo"])]
    with pytest.raises(errors.ServerError, match="403"):
        await client.reload_policies(deadline=5)


async def test_salts_part_blocks(client):
    await client.put("demo", head(1), block(1), salt=b"\xff\x00a")
    assert bytes(await client.get("demo", key(1), salt=b"\xff\x00a")) == block(1)
    await client.put("demo", head(2), block(2), salt="Änn")  # text stands for its UTF-8
    assert bytes(await client.get("demo", key(2), salt="Änn".encode())) == block(2)
    with pytest.raises(errors.NotFound):
        await client.get("demo", key(1))
    assert (await client.match("demo", [key(1)])).prefix == ()


async def test_operating(client, daemon):
    info = await client.info()
    assert (info.version, info.api, info.boot_id) == (__version__, 1, daemon.toy.service.boot_id)
    assert (await client.stats())["boot_id"] == info.boot_id
    assert await client.ready() is True
    daemon.toy.service.drain()
    assert await client.ready() is False
    with pytest.raises(errors.Stopping):
        await client.put("demo", head(1), block(1))


@pytest.mark.parametrize("name", ["", "../x", "a/b", "Demo", "a?b", "a b"])
async def test_a_bad_name_is_refused_before_it_is_sent(client, name):
    with pytest.raises(errors.BadRequest) as caught:
        await client.namespace(name)
    assert caught.value.field == "namespace"


CALLS = {
    "match": lambda client, key: client.match("demo", [key]),
    "pin": lambda client, key: client.pin("demo", [key], 5),
    "put": lambda client, key: client.put("demo", BlockHead(key, BLOCK_TOKENS), block(1)),
    "put_many": lambda client, key: client.put_many("demo", [(BlockHead(key, BLOCK_TOKENS), block(1))]),
    "a parent": lambda client, key: client.put("demo", head(1, parent=key), block(1)),
    "get": lambda client, key: client.get("demo", key),
    "get_many": lambda client, key: _every(client.get_many("demo", [key])),
    "delete": lambda client, key: client.delete("demo", key),
    "flush": lambda client, key: client.flush("demo", [key]),
    "demote": lambda client, key: client.demote("demo", [key]),
    "prefetch": lambda client, key: client.prefetch("demo", [key]),
}


async def _every(items):
    return [item async for item in items]


@pytest.mark.parametrize("call", CALLS)
async def test_a_key_that_is_no_bytes_is_a_type_error_that_says_so(client, daemon, call):
    with pytest.raises(TypeError, match=r"a key is bytes, not str.*`bytes\.fromhex`"):
        await CALLS[call](client, key(1).hex())
    with pytest.raises(TypeError, match="a key is bytes, not int"):
        await CALLS[call](client, 7)
    assert daemon.blocks() == 0


async def test_keys_of_any_bytes_are_the_same_key(client):
    await client.put("demo", head(1), block(1))
    for same in (bytearray(key(1)), memoryview(key(1))):
        assert bytes(await client.get("demo", same)) == block(1)
    with pytest.raises(TypeError, match="keys are an iterable"):
        await client.match("demo", key(1))


@pytest.mark.parametrize("call", ["operation", "cancel", "give_back"])
async def test_an_id_that_the_daemon_never_gave_is_refused_before_it_is_sent(client, call):
    for wrong in ("zz", "", "../namespaces/demo", "a" * 31):
        with pytest.raises(errors.BadRequest, match="is not the id of one: 32 lower-case hex digits"):
            await getattr(client, call)(wrong)
    with pytest.raises(TypeError, match="give its `id`"):
        await getattr(client, call)(await client.demote("demo", [key(1)]))
    if call != "give_back":
        with pytest.raises(errors.NotFound):
            await getattr(client, call)("a" * 32)


async def test_arguments_of_a_wrong_type_are_named(client):
    for asked, why in (
        (client.namespace(b"demo"), "namespace: a name is text, not bytes"),
        (client.register("other", IDENTITY.to_json()), "identity: an Identity, not dict"),
        (client.put("demo", key(1), block(1)), "block: a BlockHead, not bytes"),
        (client.match("demo", [key(1)], salt=1), "salt: text or bytes, not int"),
        (client.match("demo", [key(1)], deadline="5"), "deadline: a number of seconds, not str"),
        (client.match("demo", [key(1)], lease="5"), "lease: a number of seconds, not str"),
        (client.pin("demo", [key(1)], "5"), "seconds: a number of seconds, not str"),
        (client.region("1"), "nbytes: a whole number, not str"),
    ):
        with pytest.raises(TypeError) as caught:
            await asked
        assert why in str(caught.value)


async def test_a_region_of_no_bytes_or_of_too_many_is_an_error_of_ours(client):
    for nothing in (0, -1):
        with pytest.raises(errors.BadRequest, match="a region has at least one byte"):
            await client.region(nothing)
    for much in (1 << 62, 1 << 70):
        with pytest.raises(errors.Unavailable, match=f"memory for a region of {much} bytes cannot be had"):
            await client.region(much)


async def test_errors_of_the_daemon_are_raised_as_they_are(client, daemon):
    with pytest.raises(errors.BlockMismatch, match=f"{BLOCK_BYTES} bytes"):
        await client.put("demo", head(1), block(1)[1:])
    with pytest.raises(errors.UnknownNamespace):
        await client.get("other", key(1))
    with pytest.raises(errors.BadKey):
        await client.get("demo", b"x" * 65)
    with pytest.raises(errors.BadKey):
        await client.match("demo", [b""])
    with pytest.raises(errors.BadRequest):
        await client.match_tokens("demo", [-1])
    assert daemon.blocks() == 0


async def test_no_room_is_busy_even_for_a_body_that_is_still_being_sent(kind):
    large = replace(IDENTITY, block_tokens=4096)
    nbytes = large.layout.nbytes(4096)
    async with running(host=nbytes) as daemon:
        client = kind(str(daemon.socket))
        await client.register("demo", large)
        big = BlockHead(key(1), 4096, 0)
        await client.put("demo", big, bytes(nbytes))
        ns = daemon.toy.service.namespace("uid:1", "demo")
        async with daemon.toy.service.blocks.read(ns, key(1), b"", soon()):
            for _ in range(2):
                with pytest.raises(errors.Busy) as caught:
                    await client.put("demo", replace(big, key=key(2)), bytes(nbytes), deadline=0.05)
                assert caught.value.retry_after > 0
                with pytest.raises(errors.Busy):
                    await client.put_many("demo", [(replace(big, key=key(2)), bytes(nbytes))], deadline=0.05)
        await client.close()


async def test_a_connection_that_the_daemon_closed_is_not_noticed(kind, monkeypatch):
    monkeypatch.setattr("kvtcd.api.app.KEEPALIVE_S", 0.1)
    async with running() as daemon:
        client = kind(str(daemon.socket))
        await client.register("demo", IDENTITY)
        for number in range(1, 4):
            await asyncio.sleep(0.3)
            await client.put("demo", head(number), block(number))
            await asyncio.sleep(0.3)
            assert bytes(await client.get("demo", key(number))) == block(number)
            await asyncio.sleep(0.3)
            await client.demote("demo", [key(number)])
        await client.close()


async def test_no_daemon_is_said_to_be_none_with_its_socket(kind, tmp_path):
    for address in (str(tmp_path / "nothing"), "http://127.0.0.1:1"):
        client = kind(address)
        with pytest.raises(errors.Unavailable, match="start `kvtcd serve`") as caught:
            await client.info()
        assert address in str(caught.value)
        assert await client.ready() is False
        await client.close()


@asynccontextmanager
async def scripted(*answers: bytes, then_close: bool = True) -> AsyncIterator[list[bytes]]:
    """A peer on the socket "s" that gives these answers to the first requests of each connection.

    Yields the request lines it has seen.
    """
    requests: list[bytes] = []
    writers = []

    async def serve(reader, writer):
        writers.append(writer)
        for answer in answers:
            requests.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
            writer.write(answer)
        if then_close:
            await closed(writer)

    async with await asyncio.start_unix_server(serve, "s"):
        yield requests
        for writer in writers:
            await closed(writer)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", errors.Unavailable),
        (b"SSH-2.0-OpenSSH\r\n", errors.Unavailable),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", errors.Unavailable),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{]", errors.ServerError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", errors.ServerError),
        (b"HTTP/1.1 418 Teapot\r\nContent-Length: 5\r\n\r\nshort", errors.ServerError),
    ],
)
async def test_a_peer_that_is_no_daemon_is_an_error_of_ours(kind, tmp_path, monkeypatch, answer, error):
    monkeypatch.chdir(tmp_path)
    async with scripted(answer):
        client = kind("s")
        with pytest.raises(error):
            await client.info()
        await client.close()


async def test_a_refusal_before_the_end_of_a_body_is_heard(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    busy = errors.Busy("everything", 3.0)
    body = json.dumps(problem(kind_of(busy), busy)).encode()
    answer = b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with scripted(answer):
        client = kind("s")
        for _ in range(3):
            with pytest.raises(errors.Busy, match="everything"):
                await client.put("demo", head(1), bytes(8 << 20))
        await client.close()


async def test_a_kept_connection_that_fails_is_replaced_once_and_only_if_that_does_no_harm(
    kind, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    results = b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"results": []}'
    async with scripted(results, b"") as requests:  # hangs up at the second request of a connection
        client = kind("s")
        for _ in range(3):
            assert await client.flush("demo") == ()
        assert len(requests) == 5, "the second and the third were sent twice"
        with suppress(errors.Unavailable, errors.ServerError):
            await client.demote("demo", [], wait=False)
        await client.close()
    assert sum(b"demote" in request for request in requests) == 1


async def test_a_daemon_that_does_not_answer_is_given_up(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvtcd.client.connections.GRACE_S", 0.0)
    monkeypatch.setattr("kvtcd.client.aio_daemon.GRACE_S", 0.0)
    async with scripted(b"", then_close=False):
        client = kind("s", timeout=0.2)
        with pytest.raises(errors.DeadlineExceeded):
            await client.info()
        await client.close()


async def test_a_block_that_breaks_off_is_not_returned(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with scripted(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + bytes(50)):
        client = kind("s")
        with pytest.raises(errors.Unavailable):
            await client.get("demo", key(1))
        await client.close()


@pytest.mark.parametrize("cut", [1, 15, 16, 20, 90, 100])
async def test_frames_that_break_off_are_not_returned(kind, tmp_path, monkeypatch, cut):
    frame = wire.head(Found(key(1), 1, Tier.HOST).to_json(), 50) + bytes(50)
    assert len(frame) > 100
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (cut, frame[:cut])
    monkeypatch.chdir(tmp_path)
    async with scripted(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body):
        client = kind("s")
        with pytest.raises((errors.Unavailable, errors.Truncated)):
            [item async for item in client.get_many("demo", [key(1)])]
        await client.close()


async def test_many_threads_may_use_one_client():
    async with running(unhurried(connections=64), host=100 * BLOCK_BYTES) as daemon:
        with Client(str(daemon.socket)) as client:
            await asyncio.to_thread(client.register, "demo", IDENTITY)
            wrong: list[object] = []

            def work(seed: int) -> None:
                for n in range(10):
                    number = seed * 10 + n
                    client.put("demo", BlockHead(EngineKey(b"%d" % number), BLOCK_TOKENS, 0), block(number))
                    if client.get("demo", b"%d" % number) != block(number):
                        wrong.append(number)

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            assert not wrong
            assert daemon.blocks() == 80


async def test_a_reader_who_stops_early_gives_his_connection_up():
    async with running() as daemon:
        with Client(str(daemon.socket)) as client:
            await asyncio.to_thread(client.register, "demo", IDENTITY)
            for number in (1, 2, 3):
                await asyncio.to_thread(client.put, "demo", head(number), block(number))

            def first() -> bytes:
                for _, data in client.get_many("demo", [key(1), key(2), key(3)]):
                    return bytes(data)
                return b""

            assert await asyncio.to_thread(first) == block(1)
            assert bytes(await asyncio.to_thread(client.get, "demo", key(2))) == block(2)


async def test_the_default_socket_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("KVTCD_SOCKET", "/somewhere/else.sock")
    assert str(Client().address) == "/somewhere/else.sock"
    monkeypatch.delenv("KVTCD_SOCKET")
    assert str(Client().address) == "/run/kvtcd/kvtcd.sock"
    for bad in ("https://host", "http://host", "http://host:1/path", "ftp://host:2", "http://host:65536"):
        with pytest.raises(errors.BadRequest):
            Client(bad)


async def test_calls_that_are_not_repeated_keep_few_connections_open():
    async with running(unhurried(connections=32)) as daemon:
        with Client(str(daemon.socket)) as client:
            await asyncio.to_thread(client.register, "demo", IDENTITY)
            head = BlockHead(key(1), BLOCK_TOKENS, 0)
            await asyncio.to_thread(client.put, "demo", head, block(1))

            def demote_often() -> None:
                for _ in range(60):
                    client.demote("demo", [key(1)])

            await asyncio.to_thread(demote_often)
            async with daemon.request("GET", "/healthz") as answer:
                assert answer.status == 200, "others find a connection"


async def test_blocks_in_a_region_are_not_sent(client, monkeypatch):
    region = await client.region(8 * BLOCK_BYTES)
    assert (region.path, region.why) == ("region", "")
    parts = [region.memory[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES] for n in range(8)]
    monkeypatch.setattr("kvtcd.api.batches.receive", None)
    monkeypatch.setattr("kvtcd.api.blocks.receive", None)
    for number in range(3):
        parts[number][:] = block(number)
    assert (await client.put("demo", head(0), parts[0])).outcome == "stored"
    results = await client.put_many("demo", [(head(n), parts[n]) for n in (1, 2)])
    assert [one.outcome for one in results] == ["stored", "stored"]
    view = await client.get("demo", key(1), out=parts[5])
    assert view.obj is region.memory.obj
    assert bytes(parts[5]) == bytes(view) == block(1)
    found = [
        (k, view if view is None else bytes(view))
        async for k, view in client.get_many("demo", [key(2), key(9), key(0)], out=parts[5:8])
    ]
    assert found == [(key(2), block(2)), (key(9), None), (key(0), block(0))]
    assert bytes(parts[5]) == block(2)
    assert bytes(parts[7]) == block(0)
    with pytest.raises(errors.NotFound):
        await client.get("demo", key(9), out=parts[5])
    with pytest.raises(errors.BadRequest):
        await client.get("demo", key(0), out=parts[5][:-1])
    region.close()


async def test_buffers_outside_of_regions_and_lost_regions_go_over_http(client, daemon: Daemon):
    region = await client.region(4 * BLOCK_BYTES)
    part = region.memory[BLOCK_BYTES : 2 * BLOCK_BYTES]
    part[:] = block(1)
    own = bytearray(block(2))
    results = await client.put_many("demo", [(head(1), part), (head(2), own)])
    assert [one.outcome for one in results] == ["stored", "stored"]
    buffers = [bytearray(BLOCK_BYTES), part]
    found = [k async for k, _ in client.get_many("demo", [key(1), key(2)], out=buffers)]
    assert found == [key(1), key(2)]
    assert [bytes(one) for one in buffers] == [block(1), block(2)]

    for side in daemon.runner.side_sockets:  # as if the daemon had been started anew
        for connection in list(side._open):
            side._end(connection)
    part[:] = block(3)
    assert (await client.put("demo", head(3), part)).outcome == "stored"
    assert region.path == "http"
    assert region.why.startswith("the daemon does not know the region any more")
    assert bytes(await client.get("demo", key(3), out=part)) == block(3)
    assert (region.path, region.why) == ("region", ""), "it is shared again"
    region.close()
    assert (region.path, region.why) == ("http", "the region is closed")
    assert bytes(await client.get("demo", key(3), out=part)) == block(3)
    with pytest.raises(errors.BadRequest):
        [item async for item in client.get_many("demo", [key(1)], out=[])]


async def test_where_memory_cannot_be_shared_a_region_says_why(kind, daemon):
    while daemon.runner.side_sockets:
        daemon.runner.side_sockets.pop().close()
    client = kind(str(daemon.socket))
    await client.register("demo", IDENTITY)
    region = await client.region(BLOCK_BYTES)
    assert region.path == "http"
    assert "shares no memory" in region.why
    region.memory[:] = block(1)
    assert (await client.put("demo", head(1), region.memory)).outcome == "stored"
    assert bytes(await client.get("demo", key(1), out=region.memory)) == block(1)
    await client.close()
    far = await kind("http://127.0.0.1:9").region(BLOCK_BYTES)
    assert "Unix socket only" in far.why


async def test_a_region_says_why_it_is_not_shared_while_its_daemon_is_away(kind):
    async with running() as daemon:
        client = kind(str(daemon.socket))
        await client.register("demo", IDENTITY)
        region = await client.region(BLOCK_BYTES)
        assert region.path == "region"
    for said in ("a call was broken off: no daemon answers on ", "the daemon shares no memory on "):
        with pytest.raises(errors.Unavailable):
            await client.get("demo", key(1), out=region.memory)
        assert region.path == "http"
        assert region.why.startswith(said)
    await client.close()
    assert (region.path, region.why) == ("http", "the region is closed")


async def test_a_call_that_is_broken_off_leaves_nobody_writing_to_its_buffers(
    client, kind, daemon, monkeypatch
):
    await client.put("demo", head(1), block(1))
    client = kind(str(daemon.socket), timeout=0.3)
    monkeypatch.setattr("kvtcd.client.connections.GRACE_S", 0.3)
    monkeypatch.setattr("kvtcd.client.aio_daemon.GRACE_S", 0.3)
    region = await client.region(BLOCK_BYTES)
    monkeypatch.setattr(HostRegion, "at_once", 0)  # the loop must not wait for what is slow on purpose
    go, copy_to = threading.Event(), Lease.copy_to

    def slowly(lease: Lease, out: memoryview) -> None:
        assert go.wait(PATIENCE_S)
        copy_to(lease, out)

    monkeypatch.setattr(Lease, "copy_to", slowly)
    reading = asyncio.create_task(client.get("demo", key(1), out=region.memory))
    await until(lambda: not daemon.app[REGIONS].nbytes)  # the client has given its region up
    await asyncio.sleep(0.05)
    assert not reading.done(), "it has failed, but the daemon still writes"
    go.set()
    with pytest.raises(errors.DeadlineExceeded):
        await reading
    assert bytes(region.memory) == block(1)
    monkeypatch.undo()
    region.memory[:] = bytes(BLOCK_BYTES)
    assert bytes(await client.get("demo", key(1), out=region.memory)) == block(1)
    assert region.path == "region"
    await client.close()
