"""What daemon and clients say to each other, as frozen values with a JSON form.

Keys are bytes here and lower-case hex in JSON. Requests are read strictly, down to unknown fields; answers
leave unknown fields alone, so that an older client understands a newer daemon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from kvtcd.core.access import Scope
from kvtcd.core.drift import Drift
from kvtcd.core.errors import BadRequest
from kvtcd.core.forms import KEY, Range
from kvtcd.core.identity import MAX_BLOCK_TOKENS, Identity
from kvtcd.core.keys import EngineKey
from kvtcd.core.message import INLINE, SPARSE, Answer, Request, derived
from kvtcd.core.place import Tier

API_VERSION = 1
TOKENS_HEADER, TIER_HEADER = "Kvtcd-Tokens", "Kvtcd-Tier"
SALT_HEADER, DEADLINE_HEADER = "Kvtcd-Salt", "Kvtcd-Deadline-Ms"
MAX_FIRST_TOKEN = (1 << 62) - 1

DiskState = Literal["ok", "off", "full"]
Fault = Literal[
    "left-out", "set-aside", "other-key", "out-of-use", "remote-away", "remote-refuses", "unknown-gpu"
]
"""What is not as it should be while everything else is served. The disk environment of a tenant could not be
opened at the start (and he is refused), was damaged then or earlier (and begun anew, with what was damaged
beside it), is under another master key (and left alone), or failed since; the store that is shared does not
answer, or takes no blocks; policies name a GPU for which the start has prepared nothing."""
MAX_BLOCKS = 8192
"""Blocks of one request."""
MAX_LEASE_S = 3600.0

Outcome = Literal["stored", "duplicate", "dropped"]
BlockTokens = Annotated[int, Range(1, MAX_BLOCK_TOKENS)]
Position = Annotated[int, Range(0, MAX_FIRST_TOKEN)]
Count = Annotated[int, Range(0)]
BlockKeys = Annotated[tuple[EngineKey, ...], Range(0, MAX_BLOCKS)]


@dataclass(frozen=True, slots=True)
class BlockHead(Request):
    """All that a client says of a block besides its bytes.

    Attributes:
        key: engine key.
        tokens: tokens in the block; fewer than `block_tokens` only in the last one of a sequence.
        first_token: position of its first token; without it keys cannot be freed of RoPE.
        parent: key of the block it continues; without it the order of the request is the chain.
        supersedes: key of a partial block that this one makes superfluous.

    Raises:
        BadRequest: it continues or supersedes itself.
    """

    key: EngineKey
    tokens: BlockTokens
    first_token: Position | None = None
    parent: EngineKey | None = None
    supersedes: EngineKey | None = None

    def __post_init__(self) -> None:
        for name, key in (("parent", self.parent), ("supersedes", self.supersedes)):
            if key == self.key:
                raise BadRequest(name, "is the key of the block itself")

    def to_query(self) -> dict[str, str]:
        """Return the fields other than the key as query parameters."""
        return {name: str(value) for name, value in self.to_json().items() if name != "key"}


@dataclass(frozen=True, slots=True)
class Keys(Request):
    """Several blocks, by their engine keys."""

    keys: BlockKeys


@dataclass(frozen=True, slots=True)
class Everything(Request):
    """All blocks of a namespace."""


@dataclass(frozen=True, slots=True)
class Pin(Request):
    """Blocks to keep for some seconds, wherever they are."""

    keys: Annotated[tuple[EngineKey, ...], Range(1, MAX_BLOCKS)]
    seconds: Annotated[float, Range(0, MAX_LEASE_S)]


@dataclass(frozen=True, slots=True)
class Found(Answer):
    """Header of one frame of an answer to ``blocks:get``; a miss has neither tokens nor tier nor a body."""

    key: EngineKey
    tokens: BlockTokens | None = None
    tier: Tier | None = None

    @derived
    def status(self) -> Literal["hit", "miss"]:
        """Whether it is there."""
        return "miss" if self.tier is None else "hit"


@dataclass(frozen=True, slots=True)
class BlockResult(Answer):
    """What became of one block of a request; `reason` says why one was dropped."""

    key: EngineKey
    outcome: Outcome
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Results(Answer):
    """What became of the blocks of a request, one for each key, in their order."""

    results: tuple[BlockResult, ...]


@dataclass(frozen=True, slots=True)
class NamespaceInfo(Answer):
    """A registered namespace.

    Attributes:
        name: as its tenant calls it.
        digest: SHA-256 of the identity, 32 bytes: the root of our own key chain.
        codec: what its blocks are packed with.
        codec_reason: why it is not what the policy asks for, if so.
        profile: SHA-256 of the profile they are packed with, in hex; None if with none.
        expected_kl: divergence that calibration measured where the dial stands, nats per token; None where
            nothing was measured.
        identity: what was registered.
        drift: whether blocks, of which some are looked at, are like those that the profile was made from;
            None without one.
    """

    name: str
    digest: Annotated[bytes, KEY]
    codec: str
    codec_reason: str | None
    profile: str | None
    expected_kl: Annotated[float, Range(0)] | None
    identity: Identity
    drift: Annotated[Drift | None, SPARSE] = None


@dataclass(frozen=True, slots=True)
class Namespaces(Answer):
    """The namespaces of a tenant."""

    namespaces: tuple[NamespaceInfo, ...]


@dataclass(frozen=True, slots=True)
class Removed(Answer):
    """What a purge has removed.

    Attributes:
        removed: blocks of this daemon.
        set_aside: whether files of the tenant that had been set aside as damaged went with them; nobody can
            tell which namespaces were in those.
        remote: whether the store that it shares with others has forgotten them; ``pending``: it could not be
            asked, and will be until it has.
        others_s: seconds after which the other daemons have, from then on.
    """

    removed: Count
    set_aside: bool = False
    remote: Annotated[Literal["done", "pending"] | None, SPARSE] = None
    others_s: Annotated[Annotated[float, Range(0)] | None, SPARSE] = None


@dataclass(frozen=True, slots=True)
class Info(Answer):
    """A running daemon; a new `boot_id` means that it was started anew."""

    version: str
    api: Annotated[int, Range(1, 1 << 16)]
    boot_id: str


@dataclass(frozen=True, slots=True)
class Welcome(Answer):
    """A running daemon, and who asks.

    Attributes:
        tenant: whose blocks the caller's are.
        scopes: what he may ask.
    """

    info: Annotated[Info, INLINE]
    tenant: str
    scopes: tuple[Scope, ...]


@dataclass(frozen=True, slots=True)
class Alive(Answer):
    """The event loop turns."""

    status: Literal["ok"] = "ok"


@dataclass(frozen=True, slots=True)
class Ready(Answer):
    """Blocks are served and taken.

    Attributes:
        disk: ``full`` while it holds less than it was meant to.
        degraded: what is not as it should be, if anything; all else is served.
        status: that it is ready.
    """

    disk: DiskState
    degraded: tuple[Fault, ...]
    status: Literal["ready"] = "ready"
