"""What the frames of an export hold, as values and as bytes: a namespace, blocks, profiles in parts."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from kvtcd.core.errors import BadField, BadRequest, Truncated
from kvtcd.core.fields import Fields, json_object
from kvtcd.core.identity import NAMESPACE_NAME, Identity
from kvtcd.core.keys import MAX_KEY, MAX_SALT, EngineKey
from kvtcd.core.layout import canonical_json

_BLOCK = struct.Struct("<BBBBIQQQQ")
_PROFILE = struct.Struct("<32sQ")
_HAS_FIRST = 1
_MAX_NUMBER = (1 << 63) - 1
_WHAT = "export"


class Kind(IntEnum):
    """What a frame holds."""

    NAMESPACE = 0
    BLOCK = 1
    PROFILE = 2
    PART = 3
    END = 4


@dataclass(frozen=True, slots=True)
class Namespace:
    """The first that a file says: which namespace it holds, and whose that was."""

    name: str
    tenant: str
    identity: Identity


@dataclass(frozen=True, slots=True)
class Block:
    """One packed block: what its envelope says beyond one store, and its blob, deciphered.

    Times are Unix milliseconds; `expires` None means never. `parent` is the engine key of a block of the same
    salt.
    """

    key: EngineKey
    salt: bytes
    parent: EngineKey | None
    first_token: int | None
    tokens: int
    raw_bytes: int
    created: int
    expires: int | None
    blob: memoryview


@dataclass(frozen=True, slots=True)
class ProfileHead:
    """A profile that blocks were packed with: SHA-256 and length of its file, which follows in parts."""

    digest: bytes
    nbytes: int


Message: TypeAlias = Namespace | Block | ProfileHead | bytes
"""What a frame says; `bytes` are the next part of a profile."""


def encode(message: Message) -> tuple[Kind, bytes]:
    """Return kind and content of a message's frame."""
    match message:
        case Namespace():
            body = {
                "identity": message.identity.to_json(), "name": message.name, "tenant": message.tenant,
            }  # fmt: skip
            return Kind.NAMESPACE, canonical_json(body)
        case Block():
            return Kind.BLOCK, _block_bytes(message)
        case ProfileHead():
            return Kind.PROFILE, _PROFILE.pack(message.digest, message.nbytes)
        case bytes():
            return Kind.PART, message


def decode(kind: Kind, content: bytes) -> Message:
    """Read what `encode` wrote.

    Raises:
        BadField, Truncated: it is not that.
    """
    match kind:
        case Kind.NAMESPACE:
            return _namespace(content)
        case Kind.BLOCK:
            return _block(content)
        case Kind.PROFILE:
            return _profile(content)
        case Kind.PART | Kind.END:
            return content


def _namespace(content: bytes) -> Namespace:
    try:
        fields = Fields(json_object(content), "namespace")
        name = fields.text("name")
        if not re.fullmatch(NAMESPACE_NAME, name):
            raise BadField(_WHAT, f"{name!r} is no name of a namespace")
        return Namespace(name, fields.text("tenant"), Identity.from_json(fields.value("identity")))
    except BadRequest as error:
        raise BadField(_WHAT, f"its namespace: {error}") from None


def _block_bytes(block: Block) -> bytes:
    parent, first = block.parent or b"", block.first_token
    return b"".join((
        _BLOCK.pack(
            len(block.key), len(parent), len(block.salt), 0 if first is None else _HAS_FIRST, block.tokens,
            first or 0, block.raw_bytes, block.created, block.expires or 0,
        ),
        block.key, parent, block.salt, block.blob,
    ))  # fmt: skip


def _block(content: bytes) -> Block:
    if len(content) < _BLOCK.size:
        raise Truncated(_WHAT, f"a block of {len(content)} bytes")
    key, parent, salt, flags, tokens, first, raw_bytes, created, expires = _BLOCK.unpack_from(content)
    ends = (_BLOCK.size + key, _BLOCK.size + key + parent, _BLOCK.size + key + parent + salt)
    if not 1 <= key <= MAX_KEY or parent > MAX_KEY or salt > MAX_SALT or flags > _HAS_FIRST:
        raise BadField(_WHAT, f"a block with a key of {key} bytes, a parent of {parent}, flags {flags}")
    if len(content) <= ends[2] or not 1 <= tokens <= raw_bytes:
        raise BadField(_WHAT, f"a block of {len(content)} bytes, {tokens} tokens, {raw_bytes} raw bytes")
    if max(first, raw_bytes, created, expires) > _MAX_NUMBER or (first and not flags):
        raise BadField(_WHAT, "a number that no block has")
    return Block(
        EngineKey(content[_BLOCK.size : ends[0]]), content[ends[1] : ends[2]],
        EngineKey(content[ends[0] : ends[1]]) if parent else None, first if flags else None, tokens,
        raw_bytes, created, expires or None, memoryview(content)[ends[2] :],
    )  # fmt: skip


def _profile(content: bytes) -> ProfileHead:
    if len(content) != _PROFILE.size:
        raise Truncated(_WHAT, f"{len(content)} bytes say what profile follows")
    digest, nbytes = _PROFILE.unpack(content)
    if not 1 <= nbytes <= _MAX_NUMBER:
        raise BadField(_WHAT, f"a profile of {nbytes} bytes")
    return ProfileHead(digest, nbytes)
