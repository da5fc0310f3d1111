"""Hosts with a cache each, links, and a store that all of them share, in virtual time.

A request goes to one host. It holds a leading part of the request, the store perhaps a longer one; what
neither has is read. Packed bytes come through the host's link and out of the store, each of which moves one
request's after the other's; unpacking goes on meanwhile. The accelerator of a host reads one request after
the other. A request takes from the store what makes its first token come earlier, as things stand when it
arrives. What it leaves behind is in the host's cache and in the store at once.

Left out: decoding, batches, the time that bytes take on their way into the store, and faults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvtcd.lab.replay import Replay
from kvtcd.lab.speeds import Cost
from kvtcd.lab.trace import Request

Routing = Literal["spread", "first-token"]


class Line:
    """What moves bytes at a rate, those of one request after those of the other.

    Args:
        rate: bytes a second.

    Attributes:
        busy: seconds in use, so far.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self.busy = 0.0

    def done(self, now: float, nbytes: float) -> float:
        """Return when bytes that are asked for now would have come."""
        return max(now, self._free) + nbytes / self._rate

    def take(self, now: float, nbytes: float) -> None:
        """Move them."""
        self._free = self.done(now, nbytes)
        self.busy += nbytes / self._rate


@dataclass(frozen=True, slots=True)
class Costs:
    """What is the same for every host.

    Attributes:
        prefill: seconds to read so many tokens.
        unpack: seconds from packed to usable, of so many tokens.
        token_bytes: packed.
        latency: seconds until the first byte of the store comes.
    """

    prefill: Cost
    unpack: Cost
    token_bytes: float
    latency: float

    def rest(self, tokens: int, found: int) -> float:
        """Return the seconds to read what follows the first `found` tokens."""
        return self.prefill.at(tokens) - self.prefill.at(found)


@dataclass(slots=True)
class Host:
    """One machine.

    Attributes:
        link: to the store.
        cache: of its own; None: it keeps nothing.
        free: when its accelerator will have read what it was given.
        reading: seconds that it has been given.
    """

    link: Line
    cache: Replay | None
    free: float = 0.0
    reading: float = 0.0


class Way(NamedTuple):
    """One way to serve a request; the least is the earliest.

    Attributes:
        first_token: when it comes.
        remote: tokens out of the store.
        host: position of the host.
        local: tokens out of the host's own cache.
    """

    first_token: float
    remote: int
    host: int
    local: int


@dataclass(slots=True)
class Served:
    """What became of all requests.

    Attributes:
        seconds: to the first token, of each.
        local, remote, read: tokens, by where they came from.
    """

    seconds: list[float] = field(default_factory=list)
    local: int = 0
    remote: int = 0
    read: int = 0


class Fleet:
    """Hosts that serve a trace.

    Args:
        hosts: one at least.
        costs: of each of them.
        routing: ``spread`` gives requests to the hosts in turn, ``first-token`` to the one where the first
            token comes earliest.
        store: what is in the store; None: there is none.
        out: what its bytes come out of, for all hosts.
    """

    def __init__(
        self, hosts: list[Host], costs: Costs, routing: Routing, store: Replay | None, out: Line
    ) -> None:
        self.hosts = hosts
        self.served = Served()
        self._costs = costs
        self._routing = routing
        self._store = store
        self._out = out
        self._turn = 0

    def request(self, request: Request) -> None:
        """Serve one request."""
        shared = _tokens(request, self._store.found(request) if self._store else 0)
        turn = self._turn % len(self.hosts)
        self._turn += 1
        candidates = [turn] if self._routing == "spread" else range(len(self.hosts))
        self._take(request, min(way for host in candidates for way in self._ways(request, host, shared)))

    def _ways(self, request: Request, number: int, shared: int) -> list[Way]:
        host, now = self.hosts[number], request.at
        local = _tokens(request, host.cache.found(request) if host.cache else 0)
        ways = []
        for remote in {0, max(0, shared - local)}:
            found, ready = local + remote, now
            if found:
                ready += self._costs.unpack.at(found)
            if remote:
                nbytes = remote * self._costs.token_bytes
                arrived = max(host.link.done(now, nbytes), self._out.done(now, nbytes))
                ready = max(ready, arrived + self._costs.unpack.constant) + self._costs.latency
            start = max(ready, host.free)
            ways.append(Way(start + self._costs.rest(request.tokens, found), remote, number, local))
        return ways

    def _take(self, request: Request, way: Way) -> None:
        host, served, now = self.hosts[way.host], self.served, request.at
        found = way.local + way.remote
        if way.remote:
            nbytes = way.remote * self._costs.token_bytes
            host.link.take(now, nbytes)
            self._out.take(now, nbytes)
        host.free = way.first_token
        host.reading += self._costs.rest(request.tokens, found)
        served.seconds.append(way.first_token - now)
        served.local += way.local
        served.remote += way.remote
        served.read += request.tokens - found
        if host.cache:
            host.cache.request(request)
        if self._store:
            self._store.request(request)


def _tokens(request: Request, blocks: int) -> int:
    """Return the tokens of so many leading blocks; the last token of a request is always read."""
    return min(blocks * request.block_tokens, request.tokens - 1)
