"""A catalog on a stage: its world obeys at once, but for moves, which end when the test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from support.invariants import check

from kvtcd.core import events as ev
from kvtcd.core.catalog import Catalog
from kvtcd.core.gpus import Gpus
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Form, Place, Tier
from kvtcd.core.policy import Evict, Policy, Share
from kvtcd.core.reason import Reason
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings

RAW, PACKED = 10, 2
"""Bytes of a block, raw and packed."""
UNPACKS, COPIES = frozenset({Place.PACKED, Place.DISK}), frozenset({Place.GPU})
"""Whence readers with memory on a GPU take blocks themselves."""
WAITS = "waits"
Answer = Reason | str | None
"""None: granted."""


def key(number: int) -> RecordKey:
    return RecordKey(number.to_bytes(8, "little") * 4)


def policy(**fields: object) -> Policy:
    return Policy("scene", **({"evict": Evict("lru")} | fields))


@dataclass
class Scene:
    """A catalog, the moves that it started, and what it answered.

    A second goes by before each request. Bytes of a granted put arrive at once; memory is freed at once.
    """

    policies: Mapping[int, Policy] | Policy
    host: int = 100
    disk: int = 1000
    gpu: int | Mapping[str, int] = 0
    """Of the only device, or of each by name; the first one is that of namespaces that name none."""
    descents: int = 8
    granule: int = 1
    bound: Callable[[int], int] = lambda nbytes: nbytes
    tenants: Share = field(default_factory=Share)
    owners: Mapping[int, str] = field(default_factory=dict)
    on_disk: bool = True
    whole: Policy | None = None
    """Whose marks are those of the tiers; the first one's, if not given."""
    lingering: bool = False
    """Dropped bytes are gone only when `vanish` says so."""

    def __post_init__(self) -> None:
        self.now = self.ticket = 0
        self.moves: list[ev.Move] = []
        self.drops: list[tuple[int, Place]] = []
        self.lost: list[tuple[int, Reason]] = []
        self.left: list[ev.Event] = []
        self.answers: dict[int, Answer] = {}
        self.pinned: dict[int, Place | None] = {}
        """Where each granted reader's copy is."""
        self.puts: dict[int, RecordKey] = {}
        self.started: list[ev.Move] = []
        policies = {1: self.policies} if isinstance(self.policies, Policy) else dict(self.policies)
        sightings = Sightings(period=10**9, width=1 << 10)
        tiers = shelves(
            self.whole or policies[min(policies)], sightings, host=self.host, disk=self.disk,
            granule=self.granule, tenants=self.tenants,
        )  # fmt: skip
        gpus = Gpus.of(
            {"cuda:0": self.gpu} if isinstance(self.gpu, int) else self.gpu, sightings, granule=self.granule
        )
        self.catalog = Catalog(
            tiers, self.bound, sightings, gpus=gpus, descents=self.descents, clock=lambda: self.now
        )
        for number, rules in policies.items():
            self.govern(number, rules)

    def govern(self, number: int, rules: Policy) -> None:
        self.tell(ev.Govern(number, self.owners.get(number, "tenant"), rules, self.on_disk))

    # What is told -------------------------------------------------------------------------------------------

    def tell(self, *events: ev.Event) -> None:
        pending = list(events)
        for event in pending:
            for action in self.catalog.handle(event):
                match action:
                    case ev.Grant(ticket, place):
                        self.answers[ticket] = None
                        self.pinned[ticket] = place
                        if (granted := self.puts.get(ticket)) is not None:
                            pending.append(ev.Filled(granted))
                    case ev.Deny(ticket, reason):
                        self.answers[ticket] = reason
                    case ev.Move():
                        self.moves.append(action)
                        self.started.append(action)
                    case ev.Drop(dropped, place):
                        self.drops.append((dropped[0], place))
                        (self.left if self.lingering else pending).append(ev.Dropped(dropped, place))
                    case ev.Lost(lost, _, reason):
                        self.lost.append((lost[0], reason))
            check(self.catalog)

    def ask(self, request: Callable[[int], ev.Event]) -> int:
        self.ticket += 1
        self.now += 1
        self.answers[self.ticket] = WAITS
        self.tell(request(self.ticket))
        return self.ticket

    def put(
        self, number: int, parent: int | None = None, *, nbytes: int = RAW, namespace: int = 1,
        patient: bool = False, tokens: int = 16,
    ) -> int:  # fmt: skip
        """Ask for room; it is filled when it is granted. Return the ticket."""
        above = None if parent is None else key(parent)
        self.puts[self.ticket + 1] = key(number)
        return self.ask(lambda t: ev.Put(t, key(number), namespace, tokens, nbytes, above, patient=patient))

    def get(self, number: int, straight: frozenset[Place] = frozenset()) -> int:
        return self.ask(lambda t: ev.Get(t, key(number), straight))

    def release(self, number: int, place: Place = Place.HOST, *, damaged: bool = False) -> None:
        self.tell(ev.Release(key(number), place, damaged))

    def read(self, number: int) -> None:
        """Read a block to its end; it comes up first if it must."""
        ticket = self.get(number)
        while self.answers[ticket] == WAITS:
            self.end(number)
        assert self.answers[ticket] is None
        self.tell(ev.Release(key(number)))

    def settle(self, *numbers: int, evict: bool = False) -> int:
        return self.ask(lambda t: ev.Settle(t, tuple(map(key, numbers)), evict))

    def lease(self, *numbers: int) -> int:
        return self.ask(lambda t: ev.Lease(t, tuple(map(key, numbers))))

    def unlease(self, *numbers: int) -> None:
        self.tell(ev.Unlease(tuple(map(key, numbers))))

    def prefetch(self, number: int, tier: Tier = Tier.HOST) -> int:
        return self.ask(lambda t: ev.Prefetch(t, key(number), tier))

    def delete(self, *numbers: int) -> int:
        return self.ask(lambda t: ev.Delete(t, tuple(map(key, numbers))))

    def recover(
        self, number: int, parent: int | None = None, *, namespace: int = 1, nbytes: int = PACKED
    ) -> None:
        above = None if parent is None else key(parent)
        self.tell(ev.Recovered((ev.Found(key(number), namespace, 16, RAW, nbytes, above),)))

    def end(
        self, number: int | None = None, *, failed: bool = False, damaged: bool = False, full: bool = False
    ) -> None:
        """End the move of one block, or the first of all."""
        move = next(m for m in self.moves if number is None or m.key == key(number))
        self.moves.remove(move)
        if failed or damaged or full:
            self.tell(ev.MoveFailed(move.key, damaged=damaged, full=full))
        else:
            raw = self.catalog.residents.entries[move.key].raw_bytes
            self.tell(ev.Moved(move.key, raw if move.target.form is Form.RAW else PACKED))

    def settle_down(self) -> None:
        """End all moves, and those that they lead to."""
        while self.moves:
            self.end()

    def vanish(self) -> None:
        """Let the bytes of all dropped copies be gone, and drop at once from now on."""
        self.lingering = False
        self.tell(*self.left)
        self.left.clear()

    # What is seen -------------------------------------------------------------------------------------------

    def where(self, number: int) -> str:
        """Return the places of a block, fastest first."""
        return " ".join(map(str, self.catalog.places(key(number))))

    def moving(self) -> list[str]:
        """Return the moves that run, in the order of their start."""
        return [f"{m.key[0]} {m.source}-{m.target}" for m in self.moves]

    def used(self, tier: Tier, namespace: int | None = None) -> int:
        """Return the bytes booked in a tier, of all or of one namespace."""
        return sum(
            (shelf.whole if namespace is None else shelf.accounts(namespace)[0]).used
            for shelf in self.catalog.residents.tiers[tier]
        )

    def on_gpus(self) -> dict[str, int]:
        """Return the bytes booked on each device."""
        return {name: shelf.whole.used for name, shelf in self.catalog.residents.gpus.shelves.items()}
