"""What the catalog is told, and what it answers: small frozen values, nothing else.

A *ticket* is a number the service gives to whoever waits; the catalog settles every ticket exactly once, with
`Grant` or `Deny`, unless the service takes it back with `Cancel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvtcd.core.arrival import Arrival
from kvtcd.core.devices import GpuName
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place, Tier
from kvtcd.core.policy import Policy
from kvtcd.core.reason import Reason


@dataclass(frozen=True, slots=True)
class Govern:
    """A namespace has blocks from now on, or other rules; `on_disk`: its tenant has a place on disk."""

    namespace: int
    tenant: str
    policy: Policy
    on_disk: bool = True


@dataclass(frozen=True, slots=True)
class Mark:
    """The marks of the whole tiers are those of another policy, the one that matches all."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class Close:
    """Nothing enters a namespace any more."""

    namespace: int


@dataclass(frozen=True, slots=True)
class Ungovern:
    """A namespace without blocks is gone."""

    namespace: int


@dataclass(frozen=True, slots=True)
class Put:
    """Someone wants to store a block of `nbytes` raw bytes; Grant means: write it now, then say `Filled`.

    `supersedes`: a partial sibling that this block makes superfluous. `position`: tokens before it in its
    sequence. `patient`: rather wait for room than have other blocks lost for it. `arrival`: it comes packed.
    """

    ticket: int
    key: RecordKey
    namespace: int
    tokens: int
    nbytes: int
    parent: RecordKey | None = None
    supersedes: RecordKey | None = None
    position: int = 0
    patient: bool = False
    arrival: Arrival | None = None


@dataclass(frozen=True, slots=True)
class Filled:
    """The bytes of a granted put have arrived in full."""

    key: RecordKey
    place: Place = Place.HOST


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A granted put ended without its bytes."""

    key: RecordKey
    place: Place = Place.HOST


@dataclass(frozen=True, slots=True)
class Get:
    """Someone wants to read a block; Grant pins a copy until `Release`, and says where it is.

    That is the raw host copy. For who takes it `straight` from other places, it is the fastest copy, at once,
    if that lies in one of them.
    """

    ticket: int
    key: RecordKey
    straight: frozenset[Place] = frozenset()


@dataclass(frozen=True, slots=True)
class Release:
    """A granted reader of the copy in `place` is done; `damaged`: it proved unreadable."""

    key: RecordKey
    place: Place = Place.HOST
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Grant once a block is raw in a tier of memory; nothing keeps it there."""

    ticket: int
    key: RecordKey
    tier: Tier = Tier.HOST


@dataclass(frozen=True, slots=True)
class Lease:
    """Keep these blocks, wherever they are, until `Unlease`; answered at once."""

    ticket: int
    keys: tuple[RecordKey, ...]


@dataclass(frozen=True, slots=True)
class Unlease:
    """A granted lease has ended."""

    keys: tuple[RecordKey, ...]


@dataclass(frozen=True, slots=True)
class Touch:
    """These blocks are of one prefix, given head first: the head ends up youngest. This counts no use."""

    keys: tuple[RecordKey, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """Grant once every key has a durable copy; with `evict`, once it also has none in memory."""

    ticket: int
    keys: tuple[RecordKey, ...]
    evict: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Forget these blocks; Grant once no copy is left. Readers finish first."""

    ticket: int
    keys: tuple[RecordKey, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Whoever held this ticket has gone. A grant already given is not taken back."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Moved:
    """The move of this block has ended well: the destination holds `nbytes`."""

    key: RecordKey
    nbytes: int


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """The move of a block has failed; `damaged`: its source is unreadable; `full`: its target has no room."""

    key: RecordKey
    damaged: bool = False
    full: bool = False


@dataclass(frozen=True, slots=True)
class Dropped:
    """The copy whose `Drop` was asked for is gone."""

    key: RecordKey
    place: Place


@dataclass(frozen=True, slots=True)
class Unlinked:
    """The copies of these blocks on disk are gone with the file that held them; unknown keys are ignored."""

    keys: tuple[RecordKey, ...]


class Found(NamedTuple):
    """A copy found on disk at start; `ttl` is what is left of its time, in seconds."""

    key: RecordKey
    namespace: int
    tokens: int
    raw_bytes: int
    nbytes: int
    parent: RecordKey | None
    position: int = 0
    ttl: int | None = None


@dataclass(frozen=True, slots=True)
class Recovered:
    """These lie on disk from an earlier time: the oldest first, many at once."""

    found: tuple[Found, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time goes by: forget some of what has expired."""


Event = (
    Govern | Mark | Close | Ungovern | Put | Filled | Abandoned | Get | Release | Prefetch | Lease | Unlease
    | Touch | Settle | Delete | Cancel | Moved | MoveFailed | Dropped | Unlinked | Recovered | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Grant:
    """The ticket has what it asked for; of a `Get`, a pinned copy in `place`."""

    ticket: int
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Deny:
    """The ticket will not get what it asked for."""

    ticket: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a block from one place to another, then say `Moved` or `MoveFailed`.

    `after` is how many tokens are known to follow the block in its sequence (the longest continuation),
    which decides how much of it lies in the recent window. `lossless`: pack it in a hurry. `device`: the GPU
    that one of the places is on.
    """

    key: RecordKey
    source: Place
    target: Place
    after: int
    lossless: bool = False
    device: GpuName | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the bytes of a copy, on this `device` if that is a GPU, then say `Dropped`."""

    key: RecordKey
    place: Place
    device: GpuName | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """A block has left the cache although nobody deleted it: evicted, damaged, or refused below."""

    key: RecordKey
    namespace: int
    reason: Reason


Action = Grant | Deny | Move | Drop | Lost
