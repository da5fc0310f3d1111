"""Random histories of a catalog against a world that finishes, fails and reorders work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import get_args
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.invariants import check, checked_victims

from kvtcd.core import events as ev
from kvtcd.core.catalog import Catalog
from kvtcd.core.events import Reason, Tier
from kvtcd.core.keys import RecordKey
from kvtcd.core.policy import DiskTier, Evict, EvictName, HostTier, Policy
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings

KEYS = [RecordKey(bytes([i]) * 32) for i in range(8)]


@dataclass
class World:
    """What really lies where, and what is going on: moved only by actions, as tiers would be."""

    bytes_at: dict[tuple[RecordKey, Tier], bool] = field(default_factory=dict)
    moves: list[ev.Move] = field(default_factory=list)
    drops: list[ev.Drop] = field(default_factory=list)
    waiting: dict[int, ev.Event] = field(default_factory=dict)
    filling: list[RecordKey] = field(default_factory=list)
    reading: list[RecordKey] = field(default_factory=list)
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
    lost: int = 0


class CatalogMachine(RuleBasedStateMachine):
    """The catalog must serve only what is there, hold its invariants, and let nobody wait for ever."""

    @initialize(
        host=st.integers(1, 12),
        disk=st.integers(0, 12),
        demotions=st.integers(1, 3),
        granule=st.integers(1, 3),
        policy=st.sampled_from(get_args(EvictName)),
        leaves_first=st.booleans(),
    )
    def start(self, host, disk, demotions, granule, policy="lru", leaves_first=True) -> None:
        self.world = World()
        self.ticket = 0
        self.evict = Evict(policy, leaves_first, half_life=10)
        sightings = Sightings(period=10**9, width=1 << 10)  # wide enough to be exact
        tiers = shelves(
            Policy("p", host=HostTier(0.9, 0.6), disk=DiskTier(high=0.95, low=0.8), evict=self.evict),
            sightings, host=host, disk=disk, granule=granule,
        )  # fmt: skip
        self.catalog = Catalog(
            tiers, lambda nbytes: nbytes + 1, sightings, demotions=demotions, clock=lambda: self.world.now
        )
        self.patch = mock.patch("kvtcd.core.room.victims", checked_victims)
        self.patch.start()

    def tell(self, event: ev.Event) -> None:
        self.world.moment += 1
        for action in self.catalog.handle(event):
            match action:
                case ev.Grant(ticket):
                    self.granted(self.world.waiting.pop(ticket))
                case ev.Deny(ticket, reason):
                    self.denied(self.world.waiting.pop(ticket), reason)
                case ev.Move(key, source, _, after):
                    assert self.world.bytes_at.get((key, source)), "a move starts from bytes that are there"
                    assert after >= 0
                    self.world.moves.append(action)
                case ev.Drop(key, tier):
                    assert not (tier is Tier.HOST and key in self.world.reading), "never under a reader"
                    assert all(m.key != key or m.source is not tier for m in self.world.moves)
                    self.world.drops.append(action)
                case ev.Lost():
                    self.world.lost += 1

    def denied(self, request: ev.Event, reason: Reason) -> None:
        match request, reason:
            case ev.Put(_, key), Reason.NOT_ADMITTED:
                seldom = self.world.seen[key] < request.on_sight
                assert seldom or self.evict.policy == "lfu", "only lfu compares newcomers"
            case ev.Get(_, key), Reason.NOT_FOUND:
                assert (
                    key not in self.world.reading
                    or self.world.now >= self.world.ends[key]
                    or (self.catalog.residents.entries[key].doomed)
                ), "what is read can be found"

    def granted(self, request: ev.Event) -> None:
        match request:
            case ev.Put(_, key, on_sight=on_sight, ttl=ttl):
                assert self.world.seen[key] >= on_sight, "seen too seldom"
                self.world.filling.append(key)
                self.world.born[key] = self.world.moment
                self.world.ends[key] = self.world.now + ttl if ttl else float("inf")
            case ev.Get(_, key):
                assert self.world.bytes_at.get((key, Tier.HOST)), "a reader finds bytes"
                self.world.reading.append(key)
            case ev.Settle(_, (key,), evict):  # of several, an early one may be evicted before the last
                assert self.world.bytes_at.get((key, Tier.DISK)), "durable means on disk"
                assert not (evict and self.world.bytes_at.get((key, Tier.HOST)))
            case ev.Delete(ticket, keys):
                for key in keys:
                    there = any(self.world.bytes_at.get((key, tier)) for tier in Tier)
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
        older=st.sampled_from([None, *KEYS]), behind=st.booleans(), packable=st.booleans(),
        on_sight=st.sampled_from([1, 1, 1, 2, 3]), ttl=st.sampled_from([None, None, 1, 10]),
    )  # fmt: skip
    def put(self, key, nbytes, parent, older, behind, packable, on_sight=1, ttl=None) -> None:
        ticket = self.next_ticket()
        parent, older = (None if other == key else other for other in (parent, older))
        if parent is not None and parent >= key:
            parent = None  # hashes make chains acyclic; so do these
        self.world.seen[key] += 1
        offer = ev.Put(
            ticket, key, 1, nbytes, nbytes, parent, older, behind, packable, 1000 * key[0], on_sight, ttl
        )
        self.ask(offer, ticket)

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: RecordKey) -> None:
        ticket = self.next_ticket()
        self.world.seen[key] += bool(self.catalog.tiers(key))
        self.ask(ev.Get(ticket, key), ticket)

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        self.world.now += seconds
        self.tell(ev.Tick())
        for entry in self.catalog.residents.entries.values():
            assert entry.doomed or not self.catalog.residents.expired(entry), "a round of ticks misses none"

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
        if arrives:
            self.world.bytes_at[key, Tier.HOST] = True
            self.tell(ev.Filled(key))
        else:
            self.tell(ev.Abandoned(key))

    @precondition(lambda self: self.world.reading)
    @rule(data=st.data())
    def release(self, data) -> None:
        key = data.draw(st.sampled_from(self.world.reading))
        self.world.reading.remove(key)
        self.tell(ev.Release(key))

    @precondition(lambda self: self.world.moves)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["moved", "moved", "failed", "damaged"]),
        shrink=st.integers(0, 3),
    )
    def move_ends(self, data, outcome: str, shrink: int) -> None:
        move = data.draw(st.sampled_from(self.world.moves))
        self.finish(move, outcome, shrink)

    def finish(self, move: ev.Move, outcome: str, shrink: int) -> None:
        self.world.moves.remove(move)
        raw = self.catalog.residents.entries[move.key].raw_bytes
        if outcome == "moved":
            self.world.bytes_at[move.key, move.target] = True
            size = raw if move.target is Tier.HOST else max(1, raw + 1 - shrink)
            self.tell(ev.Moved(move.key, size))
        else:
            self.tell(ev.MoveFailed(move.key, damaged=outcome == "damaged" and move.source is Tier.DISK))

    @precondition(lambda self: self.world.drops)
    @rule(data=st.data())
    def drop_ends(self, data) -> None:
        drop = data.draw(st.sampled_from(self.world.drops))
        self.finish_drop(drop)

    def finish_drop(self, drop: ev.Drop) -> None:
        self.world.drops.remove(drop)
        self.world.bytes_at.pop((drop.key, drop.tier), None)
        self.tell(ev.Dropped(drop.key, drop.tier))

    @rule(key=st.sampled_from(KEYS), nbytes=st.integers(1, 3), ttl=st.sampled_from([None, 5]))
    def recover(self, key: RecordKey, nbytes: int, ttl: int | None = None) -> None:
        disk = self.catalog.residents.shelves.get(Tier.DISK)
        if disk is None or key in self.catalog.residents.entries or not disk.fits(nbytes):
            return
        self.world.bytes_at[key, Tier.DISK] = True
        self.world.born[key] = self.world.moment
        self.world.ends[key] = self.world.now + ttl if ttl else float("inf")
        self.tell(ev.Recovered(key, 1, nbytes, nbytes, nbytes, None, 0, ttl))

    @invariant()
    def truth(self) -> None:
        if hasattr(self, "catalog"):
            check(self.catalog)
            for key in KEYS:
                for tier in self.catalog.tiers(key):
                    assert self.world.bytes_at.get((key, tier)), "only what is there is offered"
                    assert self.world.now < self.world.ends[key], "nothing is served after its time"

    def teardown(self) -> None:
        """Liveness: once the world has caught up, nobody waits."""
        if not hasattr(self, "catalog"):
            return
        self.catch_up()
        assert not self.world.waiting, f"still waiting: {self.world.waiting}"
        assert not self.world.moves
        self.wait(100)
        self.catch_up()
        forgotten = [key for key, end in self.world.ends.items() if end <= self.world.now]
        assert not any(key in self.catalog.residents.entries for key in forgotten), "time to live ends"
        self.patch.stop()

    def catch_up(self) -> None:
        for _ in range(10_000):
            if self.world.moves:
                self.finish(self.world.moves[0], "moved", 0)
            elif self.world.drops:
                self.finish_drop(self.world.drops[0])
            elif self.world.filling:
                key = self.world.filling.pop()
                self.world.bytes_at[key, Tier.HOST] = True
                self.tell(ev.Filled(key))
            elif self.world.reading:
                self.tell(ev.Release(self.world.reading.pop()))
            else:
                break
            check(self.catalog)


def test_a_block_that_is_to_leave_the_host_keeps_its_disk_copy() -> None:
    """Found by a long run: a demotion waited for ever when the disk copy went under a held host copy."""
    machine = CatalogMachine()
    machine.start(host=4, disk=12, demotions=1, granule=1)
    machine.recover(KEYS[0], 1)
    machine.get(KEYS[0])
    machine.finish(machine.world.moves[0], "moved", 0)
    machine.settle([KEYS[0]], evict=True)
    for number, nbytes in enumerate((3, 3, 3, 2), start=1):
        machine.recover(KEYS[number], nbytes)
    machine.teardown()


def test_a_block_that_goes_while_a_reader_waits_for_room_is_not_moved_up() -> None:
    """Found by a long run: the only copy was evicted for the very room that the reader waited for."""
    machine = CatalogMachine()
    machine.start(host=8, disk=4, demotions=1, granule=2)
    machine.put(KEYS[2], 1, None, None, behind=False, packable=False)
    machine.world.filling.clear()
    machine.tell(ev.Abandoned(KEYS[2]))
    machine.recover(KEYS[0], 3)
    machine.put(KEYS[1], 3, None, None, behind=False, packable=True)
    machine.world.filling.clear()
    machine.world.bytes_at[KEYS[1], Tier.HOST] = True
    machine.tell(ev.Filled(KEYS[1]))
    machine.get(KEYS[0])
    machine.finish_drop(machine.world.drops[0])
    machine.truth()
    machine.teardown()


CatalogMachine.TestCase.settings = settings(
    max_examples=400, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCatalog = CatalogMachine.TestCase
