"""Who may do what: tenants, scopes, and the tokens that stand for them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

TENANT_NAME = "uid:[0-9]{1,10}|[a-z0-9][a-z0-9._-]{0,63}"
"""What a tenant may be called, as a regular expression; ``uid:1000`` is that user of this host."""


class Scope(StrEnum):
    """A part of the API that a caller may use."""

    DATA = "data"
    """Blocks and namespaces of the caller's tenant, and all else below ``/v1`` that is about him."""
    METRICS = "metrics"
    """Sums over all tenants."""
    ADMIN = "admin"
    """What holds for all tenants."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is.

    Attributes:
        tenant: whose blocks are meant.
        scopes: what may be asked.
    """

    tenant: str
    scopes: frozenset[Scope]


@dataclass(frozen=True, slots=True)
class Token:
    """What is kept of a token: enough to know it again, not enough to show it.

    Attributes:
        digest: SHA-256 of the token. It has 256 random bits, so nothing slower is needed.
        caller: whom it stands for.
    """

    digest: bytes
    caller: Caller


def new_token() -> str:
    """Return a token that nobody has seen before."""
    return "kvtcd_" + secrets.token_urlsafe(32)


def digest(token: bytes) -> bytes:
    """Return what is kept of a token."""
    return hashlib.sha256(token).digest()


def bearer(tokens: Sequence[Token], token: bytes) -> Caller | None:
    """Return whom a token stands for, None if it is unknown; the time it takes says nothing of the tokens."""
    presented, found = digest(token), None
    for known in tokens:
        if hmac.compare_digest(known.digest, presented):
            found = known.caller
    return found
