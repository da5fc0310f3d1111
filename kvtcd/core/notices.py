"""What the daemon tells those who listen: which blocks came, moved and went. Server-Sent Events carry it.

On the wire a notice is ``id``, ``event`` (its kind) and ``data`` (one JSON object), as the HTML standard
writes them (section 9.2 "Server-sent events"). A comment line is a sign of life.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvtcd.core.errors import BadField, BadRequest
from kvtcd.core.fields import Fields, json_object, string
from kvtcd.core.identity import MAX_BLOCK_TOKENS
from kvtcd.core.keys import EngineKey
from kvtcd.core.place import Tier

MEDIA_TYPE = "text/event-stream"
LAST_ID_HEADER = "Last-Event-ID"
HEARTBEAT = b":\n\n"
HEARTBEAT_S = 15.0
"""Seconds of silence after which a sign of life is sent."""
_MAX_LINE = 16 << 10
_MAX_POSITION = (1 << 63) - 1


class What(StrEnum):
    """Kinds of notices."""

    STORED = "stored"
    """A new block can be read from `tier`."""
    MOVED = "moved"
    """A block of `source` can now be read from `tier` too; that `source` lets go of it is another notice."""
    DROPPED = "dropped"
    """`tier` has a block no more, for `reason`; `left` are the tiers that still have it."""
    PURGED = "purged"
    """A namespace and all its blocks are gone."""
    OVERFLOW = "overflow"
    """Notices were lost since the last one: ask anew what is where."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One notice. What has no meaning for its kind is None or empty.

    Attributes:
        what: its kind.
        id: where to go on from, after a break; None while nobody has been told.
        namespace: name of the block's namespace.
        key: engine key; None: the record that held it cannot be read.
        salt: of the block, empty if it has none.
        tier: where it came to, or went from.
        source: of a move.
        tokens: in the block.
        first_token: position of its first token, if that was said when it was stored.
        parent: key of the block it continues, if it has one and that one is known here and now.
        reason: ``evicted``, ``expired``, ``deleted``, ``superseded``, ``damaged``.
        left: tiers that still have it.
    """

    what: What
    id: str | None = None
    namespace: str | None = None
    key: EngineKey | None = None
    salt: bytes = b""
    tier: Tier | None = None
    source: Tier | None = None
    tokens: int | None = None
    first_token: int | None = None
    parent: EngineKey | None = None
    reason: str | None = None
    left: tuple[Tier, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the JSON form, without `id` and `what`."""
        body: dict[str, object] = {}
        if self.what is What.OVERFLOW:
            return body
        body["namespace"] = self.namespace
        if self.what is What.PURGED:
            return body
        body |= {"key": self.key.hex() if self.key else None, "tier": self.tier}
        if self.salt:
            body["salt"] = base64.urlsafe_b64encode(self.salt).decode()
        if self.what is What.MOVED:
            body |= {"source": self.source, "tokens": self.tokens}
        elif self.what is What.STORED:
            body |= {"tokens": self.tokens, "first_token": self.first_token}
            body["parent"] = self.parent.hex() if self.parent else None
        else:
            body |= {"tokens": self.tokens, "reason": self.reason, "left": list(self.left)}
        return body

    def frame(self) -> bytes:
        """Return its bytes on the wire."""
        data = json.dumps(self.to_json(), separators=(",", ":"))
        return f"id: {self.id}\nevent: {self.what}\ndata: {data}\n\n".encode()

    @classmethod
    def from_json(cls, what: What, number: str | None, body: object) -> Notice:
        """Build from the form that `to_json` writes.

        Raises:
            BadRequest: a field is malformed.
        """
        given = Fields(body, "notice")
        tiers = {str(tier): tier for tier in Tier}
        left = given.items("left") if "left" in given else ()
        return cls(
            what,
            number,
            namespace=given.optional_text("namespace"),
            key=given.key("key") if "key" in given else None,
            salt=_salt(given.text("salt")) if "salt" in given else b"",
            tier=given.tier("tier") if "tier" in given else None,
            source=given.tier("source") if "source" in given else None,
            tokens=given.integer("tokens", 1, MAX_BLOCK_TOKENS) if "tokens" in given else None,
            first_token=given.integer("first_token", 0, _MAX_POSITION) if "first_token" in given else None,
            parent=given.key("parent") if "parent" in given else None,
            reason=given.optional_text("reason"),
            # a tier that a newer daemon has is left out
            left=tuple(tiers[name] for item in left if (name := string("left", item)) in tiers),
        )


def _salt(text: str) -> bytes:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("salt", "is not base64url") from None


class NoticeParser:
    """Takes a stream of notices apart, whatever pieces it arrives in. Unknown kinds are passed over.

    Example:
        >>> parser = NoticeParser()
        >>> [n.what.value for n in parser.feed(Notice(What.OVERFLOW, "a-1").frame() + HEARTBEAT)]
        ['overflow']
    """

    def __init__(self) -> None:
        self._rest = b""
        self._fields: dict[str, str] = {}

    def feed(self, data: bytes) -> Iterator[Notice]:
        """Take the next bytes; yield each notice that is complete.

        Raises:
            BadField, BadRequest: the bytes are no notices.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            raise BadField("notice", f"a line of more than {_MAX_LINE} bytes")
        for line in lines:
            if line:
                name, _, value = line.decode(errors="replace").partition(":")
                if name:
                    self._fields[name] = value.removeprefix(" ")
                continue
            fields, self._fields = self._fields, {}
            if fields.get("event") in tuple(What):
                body = json_object(fields.get("data", "").encode())
                yield Notice.from_json(What(fields["event"]), fields.get("id"), body)
