"""What is known of one block: what it is, where its copies lie, what is going on with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvtcd.core.keys import RecordKey
from kvtcd.core.place import BASES, Form, Place
from kvtcd.core.replacement import Block, Seat


class State(IntEnum):
    """State of a copy; absent is the lack of a copy."""

    FILLING = 0
    READY = 1
    DROPPING = 2


class Copy(Seat):
    """One block in one place; while READY it sits in the order of the place."""

    __slots__ = ("state",)

    def __init__(self, block: Block, state: State, nbytes: int) -> None:
        super().__init__(block, nbytes)
        self.state = state


@dataclass(frozen=True, slots=True)
class Transfer:
    """The move in progress of a block; `leaving`: its source is counted as on the way out."""

    source: Place
    target: Place
    leaving: bool

    @property
    def down(self) -> bool:
        """Whether it makes a packed copy of what only lies further up."""
        return self.target.form is Form.PACKED and self.source is not Place.DISK


class Kind(NamedTuple):
    """What many blocks have in common.

    Attributes:
        namespace: number of their namespace.
        tokens: in each.
        raw_bytes: of each.
    """

    namespace: int
    tokens: int
    raw_bytes: int


@dataclass(slots=True, eq=False)
class Entry:
    """One block. There may be a million of these, so what is rare lies elsewhere (`core.residency`).

    Attributes:
        key: record key.
        kind: what it has in common with many.
        position: tokens before it in its sequence, as far as known.
        parent: the block it continues.
        expires: when it is to be forgotten, in whole seconds of the catalog's clock; None: never.
        gpu: raw copy on a GPU.
        host: raw copy on the host.
        packed: packed copy on the host.
        disk: packed copy on disk.
        child: the first of the blocks that continue it.
        elder: the sibling before it.
        younger: the sibling after it.
        near_children: READY copies in memory of the blocks that continue it.
        children: READY copies of the blocks that continue it, anywhere.
    """

    key: RecordKey
    kind: Kind
    position: int = 0
    parent: RecordKey | None = None
    expires: int | None = None
    gpu: Copy | None = None
    host: Copy | None = None
    packed: Copy | None = None
    disk: Copy | None = None
    child: Entry | None = None
    elder: Entry | None = None
    younger: Entry | None = None
    near_children: int = 0
    children: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in it."""
        return self.kind.tokens

    @property
    def raw_bytes(self) -> int:
        """Raw bytes of it."""
        return self.kind.raw_bytes

    @property
    def namespace(self) -> int:
        """Number of its namespace."""
        return self.kind.namespace

    def at(self, place: Place) -> Copy | None:
        """Return the copy in a place."""
        copy: Copy | None = getattr(self, _SLOTS[place])
        return copy

    def put(self, place: Place, copy: Copy | None) -> None:
        """Set or remove the copy in a place."""
        setattr(self, _SLOTS[place], copy)

    @property
    def copies(self) -> dict[Place, Copy]:
        """All copies, by place."""
        return {place: copy for place in Place if (copy := self.at(place)) is not None}

    def ready(self, place: Place) -> bool:
        """Tell whether this place has a copy that can be read."""
        copy = self.at(place)
        return copy is not None and copy.state is State.READY

    @property
    def places(self) -> tuple[Place, ...]:
        """Places with a copy that can be read, fastest first."""
        return tuple(place for place in Place if self.ready(place))

    @property
    def fastest(self) -> Place | None:
        """The first of `places`."""
        # Written out: a match asks this hundreds of times.
        if self.gpu is not None and self.gpu.state is _READY:
            return Place.GPU
        if self.host is not None and self.host.state is _READY:
            return Place.HOST
        if self.packed is not None and self.packed.state is _READY:
            return Place.PACKED
        return Place.DISK if self.disk is not None and self.disk.state is _READY else None

    def kept(self, *, without: tuple[Place, ...] = ()) -> bool:
        """Tell whether a copy that can be read keeps the block, but for those in some places."""
        return any(self.ready(place) for place in BASES if place not in without)

    def continued(self, place: Place) -> int:
        """Return how many copies here or in a faster place are of use only with the copy here.

        A child on disk alone does not keep its parent in memory: there the parent may join it.
        """
        return self.children if place is Place.DISK else self.near_children


_SLOTS = ("gpu", "host", "packed", "disk")
_READY = State.READY
