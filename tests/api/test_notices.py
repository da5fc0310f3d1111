"""The stream of notices: what becomes of blocks, told to their tenant alone, whoever reads how slowly."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
from support.http import NS, TENANT_HEADER, Daemon, closed, running, unhurried, until
from support.patience import PATIENCE_S
from support.records import keys_in
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, soon, toy_service

from kvtcd.core.errors import Stopping
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.notices import Notice, NoticeParser, What
from kvtcd.core.place import Tier
from kvtcd.core.policy import DiskTier, Evict, HostTier, Policy
from kvtcd.engine import feed
from kvtcd.tiers.disk import Put

pytestmark = pytest.mark.asyncio


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number]) * 32)


class Ear:
    """One listener: what it has heard so far."""

    def __init__(self, answer) -> None:
        self.answer, self.heard, self._parser = answer, [], NoticeParser()

    async def hear(self, count: int) -> list[Notice]:
        """Wait until there are `count` notices more; return them."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.heard) < count:
                piece = await self.answer.content.readany()
                assert piece, "the stream has ended"
                self.heard += self._parser.feed(piece)
        found, self.heard = self.heard[:count], self.heard[count:]
        return found


@asynccontextmanager
async def ear(daemon: Daemon, query: str = "", **headers: str):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    async with daemon.request("GET", f"/v1/events{query}", headers=headers) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        yield Ear(answer)


async def put(daemon: Daemon, number: int, *, path: str = NS, first: str = "first_token=0", **headers: str):
    target = f"{path}/blocks/{key(number).hex()}?tokens={BLOCK_TOKENS}&{first}"
    kind = {"Content-Type": "application/octet-stream"}
    async with daemon.request("PUT", target, data=block(number), headers=kind | headers) as answer:
        assert answer.status == 201, await answer.text()


async def post(daemon: Daemon, path: str, body) -> dict:
    async with daemon.request("POST", f"{NS}/{path}", json=body) as answer:
        assert answer.status < 300, await answer.text()
        return await answer.json()


def plain(notices: list[Notice]) -> list[tuple]:
    return [(n.what.value, n.key, n.source, n.tier, n.reason, n.left) for n in notices]


async def test_the_life_of_a_block_is_told_from_its_coming_to_its_end():
    async with running(policy=Policy("toy", disk=DiskTier(write="evict"))) as daemon:
        await daemon.register()
        async with ear(daemon) as listener:
            await put(daemon, 1, **{"Kvtcd-Salt": "c2FsdA"})
            await put(daemon, 2)
            await put(daemon, 3, first=f"first_token={BLOCK_TOKENS}&parent={key(2).hex()}")
            stored = await listener.hear(3)
            await post(daemon, "demote", {"keys": [key(2).hex()]})
            down = await listener.hear(2)
            async with daemon.request("GET", f"{NS}/blocks/{key(2).hex()}") as answer:
                await answer.read()
            up = await listener.hear(1)
            await post(daemon, "demote", {"keys": [key(2).hex()]})
            again = await listener.hear(1)
            async with daemon.request("DELETE", f"{NS}/blocks/{key(2).hex()}") as answer:
                assert answer.status == 204
            gone = await listener.hear(1)

    first = replace(stored[0], id=None)
    assert first == Notice(
        What.STORED, None, "demo", key(1), b"salt", Tier.HOST, tokens=BLOCK_TOKENS, first_token=0
    )
    assert [(n.key, n.parent, n.first_token) for n in stored[1:]] == [
        (key(2), None, 0), (key(3), key(2), BLOCK_TOKENS),
    ]  # fmt: skip
    assert plain(down) == [
        ("moved", key(2), Tier.HOST, Tier.DISK, None, ()),
        ("dropped", key(2), None, Tier.HOST, "evicted", (Tier.DISK,)),
    ]
    assert plain(up) == [("moved", key(2), Tier.DISK, Tier.HOST, None, ())]
    assert plain(again) == [("dropped", key(2), None, Tier.HOST, "evicted", (Tier.DISK,))]
    assert plain(gone) == [("dropped", key(2), None, Tier.DISK, "deleted", ())], "named by its record alone"


async def test_eviction_from_the_last_tier_is_told():
    policy = Policy("tight", host=HostTier(high=1.0, low=0.8), evict=Evict("lru"))
    async with running(policy=policy, host=2 * BLOCK_BYTES, disk=0) as daemon:
        await daemon.register()
        async with ear(daemon) as listener:
            for number in (1, 2, 3):
                await put(daemon, number)
            heard = await listener.hear(4)
    assert min(plain(heard)) == ("dropped", key(1), None, Tier.HOST, "evicted", ())


async def test_a_block_that_lay_on_disk_since_before_the_start_is_named(tmp_path):
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register("uid:1", "n", IDENTITY)
        async with toy.service.blocks.batch(ns, b"", soon(), durable=True) as batch:
            (await batch.reserve(BlockHead(key(1), BLOCK_TOKENS), BLOCK_BYTES)).write(memoryview(block(1)))
            await batch.commit()
        await toy.service.blocks.demote(ns, [key(1)], b"", soon())
    async with toy_service(tmp_path) as toy:
        ns = toy.service.namespace("uid:1", "n")
        with toy.service.feeds.listen("uid:1", None, None) as listener:
            assert await toy.service.blocks.delete(ns, [key(1)], b"") == 1
            (notice,) = await listener.take(PATIENCE_S)
    assert (notice.key, notice.tier, notice.reason) == (key(1), Tier.DISK, "deleted")


async def test_expiry_and_damage_are_told_as_such(monkeypatch):
    monkeypatch.setattr("kvtcd.engine.service.TICK", 0.05)
    async with running(policy=Policy("brief", disk=DiskTier(ttl=3600))) as daemon:
        await daemon.register()
        async with ear(daemon) as listener:
            await put(daemon, 1)
            came = await listener.hear(2)
            daemon.toy.catalog._clock = lambda: time.monotonic() + 3601
            went = await listener.hear(2)
    assert [(n.what, n.tier) for n in came] == [(What.STORED, Tier.HOST), (What.MOVED, Tier.DISK)]
    assert {(n.key, n.tier, n.reason, n.left) for n in went} == {
        (key(1), Tier.HOST, "expired", ()),
        (key(1), Tier.DISK, "expired", ()),
    }

    async with running(policy=Policy("toy", disk=DiskTier(write="evict"))) as daemon:
        await daemon.register()
        await put(daemon, 1)
        await post(daemon, "demote", {"keys": [key(1).hex()]})
        await until(lambda: not daemon.toy.service._driver.origins)
        (tenant,) = daemon.toy.service._registry.tenants.values()
        environment = tenant.writer.environment
        (stored,) = keys_in(environment)
        envelope, blob = environment.read(stored)
        blob[len(blob) // 2] ^= 1
        await tenant.writer.exclusive(lambda env: env.write([Put(stored, envelope, blob)], []))
        async with ear(daemon) as listener:
            async with daemon.request("GET", f"{NS}/blocks/{key(1).hex()}") as answer:
                assert answer.status == 404
            assert plain(await listener.hear(1)) == [("dropped", key(1), None, Tier.DISK, "damaged", ())]


async def test_a_purge_is_one_notice():
    async with running() as daemon:
        await daemon.register()
        async with ear(daemon) as listener:
            await put(daemon, 1)
            async with daemon.request("DELETE", NS) as answer:
                assert answer.status == 200
            heard = await listener.hear(2)
            heard += await listener.hear(1) if heard[-1].what is not What.PURGED else []
    assert {n.what for n in heard} <= {What.STORED, What.MOVED, What.PURGED}
    assert (heard[-1].what, heard[-1].namespace) == (What.PURGED, "demo")


async def test_other_tenants_hear_nothing_and_a_namespace_can_be_chosen():
    other = IDENTITY.to_json() | {"weights": "cd" * 32}
    async with running() as daemon:
        await daemon.register()
        async with daemon.request("PUT", "/v1/namespaces/other", json=other) as answer:
            assert answer.status == 200
        await daemon.register(**{TENANT_HEADER: "uid:2"})
        async with (
            ear(daemon, "?namespace=demo") as mine,
            ear(daemon, **{TENANT_HEADER: "uid:2"}) as theirs,
        ):
            await put(daemon, 1, path="/v1/namespaces/other")
            await put(daemon, 2)
            await put(daemon, 3, **{TENANT_HEADER: "uid:2"})
            assert [(n.key, n.namespace) for n in await mine.hear(1)] == [(key(2), "demo")]
            assert [n.key for n in await theirs.hear(1)] == [key(3)]
        for query, status in (
            ("?namespace=none", 404),
            ("?namespace=demo&namespace=demo", 400),
            ("?x=1", 400),
        ):
            async with daemon.request("GET", f"/v1/events{query}") as answer:
                assert answer.status == status


async def test_a_listener_goes_on_where_it_was_and_is_told_what_it_missed():
    async with running(policy=Policy("toy", disk=DiskTier(write="evict"))) as daemon:
        await daemon.register()
        with patch.object(feed.Feed.__init__, "__defaults__", (4,)):
            async with ear(daemon) as listener:
                await put(daemon, 1)
                (first,) = await listener.hear(1)
        for number in (2, 3):
            await put(daemon, number)
        async with ear(daemon, Last_Event_ID=first.id) as listener:
            assert [n.key for n in await listener.hear(2)] == [key(2), key(3)]
        for number in (4, 5, 6):
            await put(daemon, number)
        for lost in (first.id, "0123456789abcdef-0", "nonsense", first.id + "0"):
            async with ear(daemon, Last_Event_ID=lost) as listener:
                (overflow,) = await listener.hear(1)
                assert (overflow.what, overflow.namespace, overflow.key) == (What.OVERFLOW, None, None)
        async with ear(daemon, "?namespace=demo", Last_Event_ID=overflow.id) as listener:
            await put(daemon, 7)
            assert [n.key for n in await listener.hear(1)] == [key(7)], "the overflow's id goes on from now"
        async with daemon.request("GET", "/metrics") as answer:
            text = await answer.text()
        assert "kvtcd_notice_overflows_total 4.0" in text
        assert 'kvtcd_notices_total{what="stored"} 7.0' in text


async def test_a_slow_reader_costs_no_memory_and_is_told():
    async with running(policy=Policy("toy", disk=DiskTier(write="evict"))) as daemon:
        await daemon.register()
        with (
            patch.object(feed.Feed.__init__, "__defaults__", (8,)),
            daemon.toy.service.feeds.listen("uid:1", None, None) as listener,
        ):
            for number in range(20):
                await put(daemon, number)
            assert len(daemon.toy.service.feeds._feeds["uid:1"]._ring) == 8
            (overflow,) = await listener.take(PATIENCE_S)
            assert overflow.what is What.OVERFLOW
            assert await listener.take(0.01) == []
            await put(daemon, 20)
            assert [n.key for n in await listener.take(PATIENCE_S)] == [key(20)]


async def test_who_takes_no_bytes_is_let_go_of():
    async with running(unhurried(stall_s=0.2)) as daemon:
        feeds = daemon.toy.service.feeds
        _, writer = await asyncio.open_unix_connection(daemon.socket)
        writer.transport.pause_reading()
        writer.write(b"GET /v1/events HTTP/1.1\r\nHost: kvtcd\r\n\r\n")
        await until(lambda: feeds.watched("uid:1"))
        for number in range(200):
            for _ in range(50):
                feeds.publish("uid:1", Notice(What.PURGED, namespace="n" * 60))
            await asyncio.sleep(0.001 * (number % 2))
        await until(lambda: feeds._feeds["uid:1"].listeners == 0)
        await closed(writer)


@pytest.mark.slow
async def test_who_reads_slowly_but_steadily_is_told_what_he_missed_and_stays():
    async with running(unhurried(stall_s=3.0)) as daemon:
        feeds, loop = daemon.toy.service.feeds, asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.setblocking(False)
            await loop.sock_connect(listener, str(daemon.socket))
            await loop.sock_sendall(listener, b"GET /v1/events HTTP/1.1\r\nHost: kvtcd\r\n\r\n")
            await until(lambda: feeds.watched("uid:1"))
            received, begun = b"", loop.time()
            while b"overflow" not in received:
                for _ in range(3000):
                    feeds.publish("uid:1", Notice(What.PURGED, namespace="n" * 60))
                piece = await loop.sock_recv(listener, 250)
                assert piece, "the stream has ended"
                received += piece
                await asyncio.sleep(0.02)
            assert loop.time() - begun > 3.0, "a write took longer than a stall may"
            assert feeds._feeds["uid:1"].listeners == 1


async def test_silence_is_broken_by_signs_of_life():
    async with running() as daemon:
        with patch("kvtcd.api.notices.HEARTBEAT_S", 0.02):
            async with ear(daemon) as listener:
                received = b""
                async with asyncio.timeout(PATIENCE_S):
                    while received.count(b":\n\n") < 4:
                        received += await listener.answer.content.readany()
        assert set(received) == set(b":\n")


async def test_listeners_are_bounded_and_let_go():
    async with running() as daemon:
        feeds = daemon.toy.service.feeds
        with patch("kvtcd.engine.feed.LISTENERS", 2):
            async with ear(daemon), ear(daemon):
                async with daemon.request("GET", "/v1/events") as answer:
                    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                async with ear(daemon, **{TENANT_HEADER: "uid:2"}):
                    pass
            await until(lambda: feeds._feeds["uid:1"].listeners == 0)
            async with ear(daemon):
                pass


async def test_a_stop_ends_the_stream_at_once(monkeypatch):
    late = 10 * PATIENCE_S
    monkeypatch.setattr("kvtcd.api.notices.HEARTBEAT_S", late)
    async with running(unhurried(shutdown_s=late)) as daemon, ear(daemon) as listener:
        async with asyncio.timeout(
            PATIENCE_S
        ):  # and not with the next sign of life, or all that a stop may take
            await daemon.runner.cleanup()
            assert (await listener.answer.content.read()).strip(b":\n") == b""
        with pytest.raises(Stopping), daemon.toy.service.feeds.listen("uid:1", None, None):
            pass
