"""Memory of a GPU that a client shares with the daemon: what is said of it, on the side socket.

One message: `HELLO`, and behind it one JSON object instead of a descriptor. The answer, the life of the
region and the requests that name it are those of `core/regions.py`. CUDA gives a handle for a whole
allocation, of which an offset and a length say the part that is meant; and an ordinal means another device
in every process, so the device is named by its UUID.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Self

from kvtcd.core.errors import BadRequest
from kvtcd.core.fields import Fields, json_object
from kvtcd.core.regions import HELLO, MAX_OFFSET

HANDLE_BYTES = 64
"""``CU_IPC_HANDLE_SIZE``."""
MAX_MESSAGE = len(HELLO) + 1024
_DEVICE = re.compile(r"[0-9a-f]{32}")
_HANDLE = re.compile(rf"[0-9a-f]{{{2 * HANDLE_BYTES}}}")


@dataclass(frozen=True, slots=True)
class DeviceOffer:
    """Memory of a GPU, as another process is told of it.

    Attributes:
        uuid: of the device, 32 hex digits.
        handle: of the allocation, `HANDLE_BYTES`.
        offset: from its first byte to that of the region.
        nbytes: of the region.
        event: handle of an event that the client records behind what it queues on the region, or None: then
            all of that is done before a request names it.
    """

    uuid: str
    handle: bytes
    offset: int
    nbytes: int
    event: bytes | None = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        told = {
            "uuid": self.uuid,
            "handle": self.handle.hex(),
            "offset": self.offset,
            "bytes": self.nbytes,
        }
        return told if self.event is None else told | {"event": self.event.hex()}

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Build from the form that `to_json` writes.

        Raises:
            BadRequest: a field is missing, unknown, of the wrong type or out of range.
        """
        given = Fields(body, "region")
        given.refuse_others("uuid", "handle", "offset", "bytes", "event")
        return cls(
            _digits(given, "uuid", _DEVICE),
            bytes.fromhex(_digits(given, "handle", _HANDLE)),
            given.integer("offset", 0, MAX_OFFSET),
            given.integer("bytes", 1, MAX_OFFSET),
            bytes.fromhex(_digits(given, "event", _HANDLE)) if "event" in given else None,
        )

    def to_message(self) -> bytes:
        """Return what is sent on the side socket."""
        return HELLO + json.dumps(self.to_json(), separators=(",", ":")).encode()

    @classmethod
    def from_message(cls, message: bytes) -> Self:
        """Read what `to_message` wrote.

        Raises:
            BadRequest: see `from_json`.
            BadField: what follows `HELLO` is no JSON object.
        """
        return cls.from_json(json_object(message.removeprefix(HELLO)))


def _digits(given: Fields, name: str, form: re.Pattern[str]) -> str:
    text = given.text(name)
    if not form.fullmatch(text):
        raise BadRequest(name, f"does not fit {form.pattern}")
    return text
