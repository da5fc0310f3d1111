"""The client for programs without an event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvtcd.client import endpoints
from kvtcd.client.arguments import engine_keys
from kvtcd.client.call import Options, Salt, flat, room
from kvtcd.client.connections import fill
from kvtcd.client.daemon import DaemonClient, require_ok
from kvtcd.client.device import Data, DevicePart, Room, rooms, take_over
from kvtcd.client.groups import groups, on_host
from kvtcd.client.regions import in_region, one_each
from kvtcd.core import wire
from kvtcd.core.errors import NotFound
from kvtcd.core.fields import json_object
from kvtcd.core.keys import EngineKey
from kvtcd.core.matches import LeaseInfo, Matches
from kvtcd.core.messages import BlockHead, BlockResult, Found
from kvtcd.core.operation import Operation
from kvtcd.core.place import Tier


class Client(DaemonClient):
    """A client of one daemon. Any thread may use it.

    Every method raises the error of `core.errors` that the daemon met, `Unavailable` if there is no daemon,
    and `DeadlineExceeded` if it does not answer. `salt` parts the blocks of one tenant further (text stands
    for its UTF-8); `deadline` is in seconds.

    Args:
        address: path of the daemon's socket, or ``http://host:port``; default ``$KVTCD_SOCKET``, else
            ``/run/kvtcd/kvtcd.sock``.
        token: for a daemon that is reached by TCP; default ``$KVTCD_TOKEN``.
        timeout: seconds for each read and write on the socket.

    Example:
        Store a block under a key, and read it back::

            with Client() as client:
                client.register("demo", identity)
                client.put("demo", BlockHead(key, tokens=256, first_token=0), data)
                data = client.get("demo", key)
    """

    def match(
        self,
        name: str,
        keys: Iterable[bytes],
        *,
        all_ranks: bool = False,
        lease: float | None = None,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> Matches:
        """Say of each key whether its block is there, and in which tier.

        With `all_ranks`, only what every rank of a model that is split has counts, in the slowest tier.
        With `lease`, what was found stays for so many seconds, unless leases hold too much already: then the
        answer has none.
        """
        return self._run(
            endpoints.match(name, keys, Options(salt, deadline), all_ranks=all_ranks, lease=lease)
        )

    def match_tokens(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        all_ranks: bool = False,
        lease: float | None = None,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> Matches:
        """Find the longest stored prefix of a token sequence under our own key chain."""
        return self._run(
            endpoints.match_tokens(name, tokens, Options(salt, deadline), all_ranks=all_ranks, lease=lease)
        )

    def pin(
        self,
        name: str,
        keys: Iterable[bytes],
        seconds: float,
        *,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> LeaseInfo:
        """Keep blocks, wherever they are, for so many seconds; all of them or none.

        Raises:
            NotFound: one of them is not there.
            Busy: leases hold as much as they may already.
        """
        return self._run(endpoints.pin(name, keys, seconds, Options(salt, deadline)))

    def give_back(self, lease_id: str) -> bool:
        """End a lease; tell whether it was still held."""
        try:
            self._run(endpoints.give_back(lease_id))
        except NotFound:
            return False
        return True

    def put(
        self,
        name: str,
        block: BlockHead,
        data: Data,
        *,
        durable: bool = False,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> BlockResult:
        """Store a block of raw bytes; with `durable`, return once it is on disk.

        Raises:
            BlockMismatch: the bytes are not a block of this namespace.
            Busy: no room could be made in time.
        """
        options = Options(salt, deadline)
        if loan := self._regions.lend([data]):
            call = endpoints.put(name, block, loan.only(), options, durable=durable)
            if (stored := self._on_loan(loan, call)) is not None:
                return stored
        if isinstance(data, DevicePart):
            data = data.on_host()
            return self.put(name, block, data, durable=durable, salt=salt, deadline=deadline)
        return self._run(endpoints.put(name, block, data, options, durable=durable))

    def put_many(
        self,
        name: str,
        blocks: Iterable[tuple[BlockHead, Data]],
        *,
        durable: bool = False,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> tuple[BlockResult, ...]:
        """Store blocks; without parents of their own they continue each other in order. A result for each."""
        results: list[BlockResult] = []
        for group in groups(blocks):
            results += self._put_group(name, group, Options(salt, deadline), durable=durable)
        return tuple(results)

    def _put_group(
        self, name: str, group: Sequence[tuple[BlockHead, Data]], options: Options, *, durable: bool
    ) -> tuple[BlockResult, ...]:
        if loan := self._regions.lend([data for _, data in group]):
            asked = loan.put(head for head, _ in group)
            call = endpoints.put_many_placed(name, asked, options, durable=durable)
            if (results := self._on_loan(loan, call)) is not None:
                return results
        if any(isinstance(data, DevicePart) for _, data in group):
            return self._put_group(name, on_host(group), options, durable=durable)
        return self._run(endpoints.put_group(name, on_host(group), options, durable=durable))

    def get(
        self,
        name: str,
        key: bytes,
        *,
        out: bytearray | memoryview | None = None,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> memoryview:
        """Return the raw bytes of a block, in `out` if given: a buffer that is used again saves much time.

        Raises:
            NotFound: it is not there.
            BadRequest: `out` is too small.
        """
        options = Options(salt, deadline)
        if out is not None and (loan := self._regions.lend([out])):
            landed = self._on_loan(loan, endpoints.get_placed(name, key, loan.only(), options))
            if landed is not None:
                return flat(out)[: landed.nbytes]
        call = endpoints.get(name, key, options)
        with self._pool.exchange(call) as response:
            require_ok(call, response)
            nbytes = int(response.headers["Content-Length"])
            view = room(nbytes, out)
            fill(response, view)
            return view

    def get_many(
        self,
        name: str,
        keys: Iterable[bytes],
        *,
        out: Sequence[bytearray | memoryview] | None = None,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> Iterator[tuple[EngineKey, memoryview | None]]:
        """Yield each key with the raw bytes of its block, or None for a miss, in the order asked for.

        With `out`, the bytes of each are in a buffer of its own.

        Raises:
            BadRequest: `out` has not one buffer for each key, or one is too small.
        """
        keys, options = list(keys), Options(salt, deadline)
        one_each(keys, out)
        if out and (loan := self._regions.lend(out)):
            asked = loan.get(engine_keys(keys))
            landed = self._on_loan(loan, endpoints.get_many_placed(name, asked, options))
            if landed is not None:
                yield from in_region(landed, out)
                return
        call = endpoints.get_many(name, keys, options)
        with self._pool.exchange(call) as response:
            require_ok(call, response)
            prefix = memoryview(bytearray(wire.PREFIX_BYTES))
            at = 0
            while fill(response, prefix, may_end=True):
                header_bytes, body_bytes = wire.parse_prefix(prefix, endpoints.MAX_FRAME)
                header = memoryview(bytearray(header_bytes))
                fill(response, header)
                found = Found.from_json(json_object(bytes(header)))
                data = room(body_bytes, out[at] if out else None)
                fill(response, data)
                yield found.key, data if found.tier else None
                at += 1

    def fill(
        self,
        name: str,
        keys: Iterable[bytes],
        out: Sequence[Room],
        *,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> list[int | None]:
        """Read blocks into memory of the host or of a GPU; return how many bytes of each, None for a miss."""
        keys = engine_keys(keys)
        one_each(keys, out)
        if out and (loan := self._regions.lend(out)):
            call = endpoints.get_many_placed(name, loan.get(keys), Options(salt, deadline))
            if (landed := self._on_loan(loan, call)) is not None:
                return [one.nbytes if one.found.tier else None for one in landed]
        host = rooms(out)
        got = [
            None if data is None else data.nbytes
            for _, data in self.get_many(name, keys, out=host, salt=salt, deadline=deadline)
        ]
        take_over(out, got)
        return got

    def delete(self, name: str, key: bytes, *, salt: Salt = "", deadline: float | None = None) -> bool:
        """Remove a block from every tier; tell whether there was one.

        Raises:
            DeadlineExceeded: it is served no more, but readers or leases keep its bytes; that goes on.
        """
        try:
            self._run(endpoints.delete(name, key, Options(salt, deadline)))
        except NotFound:
            return False
        return True

    def flush(
        self,
        name: str,
        keys: Iterable[bytes] | None = None,
        *,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> tuple[BlockResult, ...]:
        """Return once blocks are on disk; without `keys`, all of the namespace."""
        return self._run(endpoints.flush(name, keys, Options(salt, deadline)))

    def demote(
        self,
        name: str,
        keys: Iterable[bytes],
        *,
        wait: bool = True,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> Operation:
        """Move blocks to disk and out of host memory; with `wait`, return once that has ended."""
        operation = self._run(endpoints.demote(name, keys, Options(salt, deadline)))
        return self.ended(operation) if wait else operation

    def prefetch(
        self,
        name: str,
        keys: Iterable[bytes],
        *,
        to: Tier = Tier.HOST,
        wait: bool = True,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> Operation:
        """Bring blocks up to a tier of memory ahead of need; with `wait`, return once that has ended."""
        operation = self._run(endpoints.prefetch(name, keys, Options(salt, deadline), to=to))
        return self.ended(operation) if wait else operation
