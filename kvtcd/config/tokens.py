"""The file of tokens as frozen values."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from kvtcd.config.values import Table, parsed, read, validated
from kvtcd.core.access import TENANT_NAME, Caller, Scope, Token
from kvtcd.core.errors import ConfigError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TENANT = re.compile(TENANT_NAME)


def tenant_name(text: str) -> str:
    """Return the name of a tenant.

    Raises:
        ValueError: it cannot be one.
    """
    if not _TENANT.fullmatch(text):
        raise ValueError(f"{text!r} is neither uid:<number> nor 1 to 64 of a-z, 0-9, '.', '_' and '-'")
    return text


def _digest(text: str) -> str:
    """Let through what may be a digest; what is none may be the token itself, and is not shown."""
    if not _DIGEST.fullmatch(text):
        raise ValueError(
            "is not the SHA-256 of a token in 64 lower-case hex digits; `kvtcd token` makes both"
        )
    return text


class _Token(Table):
    sha256: Annotated[str, AfterValidator(_digest)]
    tenant: Annotated[str, AfterValidator(tenant_name)]
    """``uid:1000``: the tenant that a user of this host is on the Unix socket."""
    scopes: Annotated[
        tuple[Annotated[Scope, Field(strict=False)], ...], Field(min_length=1, strict=False)
    ] = (Scope.DATA,)


class _TokenFile(Table):
    token: Annotated[tuple[_Token, ...], Field(min_length=1, strict=False)]


def _require_ours(path: Path) -> None:
    """Refuse a file in which somebody else than root and this process may let himself in."""
    try:
        status = path.stat()
    except OSError:
        return  # reading it says why
    if status.st_uid not in {0, os.geteuid()}:
        why = f"belongs to uid {status.st_uid}; chown it to root, or to uid {os.geteuid()}"
        raise ConfigError(path, "", why)
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(path, "", f"others may write it (mode {mode:04o}); chmod go-w it")


def load_tokens(path: Path, given: bytes | None = None) -> tuple[Token, ...]:
    """Read the tokens that are known.

    Args:
        path: of the file.
        given: its content, if that was handed over instead.

    Raises:
        ConfigError: it cannot be read, a field is wrong, it has a token twice, or others may write it.
    """
    if given is None:
        _require_ours(path)
    source = path if given is None else "credential kvtcd.tokens"
    table = validated(_TokenFile, read(path) if given is None else parsed(given, source), source)
    tokens = tuple(
        Token(bytes.fromhex(token.sha256), Caller(token.tenant, frozenset(token.scopes)))
        for token in table.token
    )
    first: dict[bytes, int] = {}
    for number, token in enumerate(tokens):
        if (before := first.setdefault(token.digest, number)) != number:
            why = (
                f"is token.{before} once more (tenants {tokens[before].caller.tenant}, {token.caller.tenant})"
            )
            raise ConfigError(source, f"token.{number}", f"{why}; remove one of them: who would it be?")
    return tokens
