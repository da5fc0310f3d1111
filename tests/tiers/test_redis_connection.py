"""What our connections of redis-py read and write is what its own do, however the bytes come."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis._parsers import Encoder, _AsyncRESP3Parser
from redis.asyncio import Connection
from redis.exceptions import ConnectionError as Gone
from redis.exceptions import InvalidResponse
from support.patience import PATIENCE_S

from kvtcd.tiers.remote import redis_connection
from kvtcd.tiers.remote.redis_connection import DirectConnection, Inlet, Joined, Parser

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGE = 8
"""Bytes of a large value here, so that all that can happen to one happens within a few."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(redis_connection, "LARGE", LARGE)


class Twin:
    """A transport that carries nothing: its other side is the test.

    Attributes:
        sent: what was written, write by write.
    """

    def __init__(self) -> None:
        self.paused = self.closed = False
        self.sent: list[bytes] = []

    def get_extra_info(self, _: str) -> None:
        return None

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data) -> None:
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.closed = True


class Ours:
    """Our parser on an inlet, to which bytes come as asyncio brings them."""

    def __init__(self) -> None:
        self._reader, self.encoder = asyncio.StreamReader(), Encoder("utf-8", "strict", False)
        self.transport = Twin()
        self.inlet = Inlet(self._reader)
        self.inlet.connection_made(self.transport)
        self.parser = Parser(1 << 16)
        self.parser.on_connect(self)

    def come(self, data: bytes) -> None:
        while data:
            room = self.inlet.get_buffer(-1)
            count = min(len(room), len(data))
            room[:count] = data[:count]
            self.inlet.buffer_updated(count)
            data = data[count:]

    def end(self) -> None:
        self.inlet.eof_received()

    def lose(self, error: Exception) -> None:
        self.inlet.connection_lost(error)


class Theirs:
    """The library's parser on a stream reader."""

    def __init__(self) -> None:
        self._reader, self.encoder = asyncio.StreamReader(), Encoder("utf-8", "strict", False)
        self.parser = _AsyncRESP3Parser(1 << 16)
        self.parser.on_connect(self)

    def come(self, data: bytes) -> None:
        self._reader.feed_data(data)

    def end(self) -> None:
        self._reader.feed_eof()

    def lose(self, error: Exception) -> None:
        self._reader.set_exception(error)


def plain(answer: object) -> object:
    """Return an answer so that two of them can be compared."""
    match answer:
        case memoryview():
            return bytes, bytes(answer)
        case list():
            return [plain(one) for one in answer]
        case dict():
            return [(plain(key), plain(value)) for key, value in answer.items()]
        case BaseException():
            return type(answer), str(answer)
        case _:
            return type(answer), answer


async def answers(side: Ours | Theirs, parts: Sequence[bytes], end: str = "") -> list[object]:
    """Return what is read of bytes that come in parts, up to the first error that is raised."""
    found: list[object] = []

    async def read() -> None:
        while True:
            try:
                found.append(plain(await side.parser.read_response()))
            except Exception as error:  # noqa: BLE001 - what is compared
                found.append(("raised", plain(error)))
                return

    reading = asyncio.create_task(read())
    for part in parts:
        await rested()
        side.come(part)
    await rested()
    if end == "eof":
        side.end()
    elif end:
        side.lose(ConnectionResetError(104, "reset"))
    await rested()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return found


async def rested() -> None:
    """Let all run that can."""
    for _ in range(8):
        await asyncio.sleep(0)


def bulk(kind: bytes, data: bytes) -> bytes:
    return kind + str(len(data)).encode() + b"\r\n" + data + b"\r\n"


DATA = st.one_of(st.binary(max_size=3 * LARGE), st.sampled_from([b"x" * (LARGE + n) for n in (-1, 0, 1)]))
LEAF = st.one_of(
    st.sampled_from([
        b"+OK\r\n", b":7\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(12345678901234567890\r\n",
        b"-ERR no\r\n", b"-WRONGTYPE a list\r\n", b"-MOVED 3999 127.0.0.1:6381\r\n",
        b"-NOPERM this user has no permissions\r\n", b"-LOADING it loads\r\n", b"$0\r\n\r\n",
    ]),
    DATA.map(lambda data: bulk(b"$", data)),
    st.text("abc \N{SNOWMAN}", max_size=20).map(lambda text: bulk(b"!", b"ERR " + text.encode())),
    DATA.map(lambda data: bulk(b"=", b"txt:" + data)),
)  # fmt: skip
ANSWER = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: b"*%d\r\n" % len(parts) + b"".join(parts)),
        st.lists(inner, max_size=3).map(lambda parts: b"~%d\r\n" % len(parts) + b"".join(parts)),
        st.lists(st.tuples(st.integers(0, 99).map(lambda n: b":%d\r\n" % n), inner), max_size=2).map(
            lambda pairs: b"%%%d\r\n" % len(pairs) + b"".join(key + value for key, value in pairs)
        ),
    ),
    max_leaves=6,
)
STREAM = st.lists(ANSWER, min_size=1, max_size=4).map(b"".join)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    bounds = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in pairwise(bounds) if end > start]


@settings(deadline=None, max_examples=200)
@given(
    data=STREAM, places=st.lists(st.integers(0, 999), max_size=8), end=st.sampled_from(["", "eof", "lost"])
)
def test_answers_are_those_of_the_librarys_own_parser(data: bytes, places, end: str) -> None:
    async def both() -> tuple[list[object], list[object]]:
        parts = cut(data, places)
        return await answers(Ours(), parts, end), await answers(Theirs(), parts, end)

    ours, theirs = asyncio.run(both())
    assert ours == theirs


TWO = bulk(b"$", bytes(range(3 * LARGE))) + b"-WRONGTYPE no\r\n" + bulk(b"$", b"y" * LARGE) + b"_\r\n"


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["eof", "lost"])
@pytest.mark.parametrize("length", range(len(TWO) + 1))
async def test_a_connection_may_end_at_any_place(length: int, end: str) -> None:
    ours = await answers(Ours(), [TWO[:length]], end)

    assert ours == await answers(Theirs(), [TWO[:length]], end)
    assert ours[-1][0] == "raised"


@pytest.mark.asyncio
@pytest.mark.parametrize("pieces", [1, 5, 99])
async def test_a_large_value_lies_where_it_was_received(pieces: int) -> None:
    side, value = Ours(), bytes(range(99))
    reading = asyncio.create_task(side.parser.read_response())
    message = bulk(b"$", value)
    for start in range(0, len(message), pieces):
        await rested()
        side.come(message[start : start + pieces])
    answer = await reading

    assert isinstance(answer, memoryview)
    assert answer == value


@pytest.mark.asyncio
@pytest.mark.parametrize("length", range(5, 5 + 2 * LARGE + 2))
async def test_nothing_is_taken_for_an_answer_after_a_value_was_left(length: int) -> None:
    """What comes next would be the middle of it, and may say anything."""
    side, message = Ours(), bulk(b"$", b":1\r\n" * (LARGE // 2))
    reading = asyncio.create_task(side.parser.read_response())
    await rested()
    side.come(message[:length])
    await rested()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    side.come(message[length:])

    with pytest.raises(Gone, match="left before"):
        async with asyncio.timeout(PATIENCE_S):
            await side.parser.read_response()


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [None, ConnectionResetError(104, "reset")])
async def test_a_connection_may_end_in_the_turn_in_which_a_value_began(error: Exception | None) -> None:
    side = Ours()
    reading = asyncio.create_task(side.parser.read_response())
    await rested()
    side.come(b"$99\r\n")
    await rested()
    side.come(b"abc")
    side.lose(error)
    with pytest.raises((Gone, ConnectionResetError)):
        async with asyncio.timeout(PATIENCE_S):
            await reading


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("message", "what"),
    [
        (b"$%d\r\n" % (redis_connection.MOST + 1), "more than"),
        (b"$%d\r\n" % LARGE + b"x" * LARGE + b"+OK\r\n", "ends with"),
    ],
)
async def test_what_is_no_value_is_refused(message: bytes, what: str) -> None:
    side = Ours()
    side.come(message)
    with pytest.raises(InvalidResponse, match=what):
        async with asyncio.timeout(PATIENCE_S):
            await side.parser.read_response()


@pytest.mark.asyncio
async def test_a_stream_that_nobody_reads_is_stopped() -> None:
    side = Ours()
    for _ in range(1000):
        if side.transport.paused:
            break
        side.come(b"+OK\r\n" * 100)
    assert side.transport.paused


@settings(deadline=None, max_examples=100)
@given(
    values=st.lists(st.lists(st.binary(max_size=20_000), min_size=1, max_size=3), max_size=4),
    piece=st.integers(1, 9000),
)
def test_what_is_written_is_what_the_library_would_write(values, piece: int) -> None:
    async def written() -> list[bytes]:
        connection, twin, reader = DirectConnection(), Twin(), asyncio.StreamReader()
        inlet = Inlet(reader)
        inlet.connection_made(twin)
        connection._writer = asyncio.StreamWriter(twin, inlet, reader, asyncio.get_running_loop())
        joined = [("SET", str(number), Joined(tuple(parts))) for number, parts in enumerate(values)]
        await connection._send_packed_command(connection.pack_commands(joined))
        connection._close()
        return twin.sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_connection, "_PIECE", piece)
        patch.setattr(redis_connection, "LARGE", 10_000)  # the library looks into what is shorter than 6,000
        sent = asyncio.run(written())

    plainly = [("SET", str(number), b"".join(parts)) for number, parts in enumerate(values)]
    assert b"".join(sent) == b"".join(Connection().pack_commands(plainly))
    assert all(len(part) <= piece for part in sent)
