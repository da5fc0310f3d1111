"""Random histories of a catalog against a world that finishes, fails and reorders work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import get_args
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.invariants import check, checked_victims
from support.scene import COPIES, UNPACKS

from kvtcd.core import events as ev
from kvtcd.core.arrival import Arrival
from kvtcd.core.catalog import Catalog
from kvtcd.core.entry import State
from kvtcd.core.gpus import Gpus
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import MEMORY, Form, Place, Tier
from kvtcd.core.policy import Admit, DiskTier, Evict, EvictName, HostTier, Policy, Promote, Share
from kvtcd.core.reason import Reason
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings

KEYS = [RecordKey(bytes([i]) * 32) for i in range(8)]
OWNERS = ("a", "a", "b")
"""The tenants of namespaces 1, 2 and 3."""


def namespace_of(key: RecordKey) -> int:
    return 1 + (key[0] > 4) + (key[0] > 5)


amounts = st.sampled_from([1.0, 1.0, 0.5, 0.75, 3])
policies = st.builds(
    Policy,
    name=st.just("p"),
    host=st.builds(
        HostTier,
        form=st.sampled_from(["raw", "raw-then-packed"]), raw=st.sampled_from([0.1, 0.5]),
        high=st.just(0.9), low=st.just(0.6),
    ),
    disk=st.builds(
        DiskTier,
        write=st.sampled_from(["behind", "evict"]), high=st.just(0.95), low=st.just(0.8),
        ttl=st.sampled_from([None, None, 1, 10]),
    ),
    admit=st.builds(Admit, on_sight=st.sampled_from([1, 1, 1, 2, 3])),
    evict=st.builds(Evict, st.sampled_from(get_args(EvictName)), st.booleans(), st.just(10)),
    share=st.builds(Share, amounts, amounts),
    promote=st.builds(Promote, st.sampled_from(["host", "gpu"]), st.sampled_from([1, 1, 2])),
    packer_behind=st.sampled_from(["drop", "lossless"]),
)  # fmt: skip


@dataclass
class World:
    """What really lies where, and what is going on: moved only by actions, as tiers would be."""

    bytes_at: dict[tuple[RecordKey, Place], bool] = field(default_factory=dict)
    lifted: dict[RecordKey, str] = field(default_factory=dict)
    """On which GPU the bytes of a block are, or come to be."""
    moves: list[ev.Move] = field(default_factory=list)
    drops: list[ev.Drop] = field(default_factory=list)
    waiting: dict[int, ev.Event] = field(default_factory=dict)
    filling: list[RecordKey] = field(default_factory=list)
    arriving: dict[RecordKey, int | None] = field(default_factory=dict)
    """What of these fills is packed, from another host: what is left of their time."""
    reading: list[tuple[RecordKey, Place]] = field(default_factory=list)
    spoilt: set[tuple[RecordKey, Place]] = field(default_factory=set)
    """Copies of which a move or a reader said that they are damaged, and those that went with their file."""
    leases: list[tuple[RecordKey, ...]] = field(default_factory=list)
    moment: int = 0
    """Events told so far."""
    now: int = 0
    """Seconds."""
    seen: Counter[RecordKey] = field(default_factory=Counter)
    ends: dict[RecordKey, float] = field(default_factory=dict)
    """When each block that was granted or recovered last is to be forgotten."""
    born: dict[RecordKey, int] = field(default_factory=dict)
    """When the put of each block was granted; one that waits may be granted after a later delete."""
    asked: dict[int, int] = field(default_factory=dict)
    lost: Counter[tuple[RecordKey, Reason]] = field(default_factory=Counter)

    def there(self, key: RecordKey) -> bool:
        return any(self.bytes_at.get((key, place)) for place in Place)

    unlinked: bool = False
    """Whether copies are just lost with their file, which no lease prevents."""

    def leased(self, key: RecordKey) -> bool:
        return any(key in keys for keys in self.leases)


class CatalogMachine(RuleBasedStateMachine):
    """The catalog must serve only what is there, hold its invariants, and let nobody wait for ever."""

    @initialize(
        host=st.integers(1, 12),
        disk=st.integers(0, 12),
        gpu=st.integers(0, 6),
        descents=st.integers(1, 3),
        granule=st.integers(1, 3),
        policy=st.tuples(policies, policies, policies),
        on_disk=st.tuples(st.booleans(), st.just(True), st.just(True)),
        tenants=st.builds(Share, amounts, amounts),
    )
    def start(
        self, host, disk, descents, granule, policy, on_disk=(True,) * 3, gpu=0, gpus=None, tenants=None
    ) -> None:
        self.world = World()
        self.ticket, self.granule = 0, granule
        sightings = Sightings(period=10**9, width=1 << 10)  # wide enough to be exact
        whole = Policy("p", host=HostTier(high=0.9, low=0.6), disk=DiskTier(high=0.95, low=0.8))
        tiers = shelves(whole, sightings, host=host, disk=disk, granule=granule, tenants=tenants or Share())
        self.gpus = {name: size for name, size in (gpus or {"cuda:0": gpu}).items() if size}
        self.catalog = Catalog(
            tiers, lambda nbytes: nbytes + 1, sightings, gpus=Gpus.of(self.gpus, sightings, granule=granule),
            descents=descents, clock=lambda: self.world.now,
        )  # fmt: skip
        self.patch = mock.patch("kvtcd.core.relief.victims", checked_victims)
        self.patch.start()
        self.policies: dict[int, Policy] = {}
        self.on_disk = on_disk
        for number in (1, 2, 3):
            self.govern(number, policy[number - 1])

    @rule(number=st.integers(1, 3), policy=policies)
    def govern(self, number: int, policy: Policy) -> None:
        self.policies[number] = policy
        self.tell(ev.Govern(number, OWNERS[number - 1], policy, self.on_disk[number - 1]))

    def home(self, namespace: int) -> str | None:
        """Return the GPU that a policy names; config.toml names the first."""
        to = self.policies[namespace].promote.to
        return next(iter(self.gpus), None) if to in {"host", "gpu"} else to if to in self.gpus else None

    def tell(self, event: ev.Event) -> None:
        self.world.moment += 1
        for action in self.catalog.handle(event):
            match action:
                case ev.Grant(ticket, place):
                    self.granted(self.world.waiting.pop(ticket), place)
                case ev.Deny(ticket, reason):
                    self.denied(self.world.waiting.pop(ticket), reason)
                case ev.Move(key, source, target, after, _, device):
                    assert self.world.bytes_at.get((key, source)), "a move starts from bytes that are there"
                    assert not self.world.bytes_at.get((key, target)), "bytes that are there are not moved"
                    assert after >= 0
                    packs = source.form is Form.RAW and target.form is Form.PACKED
                    packed = any(self.world.bytes_at.get((key, p)) for p in (Place.PACKED, Place.DISK))
                    dropping = [drop for drop in self.world.drops if drop.key == key]
                    assert not (packs and packed) or dropping, "packing happens once"
                    if target is Place.GPU:
                        assert device == self.home(namespace_of(key)), "a block is lifted to its home"
                        self.world.lifted[key] = device
                    assert device == (self.world.lifted[key] if Place.GPU in (source, target) else None)
                    self.world.moves.append(action)
                case ev.Drop(key, place, device):
                    assert device == (self.world.lifted[key] if place is Place.GPU else None)
                    assert (key, place) not in self.world.reading, "never under a reader"
                    assert all(m.key != key or m.source is not place for m in self.world.moves)
                    self.world.drops.append(action)
                case ev.Lost(key, _, reason):
                    known = self.world.unlinked or reason in (Reason.DAMAGED, Reason.EXPIRED)
                    assert known or not self.world.leased(key)
                    self.world.lost[key, reason] += 1

    def denied(self, request: ev.Event, reason: Reason) -> None:
        match request, reason:
            case ev.Put(_, key), Reason.NOT_ADMITTED:
                policy = self.policies[request.namespace]
                seldom = self.world.seen[key] < policy.admit.on_sight
                assert seldom or policy.evict.policy == "lfu", "only lfu compares newcomers"
            case ev.Get(_, key), Reason.NOT_FOUND:
                read = [place for reader, place in self.world.reading if reader == key]
                assert (
                    all((key, place) in self.world.spoilt for place in read)
                    or self.world.now >= self.world.ends[key]
                    or key in self.catalog.residents.doomed
                ), "what is read can be found"

    def granted(self, request: ev.Event, place: Place | None) -> None:
        match request:
            case ev.Put(_, key, namespace):
                self.world.filling.append(key)
                self.world.born[key] = self.world.moment
                ttl = self.policies[namespace].disk.ttl
                if request.arrival:
                    ttl = self.world.arriving[key] = request.arrival.ttl
                self.world.ends[key] = self.world.now + ttl if ttl else float("inf")
            case ev.Get(_, key, straight):
                assert self.world.bytes_at.get((key, place)), "a reader finds bytes"
                fastest = self.catalog.places(key)[:1]
                assert place is Place.HOST or (place in straight and place in fastest)
                self.world.reading.append((key, place))
            case ev.Prefetch(_, key, tier):
                place = Place.GPU if tier is Tier.GPU else Place.HOST
                assert self.world.bytes_at.get((key, place)), "what was fetched ahead is there"
                at_home = tier is Tier.HOST or self.world.lifted[key] == self.home(namespace_of(key))
                assert at_home, "where its policy has it"
            case ev.Lease(_, keys):
                assert all(self.catalog.places(key) for key in keys), "what is leased is there"
                self.world.leases.append(keys)
            case ev.Settle(_, (key,), evict):  # of several, an early one may be evicted before the last
                assert self.world.bytes_at.get((key, Place.DISK)), "durable means on disk"
                assert not (evict and any(self.world.bytes_at.get((key, place)) for place in MEMORY))
            case ev.Delete(ticket, keys):
                for key in keys:
                    there = self.world.there(key)
                    later = there and self.world.born[key] > self.world.asked[ticket]
                    assert later or not there, "what was deleted is gone"

    def ask(self, request: ev.Event, ticket: int) -> None:
        self.world.waiting[ticket] = request
        self.world.asked[ticket] = self.world.moment
        self.tell(request)

    def next_ticket(self) -> int:
        self.ticket += 1
        return self.ticket

    @rule(
        key=st.sampled_from(KEYS), nbytes=st.integers(1, 6), parent=st.sampled_from([None, *KEYS]),
        older=st.sampled_from([None, *KEYS]), patient=st.booleans(),
    )  # fmt: skip
    def put(self, key, nbytes, parent=None, older=None, patient=True) -> None:
        ticket, namespace = self.next_ticket(), namespace_of(key)
        parent, older = (
            None if other == key or other is None or namespace_of(other) != namespace else other
            for other in (parent, older)
        )
        if parent is not None and parent >= key:
            parent = None  # hashes make chains acyclic; so do these
        self.world.seen[key] += 1
        self.ask(
            ev.Put(ticket, key, namespace, nbytes, nbytes, parent, older, 1000 * key[0], patient), ticket
        )

    @rule(
        key=st.sampled_from(KEYS), nbytes=st.integers(1, 6), packed=st.integers(1, 7),
        ttl=st.sampled_from([None, None, 5]),
    )  # fmt: skip
    def arrive(self, key, nbytes, packed, ttl) -> None:
        """A block comes packed, from another host."""
        ticket, arrival = self.next_ticket(), Arrival(packed, ttl)
        self.ask(ev.Put(ticket, key, namespace_of(key), nbytes, nbytes, arrival=arrival), ticket)

    @rule(
        key=st.sampled_from(KEYS), straight=st.sampled_from([frozenset(), UNPACKS, COPIES, UNPACKS | COPIES])
    )
    def get(self, key: RecordKey, straight: frozenset[Place] = frozenset()) -> None:
        ticket = self.next_ticket()
        places = self.catalog.places(key)
        self.world.seen[key] += bool(places)
        rising = {m.key for m in self.world.moves if m.target is Place.HOST} | {*self.catalog.room.promotions}
        self.ask(ev.Get(ticket, key, straight), ticket)
        if places and places[0] in straight:
            assert (key, places[0]) in self.world.reading, "who takes it from there is answered at once"
            later = {m.key for m in self.world.moves if m.target is Place.HOST} | {
                *self.catalog.room.promotions
            }
            assert key in rising or key not in later, "and asks for no raw copy"

    @rule(key=st.sampled_from(KEYS), tier=st.sampled_from(list(Tier)))
    def prefetch(self, key: RecordKey, tier: Tier) -> None:
        ticket = self.next_ticket()
        self.ask(ev.Prefetch(ticket, key, tier), ticket)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True))
    def lease(self, keys) -> None:
        ticket = self.next_ticket()
        self.ask(ev.Lease(ticket, tuple(keys)), ticket)
        assert ticket not in self.world.waiting, "a lease is answered at once"

    @precondition(lambda self: self.world.leases)
    @rule(data=st.data())
    def unlease(self, data) -> None:
        keys = self.world.leases.pop(data.draw(st.integers(0, len(self.world.leases) - 1)))
        self.tell(ev.Unlease(keys))

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        self.world.now += seconds
        self.tell(ev.Tick())
        for entry in self.catalog.residents.entries.values():
            doomed = entry.key in self.catalog.residents.doomed
            assert doomed or not self.catalog.residents.expired(entry), "a round of ticks misses none"

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3), evict=st.booleans())
    def settle(self, keys, evict) -> None:
        ticket = self.next_ticket()
        self.ask(ev.Settle(ticket, tuple(keys), evict), ticket)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def delete(self, keys) -> None:
        ticket = self.next_ticket()
        self.ask(ev.Delete(ticket, tuple(keys)), ticket)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def touch(self, keys) -> None:
        self.tell(ev.Touch(tuple(keys)))

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.world.waiting)))
        del self.world.waiting[ticket]
        self.tell(ev.Cancel(ticket))

    @precondition(lambda self: self.world.filling)
    @rule(data=st.data(), arrives=st.booleans())
    def fill(self, data, arrives: bool) -> None:
        key = data.draw(st.sampled_from(self.world.filling))
        self.world.filling.remove(key)
        place = self.place_of(key)
        if arrives:
            self.there_is(key, place)
            self.tell(ev.Filled(key, place))
        else:
            self.tell(ev.Abandoned(key, place))

    def there_is(self, key: RecordKey, place: Place) -> None:
        self.world.bytes_at[key, place] = True
        self.world.spoilt.discard((key, place))

    def place_of(self, key: RecordKey) -> Place:
        """Return where the bytes of a granted put go."""
        arrives = key in self.world.arriving
        self.world.arriving.pop(key, None)
        return Place.PACKED if arrives else Place.HOST

    @precondition(lambda self: self.world.reading)
    @rule(data=st.data())
    def release(self, data) -> None:
        key, place = reader = data.draw(st.sampled_from(self.world.reading))
        self.world.reading.remove(reader)
        damaged = place.form is Form.PACKED and data.draw(st.booleans())
        if damaged and key not in self.catalog.residents.transfers:
            self.world.spoilt.add(reader)
        self.tell(ev.Release(key, place, damaged))
        if damaged and key not in self.catalog.residents.transfers:
            assert place not in self.catalog.places(key), "what is damaged is served no more"

    @precondition(lambda self: self.world.moves)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["moved", "moved", "failed", "damaged", "full"]),
        shrink=st.integers(0, 3),
    )
    def move_ends(self, data, outcome: str, shrink: int) -> None:
        move = data.draw(st.sampled_from(self.world.moves))
        self.finish(move, outcome, shrink)

    def finish(self, move: ev.Move, outcome: str, shrink: int) -> None:
        self.world.moves.remove(move)
        raw = self.catalog.residents.entries[move.key].raw_bytes
        if outcome == "moved":
            self.there_is(move.key, move.target)
            size = raw if move.target.form is Form.RAW else max(1, raw + 1 - shrink)
            if move.source.form is Form.PACKED and move.target.form is Form.PACKED:
                size = self.catalog.residents.entries[move.key].copies[move.source].nbytes
                size = min(size, raw + 1)
            self.tell(ev.Moved(move.key, size))
        else:
            damaged = outcome == "damaged" and move.source.form is Form.PACKED
            if damaged:
                self.world.spoilt.add((move.key, move.source))
            full = outcome == "full" and move.target is Place.DISK
            self.tell(ev.MoveFailed(move.key, damaged=damaged, full=full))

    @precondition(lambda self: self.world.drops)
    @rule(data=st.data())
    def drop_ends(self, data) -> None:
        drop = data.draw(st.sampled_from(self.world.drops))
        self.finish_drop(drop)

    def finish_drop(self, drop: ev.Drop) -> None:
        self.world.drops.remove(drop)
        self.world.bytes_at.pop((drop.key, drop.place), None)
        self.tell(ev.Dropped(drop.key, drop.place))

    @rule(keys=st.sets(st.sampled_from(KEYS), min_size=1))
    def unlink(self, keys: set[RecordKey]) -> None:
        """A file is gone, with the bytes of these blocks but for those that are just moving."""
        gone = [key for key in sorted(keys) if all(move.key != key for move in self.world.moves)]
        for key in gone:
            self.world.bytes_at.pop((key, Place.DISK), None)
            self.world.spoilt.add((key, Place.DISK))
        self.world.unlinked = True
        self.tell(ev.Unlinked(tuple(gone)))
        self.world.unlinked = False
        for key in gone:
            assert Place.DISK not in self.catalog.places(key), "what is gone is served no more"

    @rule(key=st.sampled_from(KEYS), nbytes=st.integers(1, 3), ttl=st.sampled_from([None, 5]))
    def recover(self, key: RecordKey, nbytes: int, ttl: int | None = None) -> None:
        disk, namespace = self.catalog.residents.shelves.get(Tier.DISK), namespace_of(key)
        if disk is None or key in self.catalog.residents.entries or disk.tight(namespace, nbytes):
            return
        if not self.on_disk[namespace - 1]:
            return
        self.there_is(key, Place.DISK)
        self.world.born[key] = self.world.moment
        self.world.ends[key] = self.world.now + ttl if ttl else float("inf")
        self.tell(ev.Recovered((ev.Found(key, namespace, nbytes, nbytes, nbytes, None, 0, ttl),)))

    def held_by(self, device: str) -> int:
        """Return the bytes that a GPU has allocated: those on it, and those on their way to it."""
        filling = {move.key for move in self.world.moves if move.target is Place.GPU}
        keys = [key for key in KEYS if self.world.bytes_at.get((key, Place.GPU)) or key in filling]
        raw = (
            self.catalog.residents.entries[key].raw_bytes for key in keys if self.world.lifted[key] == device
        )
        return sum(-(-nbytes // self.granule) * self.granule for nbytes in raw)

    @invariant()
    def truth(self) -> None:
        if hasattr(self, "catalog"):
            check(self.catalog)
            for key, place in self.world.reading:
                assert self.world.bytes_at.get((key, place)) or (key, place) in self.world.spoilt
                ready = self.catalog.residents.entries[key].ready(place) or place is Place.GPU
                assert ready or (key, place) in self.world.spoilt, "3: what is read stays"
            for device, capacity in self.gpus.items():
                assert self.held_by(device) <= capacity, "no GPU has more than its own"
            for key in KEYS:
                for place in self.catalog.places(key):
                    assert self.world.bytes_at.get((key, place)), "only what is there is offered"
                    late = self.world.now >= self.world.ends[key]
                    assert not late or self.world.leased(key), "nothing is served after its time"

    def teardown(self) -> None:
        """Liveness: once the world has caught up, nobody waits."""
        if not hasattr(self, "catalog"):
            return
        try:
            self.come_to_rest()
        finally:
            self.patch.stop()

    def come_to_rest(self) -> None:
        self.catch_up()
        while self.world.leases:  # a delete may wait for them, and a put for the delete
            self.tell(ev.Unlease(self.world.leases.pop()))
        self.catch_up()
        assert not self.world.waiting, f"still waiting: {self.world.waiting}"
        assert not self.world.moves
        for entry in self.catalog.residents.entries.values():
            copies = entry.copies.values()
            assert all(copy.state is State.READY for copy in copies), "what is to go goes behind its readers"
        self.wait(100)
        self.catch_up()
        forgotten = [key for key, end in self.world.ends.items() if end <= self.world.now]
        assert not any(key in self.catalog.residents.entries for key in forgotten), "time to live ends"

    def catch_up(self) -> None:
        for _ in range(1_000):
            if self.world.moves:
                self.finish(self.world.moves[0], "moved", 0)
            elif self.world.drops:
                self.finish_drop(self.world.drops[0])
            elif self.world.filling:
                key = self.world.filling.pop()
                place = self.place_of(key)
                self.there_is(key, place)
                self.tell(ev.Filled(key, place))
            elif self.world.reading:
                self.tell(ev.Release(*self.world.reading.pop()))
            else:
                break
            check(self.catalog)
        else:
            raise AssertionError("it never comes to rest")
