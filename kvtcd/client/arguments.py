"""What callers hand to the client, checked before it is sent: `TypeError` for a wrong type, else ours."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvtcd.core.errors import BadKey, BadRequest
from kvtcd.core.identity import NAMESPACE_NAME, Identity
from kvtcd.core.keys import MAX_KEY, EngineKey
from kvtcd.core.messages import BlockHead

_NAME = re.compile(NAMESPACE_NAME)
_ID = re.compile(r"[0-9a-f]{32}")


def namespace_name(name: str) -> str:
    """Return the name of a namespace.

    Raises:
        BadRequest: it cannot be one.
    """
    if not isinstance(name, str):
        raise TypeError(f"namespace: a name is text, not {_kind(name)}")
    if not _NAME.fullmatch(name):
        raise BadRequest("namespace", f"{name!r} does not fit {NAMESPACE_NAME}")
    return name


def issued_id(what: str, given: str) -> str:
    """Return an id that the daemon gave to an operation or a lease.

    Raises:
        BadRequest: it never gave such a one.
    """
    if not isinstance(given, str):
        raise TypeError(f"{what}: give its `id`, which is text, not {_kind(given)}")
    if not _ID.fullmatch(given):
        raise BadRequest(
            what, f"{given!r} is not the id of one: 32 lower-case hex digits, as the daemon gave it"
        )
    return given


def engine_key(key: bytes) -> EngineKey:
    """Return a key as bytes.

    Raises:
        BadKey: it has not 1 to 64 of them.
    """
    if not isinstance(key, bytes | bytearray | memoryview):
        raise TypeError(_no_key(key))
    if not 1 <= len(key) <= MAX_KEY:
        raise BadKey(key.hex())
    return EngineKey(bytes(key))


def engine_keys(keys: Iterable[bytes]) -> list[EngineKey]:
    """Return keys, once it is clear that they can be keys."""
    return [engine_key(key) for key in keys]


def block_head(block: BlockHead) -> BlockHead:
    """Return what is said of a block, once it is clear that its keys can be keys."""
    if not isinstance(block, BlockHead):
        raise TypeError(f"block: a BlockHead, not {_kind(block)}")
    for key in (block.key, block.parent, block.supersedes):
        if key is not None:
            engine_key(key)
    return block


def whole_identity(identity: Identity) -> Identity:
    """Return an identity that is one."""
    if not isinstance(identity, Identity):
        raise TypeError(f"identity: an Identity, not {_kind(identity)}; `Identity.from_json` reads a dict")
    return identity


def seconds(what: str, value: float) -> float:
    """Return a time that is to pass.

    Raises:
        BadRequest: no time at all, or less.
    """
    if not isinstance(value, int | float):
        raise TypeError(f"{what}: a number of seconds, not {_kind(value)}")
    if not value > 0:
        raise BadRequest(what, f"is {value}; give seconds above 0")
    return value


def region_bytes(nbytes: int) -> int:
    """Return the size of a region.

    Raises:
        BadRequest: not a byte.
    """
    if not isinstance(nbytes, int):
        raise TypeError(f"nbytes: a whole number, not {_kind(nbytes)}")
    if nbytes < 1:
        raise BadRequest("nbytes", f"is {nbytes}; a region has at least one byte")
    return nbytes


def _no_key(value: object) -> str:
    hint = "; `bytes.fromhex` makes them of hex digits" if isinstance(value, str) else ""
    return f"a key is bytes, not {_kind(value)}, and keys are an iterable of such{hint}"


def _kind(value: object) -> str:
    return type(value).__name__
