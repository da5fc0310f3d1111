"""Memory that clients share: from the side socket to the bytes of blocks, and nobody else's."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import mmap
import os
import socket
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from support.http import NS, TENANT_HEADER, Daemon, running, unhurried, until
from support.patience import PATIENCE_S
from support.placed import get, key, put, span
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, block

from kvtcd.api.region import HostRegion
from kvtcd.api.state import REGIONS
from kvtcd.core.errors import BadRequest, NotFound, TooLarge
from kvtcd.core.messages import BlockHead, Found
from kvtcd.core.place import Tier
from kvtcd.core.regions import (
    HELLO,
    SEALS,
    Grant,
    Landed,
    Placed,
    Span,
    side_socket,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.asyncio
SIZE = 8 * BLOCK_BYTES
OCTETS = {"Content-Type": "application/octet-stream"}


def head(number: int) -> BlockHead:
    return BlockHead(key(number), BLOCK_TOKENS, number * BLOCK_TOKENS, key(number - 1) if number else None)


def memfd(nbytes: int = SIZE, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Shared:
    """What a client without our library does: one memfd, one message."""

    def __init__(self, daemon: Daemon, nbytes: int = SIZE) -> None:
        fd = memfd(nbytes)
        self.memory = memoryview(mmap.mmap(fd, nbytes))
        self.connection, self.answer = hand_over(daemon, [fd])
        os.close(fd)

    @property
    def region(self) -> str:
        return self.answer["region"]


def hand_over(daemon: Daemon, fds: list[int], message: bytes = HELLO) -> tuple[socket.socket, dict]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE_S)
    connection.connect(side_socket(str(daemon.socket)))
    socket.send_fds(connection, [message], fds)
    return connection, json.loads(connection.recv(4096) or b"{}")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def closing(*sockets: socket.socket) -> Iterator[None]:
    try:
        yield
    finally:
        for one in sockets:
            one.close()


async def share(daemon: Daemon, nbytes: int = SIZE) -> Shared:
    return await asyncio.to_thread(Shared, daemon, nbytes)


async def test_blocks_go_in_and_out_of_a_region():
    async with running() as daemon:
        await daemon.register()
        shared = await share(daemon)
        with closing(shared.connection):
            assert shared.answer["bytes"] == SIZE
            for number in range(3):
                shared.memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] = block(number)
            status, answer = await put(daemon, shared.region, *((head(n), span(n)) for n in range(3)))
            assert (status, [row["outcome"] for row in answer["results"]]) == (200, ["stored"] * 3)

            shared.memory[:] = bytes(SIZE)
            status, answer = await get(
                daemon, shared.region, (key(2), span(0)), (key(9), span(1)), (key(0), span(5))
            )
            assert status == 200
            assert answer["blocks"] == [
                Landed(Found(key(2), BLOCK_TOKENS, Tier.HOST), BLOCK_BYTES).to_json(),
                Landed(Found(key(9))).to_json(),
                Landed(Found(key(0), BLOCK_TOKENS, Tier.HOST), BLOCK_BYTES).to_json(),
            ]
            parts = [bytes(shared.memory[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES]) for n in range(8)]
            zero = bytes(BLOCK_BYTES)
            assert parts == [block(2), zero, zero, zero, zero, block(0), zero, zero]


async def test_one_block_names_its_place_in_the_query():
    async with running() as daemon:
        await daemon.register()
        shared = await share(daemon)
        with closing(shared.connection):
            shared.memory[BLOCK_BYTES : 2 * BLOCK_BYTES] = block(0)
            path = f"{NS}/blocks/{key(0).hex()}"
            query = head(0).to_query() | Placed(shared.region, span(1)).to_query()
            async with daemon.request("PUT", path, params=query, headers=OCTETS) as answer:
                assert (answer.status, (await answer.json())["outcome"]) == (201, "stored")
            query = Placed(shared.region, span(4)).to_query()
            async with daemon.request("GET", path, params=query) as answer:
                assert Landed.from_json(await answer.json()) == Landed(
                    Found(key(0), BLOCK_TOKENS, Tier.HOST), BLOCK_BYTES
                )
            assert bytes(shared.memory[4 * BLOCK_BYTES : 5 * BLOCK_BYTES]) == block(0)
            async with daemon.request("PUT", path, params=query, data=b"x", headers=OCTETS) as answer:
                assert answer.status == 400
            for broken in ({"region": shared.region}, query | {"offset": "-1"}, query | {"length": "0"}):
                async with daemon.request("GET", path, params=broken) as answer:
                    assert answer.status == 400


async def test_nothing_is_read_or_written_beyond_a_part_or_a_region():
    async with running() as daemon:
        await daemon.register()
        shared = await share(daemon)
        with closing(shared.connection):
            await put(daemon, shared.region, (head(0), span(0)))
            for wrong in (span(8), span(7, BLOCK_BYTES + 1), Span((1 << 62) - 1, 1)):
                status, answer = await put(daemon, shared.region, (head(1), wrong))
                assert (status, answer["field"]) == (400, "offset")
                status, answer = await get(daemon, shared.region, (key(0), wrong))
                assert (status, answer["field"]) == (400, "offset")
            shared.memory[:] = b"\xff" * SIZE
            status, answer = await get(daemon, shared.region, (key(0), span(3, BLOCK_BYTES - 1)))
            assert (status, answer["field"]) == (400, "length")
            assert bytes(shared.memory) == b"\xff" * SIZE
            status, answer = await put(daemon, shared.region, (head(1), span(1, BLOCK_BYTES - 1)))
            assert status == 422


async def test_a_region_is_its_tenants_alone():
    async with running() as daemon:
        await daemon.register()
        await daemon.register(**{TENANT_HEADER: "uid:2"})
        shared = await share(daemon)
        with closing(shared.connection):
            for call in (put, get):
                first = head(0) if call is put else key(0)
                foreign = await call(daemon, shared.region, (first, span(0)), **{TENANT_HEADER: "uid:2"})
                unknown = await call(daemon, "0" * 32, (first, span(0)), **{TENANT_HEADER: "uid:2"})
                assert foreign == unknown
                assert foreign[0] == 404
                assert foreign[1]["what"] == "region"


async def test_a_region_ends_with_its_connection():
    async with running() as daemon:
        await daemon.register()
        shared = await share(daemon)
        regions = daemon.app[REGIONS]
        assert regions.nbytes == SIZE
        shared.connection.close()
        await until(lambda: not regions.nbytes)
        status, _ = await get(daemon, shared.region, (key(0), span(0)))
        assert status == 404


async def test_what_takes_no_time_is_copied_by_the_loop_and_the_rest_off_it(monkeypatch):
    async with running() as daemon:
        await daemon.register()
        shared = await share(daemon)
        lane = daemon.app[REGIONS].lanes[0]
        with closing(shared.connection):
            for number, (at_once, off_loop) in enumerate(((BLOCK_BYTES, 0), (BLOCK_BYTES - 1, 2))):
                monkeypatch.setattr(HostRegion, "at_once", at_once)
                shared.memory[:BLOCK_BYTES] = block(number)
                before = lane.ended
                assert (await put(daemon, shared.region, (head(number), span(0))))[0] == 200
                shared.memory[:BLOCK_BYTES] = bytes(BLOCK_BYTES)
                assert (await get(daemon, shared.region, (key(number), span(0))))[0] == 200
                assert shared.memory[:BLOCK_BYTES] == block(number)
                assert lane.ended - before == off_loop


async def test_who_ends_a_region_learns_when_nothing_writes_to_it_any_more(monkeypatch):
    monkeypatch.setattr(HostRegion, "at_once", 0)
    async with running() as daemon:
        regions = daemon.app[REGIONS]
        shared = await share(daemon)
        part = regions.part("uid:1", shared.region, span(0))
        begun, go = threading.Event(), threading.Event()

        def slow(memory: memoryview) -> None:
            begun.set()
            assert go.wait(PATIENCE_S)
            memory[:1] = b"x"

        lease = SimpleNamespace(landed=False, copy_to=slow)

        with closing(shared.connection):
            copying = asyncio.create_task(part.take(lease, PATIENCE_S))
            await asyncio.to_thread(begun.wait, PATIENCE_S)
            copying.cancel()
            shared.connection.shutdown(socket.SHUT_WR)
            end = asyncio.create_task(asyncio.to_thread(shared.connection.recv, 1))
            await until(lambda: not regions.nbytes)
            with pytest.raises(NotFound):
                await part.take(lease, PATIENCE_S)
            await asyncio.sleep(0.05)
            assert not end.done(), "the copy is under way"
            assert not copying.done(), "a copy outlives the cancellation of its caller"
            go.set()
            assert await end == b""
            assert shared.memory[0] == ord("x")
            with pytest.raises(asyncio.CancelledError):
                await copying


@pytest.mark.parametrize(
    ("fds", "message"),
    [
        ([], HELLO),
        ([partial(memfd)], b"KVTM\x02\x00"),
        ([partial(memfd)], HELLO + b"x"),
        ([partial(memfd), partial(memfd)], HELLO),
        ([partial(memfd)] * 9, HELLO),
        ([partial(os.open, "/dev/null", os.O_RDWR)], HELLO),
        ([partial(os.open, __file__, os.O_RDONLY)], HELLO),
        ([partial(memfd, seals=fcntl.F_SEAL_SHRINK)], HELLO),
        ([partial(memfd, seals=SEALS | fcntl.F_SEAL_WRITE)], HELLO),
        ([partial(memfd, 0)], HELLO),
    ],
)
async def test_what_is_no_sealed_memory_is_refused_and_its_descriptors_closed(fds, message):
    async with running() as daemon:
        await daemon.register()
        before = descriptors()
        given = [make() for make in fds]
        connection, answer = await asyncio.to_thread(hand_over, daemon, given, message)
        assert answer["status"] == 400
        assert connection.recv(1) == b"", "the connection ends"
        connection.close()
        for fd in given:
            os.close(fd)
        await until(lambda: descriptors() <= before)
        assert not daemon.app[REGIONS].nbytes


async def test_regions_of_a_tenant_are_bounded_in_number_and_size():
    async with running(unhurried(regions=2, region_bytes=3 * SIZE)) as daemon:
        first, second = await share(daemon), await share(daemon)
        third = await share(daemon)
        assert third.answer["status"] == 503
        second.connection.close()
        await until(lambda: daemon.app[REGIONS].nbytes == SIZE)
        large = await share(daemon, 2 * SIZE + 4096)
        assert large.answer["status"] == 413
        fitting = await share(daemon, 2 * SIZE)
        assert Grant.from_json(fitting.answer).nbytes == 2 * SIZE
        with closing(*(one.connection for one in (first, third, large, fitting))):
            pass


async def test_connections_that_hand_over_nothing_are_closed():
    async with running(unhurried(stall_s=0.1, connections=2)) as daemon:
        silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        with closing(*silent):
            for one in silent:
                one.settimeout(PATIENCE_S)
                one.connect(side_socket(str(daemon.socket)))
            assert [await asyncio.to_thread(one.recv, 1) for one in silent] == [b"", b"", b""]


async def test_without_descriptors_the_side_socket_waits_until_there_are_some(monkeypatch):
    monkeypatch.setattr("kvtcd.api.side._PAUSE_S", 0.2)
    async with running() as daemon:
        (side,) = daemon.runner.side_sockets
        real, asked = side._listening, []

        class Exhausted:
            def accept(self):
                asked.append(1)
                raise OSError(errno.EMFILE, "Too many open files")

            def __getattr__(self, name):
                return getattr(real, name)

        side._listening = Exhausted()
        begun = asyncio.get_running_loop().time()
        sharing = asyncio.create_task(share(daemon))
        await until(lambda: asked)
        await asyncio.sleep(0.1)
        pauses = (asyncio.get_running_loop().time() - begun) / 0.2
        assert len(asked) <= 1 + pauses, "it does not turn in circles"
        side._listening = real
        (await sharing).connection.close()


async def test_a_region_is_checked_before_it_is_mapped():
    for fd, limit, error in ((memfd(seals=0), SIZE, BadRequest), (memfd(), SIZE - 1, TooLarge)):
        with pytest.raises(error):
            HostRegion(fd, limit, None)
        os.close(fd)
