"""What daemon and clients say to each other, as frozen values with a JSON form.

Keys are bytes here and lower-case hex in JSON. Requests are read strictly, down to unknown fields; answers
leave unknown fields alone, so that an older client understands a newer daemon.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, cast, get_args

from kvtcd.core.errors import BadRequest
from kvtcd.core.fields import Fields
from kvtcd.core.identity import MAX_BLOCK_TOKENS, Identity
from kvtcd.core.keys import EngineKey
from kvtcd.core.place import Tier

API_VERSION = 1
TOKENS_HEADER, TIER_HEADER = "Kvtcd-Tokens", "Kvtcd-Tier"
SALT_HEADER, DEADLINE_HEADER = "Kvtcd-Salt", "Kvtcd-Deadline-Ms"
MAX_FIRST_TOKEN = (1 << 62) - 1

Outcome = Literal["stored", "duplicate", "dropped"]

_DECIMAL = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class BlockHead:
    """All that a client says of a block besides its bytes.

    Attributes:
        key: engine key.
        tokens: tokens in the block; fewer than `block_tokens` only in the last one of a sequence.
        first_token: position of its first token; without it keys cannot be freed of RoPE.
        parent: key of the block it continues; without it the order of the request is the chain.
        supersedes: key of a partial block that this one makes superfluous.
    """

    key: EngineKey
    tokens: int
    first_token: int | None = None
    parent: EngineKey | None = None
    supersedes: EngineKey | None = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON form; what is not given is left out."""
        body: dict[str, object] = {"key": self.key.hex(), "tokens": self.tokens}
        if self.first_token is not None:
            body["first_token"] = self.first_token
        for name, key in (("parent", self.parent), ("supersedes", self.supersedes)):
            if key is not None:
                body[name] = key.hex()
        return body

    def to_query(self) -> dict[str, str]:
        """Return the fields other than the key as query parameters."""
        return {name: str(value) for name, value in self.to_json().items() if name != "key"}

    @classmethod
    def from_json(cls, body: object) -> BlockHead:
        """Build from the form that `to_json` writes.

        Raises:
            BadRequest: a field is missing, unknown, of the wrong type or out of range.
        """
        given = Fields(body, "block")
        head = cls(
            key=given.key("key"),
            tokens=given.integer("tokens", 1, MAX_BLOCK_TOKENS),
            first_token=given.integer("first_token", 0, MAX_FIRST_TOKEN) if "first_token" in given else None,
            parent=given.key("parent") if "parent" in given else None,
            supersedes=given.key("supersedes") if "supersedes" in given else None,
        )
        given.refuse_others("key", "tokens", "first_token", "parent", "supersedes")
        for name, key in (("parent", head.parent), ("supersedes", head.supersedes)):
            if key == head.key:
                raise BadRequest(name, "is the key of the block itself")
        return head

    @classmethod
    def from_query(cls, key: str, query: Mapping[str, str]) -> BlockHead:
        """Build from a key in the path and query parameters.

        Raises:
            BadRequest: a parameter is missing, unknown, malformed or out of range.
        """
        body: dict[str, object] = {**query, "key": key}
        for name in ("tokens", "first_token"):
            if name in query:
                if not _DECIMAL.fullmatch(query[name]):
                    raise BadRequest(name, "is not a decimal number")
                body[name] = int(query[name])
        return cls.from_json(body)


@dataclass(frozen=True, slots=True)
class Found:
    """Header of one frame of an answer to ``blocks:get``; a miss has neither tokens nor tier nor a body."""

    key: EngineKey
    tokens: int | None = None
    tier: Tier | None = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        status = "miss" if self.tier is None else "hit"
        return {"key": self.key.hex(), "status": status, "tokens": self.tokens, "tier": self.tier}

    @classmethod
    def from_json(cls, body: object) -> Found:
        """Build from the form that `to_json` writes."""
        given = Fields(body, "frame")
        if given.choice("status", ("hit", "miss")) == "miss":
            return cls(given.key("key"))
        return cls(given.key("key"), given.integer("tokens", 1, MAX_BLOCK_TOKENS), given.tier("tier"))


@dataclass(frozen=True, slots=True)
class BlockResult:
    """What became of one block of a request; `reason` says why one was dropped."""

    key: EngineKey
    outcome: Outcome
    reason: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"key": self.key.hex(), "outcome": self.outcome, "reason": self.reason}

    @classmethod
    def from_json(cls, body: object) -> BlockResult:
        """Build from the form that `to_json` writes."""
        given = Fields(body, "result")
        outcome = cast("Outcome", given.choice("outcome", get_args(Outcome)))
        return cls(given.key("key"), outcome, given.optional_text("reason"))


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
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
    """

    name: str
    digest: bytes
    codec: str
    codec_reason: str | None
    profile: str | None
    expected_kl: float | None
    identity: Identity

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "digest": self.digest.hex(),
            "codec": self.codec,
            "codec_reason": self.codec_reason,
            "profile": self.profile,
            "expected_kl": self.expected_kl,
            "identity": self.identity.to_json(),
        }

    @classmethod
    def from_json(cls, body: object) -> NamespaceInfo:
        """Build from the form that `to_json` writes."""
        given = Fields(body, "namespace")
        return cls(
            name=given.text("name"),
            digest=bytes(given.key("digest")),
            codec=given.text("codec"),
            codec_reason=given.optional_text("codec_reason"),
            profile=given.optional_text("profile"),
            expected_kl=given.number("expected_kl", 0, inf) if "expected_kl" in given else None,
            identity=Identity.from_json(given.value("identity")),
        )


@dataclass(frozen=True, slots=True)
class Info:
    """A running daemon; a new `boot_id` means that it was started anew."""

    version: str
    api: int
    boot_id: str

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"version": self.version, "api": self.api, "boot_id": self.boot_id}

    @classmethod
    def from_json(cls, body: object) -> Info:
        """Build from the form that `to_json` writes."""
        given = Fields(body, "info")
        return cls(given.text("version"), given.integer("api", 1, 1 << 16), given.text("boot_id"))


def results_to_json(results: Iterable[BlockResult]) -> dict[str, object]:
    """Return the answer to a request about several blocks."""
    return {"results": [result.to_json() for result in results]}


def results_from_json(body: object) -> tuple[BlockResult, ...]:
    """Read the results out of an answer."""
    return tuple(BlockResult.from_json(row) for row in Fields(body, "answer").items("results"))


def keys_to_json(keys: Iterable[EngineKey]) -> dict[str, object]:
    """Return the request about several blocks."""
    return {"keys": [key.hex() for key in keys]}


def keys_from_json(body: object) -> list[EngineKey]:
    """Read the keys of a request.

    Raises:
        BadRequest: not an object with a list of keys and nothing else.
    """
    given = Fields(body, "body")
    keys = given.keys("keys")
    given.refuse_others("keys")
    return keys
