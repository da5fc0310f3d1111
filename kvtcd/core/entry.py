"""What is known of one block: what it is, where its copies lie, what is going on with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvtcd.core.events import Tier
from kvtcd.core.keys import RecordKey
from kvtcd.core.replacement import Block, Seat


class State(IntEnum):
    """State of a copy; absent is the lack of a copy."""

    FILLING = 0
    READY = 1
    DROPPING = 2


class Copy(Seat):
    """One block in one tier; while READY it sits in the order of the tier."""

    __slots__ = ("state",)

    def __init__(self, block: Block, state: State, nbytes: int) -> None:
        super().__init__(block, nbytes)
        self.state = state


@dataclass(frozen=True, slots=True)
class Transfer:
    """The move in progress of a block; `leaving`: its source is counted as on the way out."""

    source: Tier
    target: Tier
    leaving: bool


@dataclass(frozen=True, slots=True)
class Kind:
    """What many blocks have in common.

    Attributes:
        namespace: number of their namespace.
        tokens: in each.
        raw_bytes: of each.
        behind: copy them down as soon as they are there.
        packable: there is a tier below that takes them.
    """

    namespace: int
    tokens: int
    raw_bytes: int
    behind: bool = False
    packable: bool = True


@dataclass(slots=True, eq=False)
class Entry:
    """One block. There may be a million of them: what they share is one object, what is rare lies elsewhere.

    Attributes:
        key: its record key.
        kind: what it has in common with others.
        position: tokens before it in its sequence.
        parent: the block it continues.
        expires: catalog seconds after which it is not served; None: never.
        failed: its last way down failed; eviction drops it, only a new request tries again.
        evict: drop the host copy as soon as there is one below and nobody reads.
        doomed: serve it no more, and drop all copies as soon as nobody uses them.
        pins: readers of the host copy.
        host: copy on the host.
        disk: copy on disk.
        child: the first of the blocks that continue it.
        elder: the sibling before it.
        younger: the sibling after it.
        host_children: READY host copies of the blocks that continue it.
        children: READY copies of the blocks that continue it, in any tier.
    """

    key: RecordKey
    kind: Kind
    position: int = 0
    parent: RecordKey | None = None
    expires: int | None = None
    failed: bool = False
    evict: bool = False
    doomed: bool = False
    pins: int = 0
    host: Copy | None = None
    disk: Copy | None = None
    child: Entry | None = None
    elder: Entry | None = None
    younger: Entry | None = None
    host_children: int = 0
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

    def at(self, tier: Tier) -> Copy | None:
        """Return the copy in a tier."""
        return self.host if tier is Tier.HOST else self.disk

    def put(self, tier: Tier, copy: Copy | None) -> None:
        """Set or remove the copy in a tier."""
        if tier is Tier.HOST:
            self.host = copy
        else:
            self.disk = copy

    @property
    def copies(self) -> dict[Tier, Copy]:
        """All copies, by tier."""
        return {tier: copy for tier in Tier if (copy := self.at(tier)) is not None}

    def ready(self, tier: Tier) -> bool:
        """Tell whether this tier has a copy that can be read."""
        copy = self.at(tier)
        return copy is not None and copy.state is State.READY

    def continued(self, tier: Tier) -> int:
        """Return how many copies in this tier or a faster one are of use only with the copy in this tier.

        A child on disk alone does not keep its parent on the host: there the parent may join it.
        """
        return self.host_children if tier is Tier.HOST else self.children
