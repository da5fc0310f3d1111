"""Orders of replacement against the simplest models: lists."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.keys import RecordKey
from kvtcd.core.replacement import Arc, Gdsf, Lfu, Lru, S3Fifo, Seat
from kvtcd.core.sightings import Sightings

CAPACITY = 20
HALF_LIFE = 10


@dataclass(frozen=True)
class Block:
    key: RecordKey
    tokens: int = 16
    position: int = 0


def key(number: int) -> RecordKey:
    return RecordKey(number.to_bytes(8, "little") * 4)


def position(name: int) -> int:
    """Return the tokens before a block in its sequence."""
    return 3000 * name


class Model:
    def __init__(self, sightings) -> None:
        self.sightings = sightings
        self.start()


class LruModel(Model):
    def start(self) -> None:
        self.queue = []

    def insert(self, name, _size) -> None:
        self.renew(name)

    def use(self, name) -> None:
        self.renew(name)

    def renew(self, name) -> None:
        self.queue = [n for n in self.queue if n != name] + [name]

    def discard(self, name) -> None:
        self.queue = [n for n in self.queue if n != name]

    hold = discard

    def release(self, name) -> None:
        self.queue.insert(0, name)

    def coldest(self):
        return list(self.queue)


class LfuModel(Model):
    """Rings of equal worth when fresh; whichever oldest of a ring is worth least goes next."""

    def start(self) -> None:
        self.rings, self.rank, self.stamp = {}, {}, {}

    def insert(self, name, _size) -> None:
        self.use(name)

    def use(self, name) -> None:
        self.hold(name)
        depth = (1 + position(name) // 512).bit_length()
        self.rank[name] = round(4 * (log2(self.sightings.count(key(name))) - depth / 16))
        self.renew(name)

    def renew(self, name) -> None:
        self.hold(name)
        self.stamp[name] = self.sightings.now
        self.rings.setdefault(self.rank[name], []).append(name)

    def hold(self, name) -> None:
        for ring in self.rings.values():
            if name in ring:
                ring.remove(name)

    def discard(self, name) -> None:
        self.hold(name)
        del self.rank[name]

    def release(self, name) -> None:
        self.rings.setdefault(self.rank[name], []).insert(0, name)

    def coldest(self):
        rings = {rank: list(ring) for rank, ring in self.rings.items() if ring}
        out = []
        while rings:
            worth = {
                r: r / 4 - ((self.sightings.now - self.stamp[q[0]]) / HALF_LIFE) ** 2
                for r, q in rings.items()
            }
            rank = min(rings, key=lambda r: (worth[r], r))
            out.append(rings[rank].pop(0))
            rings = {r: q for r, q in rings.items() if q}
        return out


class ArcModel(Model):
    def start(self) -> None:
        self.lists = {"t1": [], "t2": []}
        self.ghosts = {"b1": [], "b2": []}
        self.size, self.where, self.target = {}, {}, 0.0

    def total(self, names) -> int:
        return sum(self.size[n] for n in names)

    def insert(self, name, size) -> None:
        b1, b2 = self.ghosts["b1"], self.ghosts["b2"]
        in_b1, in_b2, s1, s2 = name in b1, name in b2, self.total(b1), self.total(b2)
        self.ghosts = {which: [n for n in ghosts if n != name] for which, ghosts in self.ghosts.items()}
        if in_b1:
            self.target = min(CAPACITY, self.target + size * max(1, s2 / s1))
        if in_b2:
            self.target = max(0, self.target - size * max(1, s1 / s2))
        self.size[name] = size
        self.place(name, "t2" if in_b1 or in_b2 else "t1")
        self.trim()

    def place(self, name, which) -> None:
        self.hold(name)
        self.where[name] = which
        self.lists[which].append(name)

    def use(self, name) -> None:
        self.place(name, "t2")

    def renew(self, name) -> None:
        self.place(name, self.where[name])

    def hold(self, name) -> None:
        self.lists = {which: [n for n in names if n != name] for which, names in self.lists.items()}

    def release(self, name) -> None:
        self.lists[self.where[name]].insert(0, name)

    def discard(self, name) -> None:
        self.hold(name)
        self.ghosts["b1" if self.where[name] == "t1" else "b2"].append(name)
        self.trim()

    def trim(self) -> None:
        lists, ghosts = self.lists, self.ghosts
        while ghosts["b1"] and self.total(lists["t1"] + ghosts["b1"]) > CAPACITY:
            ghosts["b1"].pop(0)
        every = lambda: self.total(lists["t1"] + lists["t2"] + ghosts["b1"] + ghosts["b2"])  # noqa: E731
        while ghosts["b2"] and every() > 2 * CAPACITY:
            ghosts["b2"].pop(0)

    def coldest(self):
        t1, t2, out = list(self.lists["t1"]), list(self.lists["t2"]), []
        while t1 or t2:
            from_t1 = t1 and (self.total(t1) > self.target or not t2)
            out.append((t1 if from_t1 else t2).pop(0))
        return out


class S3FifoModel(Model):
    def start(self) -> None:
        self.small, self.main, self.ghosts = [], [], []
        self.size, self.freq, self.where = {}, {}, {}

    def insert(self, name, size) -> None:
        self.size[name], self.freq[name] = size, 0
        self.where[name] = self.main if name in self.ghosts else self.small
        self.where[name].append(name)
        self.ghosts = [n for n in self.ghosts if n != name]

    def use(self, name) -> None:
        self.freq[name] = min(3, self.freq[name] + 1)
        self.renew(name)

    def renew(self, name) -> None:
        if name not in self.where[name]:
            self.release(name)

    def hold(self, name) -> None:
        if name in self.where[name]:
            self.where[name].remove(name)

    def release(self, name) -> None:
        self.where[name].insert(0, name)

    def discard(self, name) -> None:
        self.hold(name)
        if self.where[name] is self.small:
            self.ghosts.append(name)
            while sum(self.size[n] for n in self.ghosts) > CAPACITY - CAPACITY // 10:
                self.ghosts.pop(0)

    def coldest(self):
        """Go through the queues as if each one named were taken, and leave the used ones moved."""
        out, small, main = [], list(self.small), list(self.main)
        while small or main:
            left = sum(self.size[n] for n in small)
            if small and (left >= CAPACITY // 10 or not main):
                name = small.pop(0)
                if self.freq[name] > 1:
                    self.freq[name] = 0
                    self.small.remove(name)
                    self.main.append(name)
                    self.where[name] = self.main
                    main.append(name)
                else:
                    out.append(name)
            else:
                name = main.pop(0)
                if self.freq[name]:
                    self.freq[name] -= 1
                    self.main.remove(name)
                    self.main.append(name)
                    main.append(name)
                else:
                    out.append(name)
        return out


class GdsfModel(Model):
    """A clock, and of each its gain in quarters of a doubling; of equals the one used earlier goes first."""

    def start(self) -> None:
        self.clock, self.number = 0.0, 0
        self.size, self.gain, self.since, self.order, self.held = {}, {}, {}, {}, set()

    def insert(self, name, size) -> None:
        self.size[name] = size
        self.use(name)

    def use(self, name) -> None:
        cost = 16 * (1 + position(name) / 32768)
        self.gain[name] = round(4 * log2(self.sightings.count(key(name)) * cost / self.size[name]))
        self.renew(name)

    def renew(self, name) -> None:
        self.number += 1
        self.since[name], self.order[name] = self.clock, self.number
        self.held.discard(name)

    def hold(self, name) -> None:
        self.held.add(name)

    def release(self, name) -> None:
        self.held.discard(name)
        self.order[name] = min(self.order.values()) - 1

    def priority(self, name):
        return self.since[name] + 2 ** (self.gain[name] / 4)

    def discard(self, name) -> None:
        gone = self.priority(name)
        rest = [self.priority(n) for n in self.gain if n != name and n not in self.held]
        for column in (self.gain, self.since, self.order):
            del column[name]
        self.held.discard(name)
        self.clock = max(self.clock, min([gone, *rest]))

    def coldest(self):
        named = self.gain.keys() - self.held
        return sorted(named, key=lambda n: (self.priority(n), self.gain[n], self.order[n]))


MAKE = {
    "lru": (lambda _: Lru(), LruModel),
    "lfu": (lambda sightings: Lfu(sightings, HALF_LIFE), LfuModel),
    "arc": (lambda _: Arc(CAPACITY), ArcModel),
    "s3fifo": (lambda _: S3Fifo(CAPACITY), S3FifoModel),
    "gdsf": (Gdsf, GdsfModel),
}
steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "use", "use", "renew", "discard", "hold", "release", "wait"]),
        st.integers(0, 7),
        st.integers(1, 6),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", MAKE)
@given(history=steps)
def test_an_order_names_what_its_model_names(policy, history) -> None:
    sightings = Sightings(period=10**9, width=64)
    order, model = MAKE[policy][0](sightings), MAKE[policy][1](sightings)
    seats: dict[int, Seat] = {}
    held: set[int] = set()
    for step, name, size in history:
        if step == "wait":
            sightings.now += size
        elif step == "insert" and name not in seats:
            sightings.note(key(name))
            seats[name] = Seat(Block(key(name), position=position(name)), size)
            order.insert(seats[name])
            model.insert(name, size)
        elif step == "use" and name in seats:
            sightings.note(key(name))
            order.use(seats[name])
            model.use(name)
            held.discard(name)
        elif step == "renew" and name in seats:
            order.renew(seats[name])
            model.renew(name)
            held.discard(name)
        elif step == "discard" and name in seats:
            order.discard(seats.pop(name))
            model.discard(name)
            held.discard(name)
        elif step == "release" and name in held:
            order.release(seats[name])
            model.release(name)
            held.discard(name)
        elif step == "hold":
            coldest = next(iter(order.coldest()), None)
            want = model.coldest()
            assert (coldest.block.key if coldest else None) == (key(want[0]) if want else None)
            if coldest is not None:
                order.hold(coldest)
                model.hold(want[0])
                held.add(want[0])
            continue
        named = [seat.block.key for seat in order.coldest()]
        assert named == [key(n) for n in model.coldest()]


@pytest.mark.parametrize("policy", MAKE)
def test_a_copy_just_named_may_be_held_while_the_others_are_named(policy) -> None:
    sightings = Sightings(width=64)
    order = MAKE[policy][0](sightings)
    seats = [Seat(Block(key(n)), 1) for n in range(6)]
    for seat in seats:
        order.insert(seat)
    order.use(seats[3])

    named = []
    for seat in order.coldest():
        order.hold(seat)
        named.append(seat)

    assert set(named) == set(seats)
    assert not list(order.coldest())
    for seat in named:
        order.release(seat)
    assert set(order.coldest()) == set(seats)


def test_lfu_refuses_a_newcomer_that_is_worth_no_more_than_the_least() -> None:
    sightings = Sightings(period=10**9, width=64)
    order = Lfu(sightings, HALF_LIFE)
    for number in (1, 2):
        sightings.note(key(number))
        order.insert(Seat(Block(key(number)), 1))
    sightings.note(key(3))

    assert not order.admits(Block(key(3))), "as often as they, and they are fresh"
    sightings.now += HALF_LIFE
    assert order.admits(Block(key(3))), "they have been idle"
    sightings.now -= HALF_LIFE
    sightings.note(key(3))
    assert order.admits(Block(key(3))), "seen more often"
    assert not order.admits(Block(key(3), position=512 << 14)), "but not if it is of a very long prompt"


def test_lfu_takes_whatever_comes_where_there_is_nothing_to_lose() -> None:
    sightings = Sightings(period=10**9, width=64)
    sightings.note(key(1))

    assert Lfu(sightings, HALF_LIFE).admits(Block(key(1)))
