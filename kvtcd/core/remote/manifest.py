"""What a profile is in a shared store: parts of a bounded size, and a manifest that says which.

::

    profiles/<SHA-256>                        the manifest of the profile with this SHA-256
    profiles/parts/<SHA-256>                  a part, under the SHA-256 of its own content

A manifest, version 1, in little endian: ``KVTP``, the version (u32), the size of a part (u32) and of the
profile (u64) in bytes, the SHA-256 of each part in order, and the SHA-256 of all that. The last part may be
shorter. Releases before it put the profile itself under its name: its first eight bytes are the length of a
header, at most `MOST_HEADER`, which the first eight of a manifest are not.

Whoever can write to the store can plant a manifest, so it is believed in nothing but where parts may be: each
is what its name says, or is refused, and so is the profile when it is whole.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from kvtcd.core.errors import BadChecksum, BadField, BadMagic, BadVersion, Truncated

PART_BYTES = 4 << 20
"""Of a part that is written: one call carries it, also over a link of 2 MB/s."""
MOST_PART = 16 << 20
"""Of a part that is believed."""
MOST_MANIFEST = 1 << 20
MOST_HEADER = 1 << 20
_HEAD = struct.Struct("<4sIIQ")
_MAGIC, _VERSION = b"KVTP", 1
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
_WHAT = "manifest of a profile"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Of which parts a profile consists.

    Attributes:
        size: bytes of the profile.
        digests: SHA-256 of each part, in order.
        part: bytes of each but the last.
    """

    size: int
    digests: tuple[bytes, ...]
    part: int = PART_BYTES

    def bounds(self, number: int) -> tuple[int, int]:
        """Return where a part begins, and its bytes."""
        start = number * self.part
        return start, min(self.part, self.size - start)

    def to_bytes(self) -> bytes:
        """Write it."""
        body = _HEAD.pack(_MAGIC, _VERSION, self.part, self.size) + b"".join(self.digests)
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Manifest:
        """Read what `to_bytes` wrote.

        Raises:
            Truncated, BadMagic, BadVersion, BadField, BadChecksum: it is not that.
        """
        if bytes(data[: len(_MAGIC)]) != _MAGIC:
            raise BadMagic(_WHAT, f"begins with {bytes(data[: len(_MAGIC)]).hex()}, not {_MAGIC.hex()}")
        if len(data) < _HEAD.size + _DIGEST_BYTES:
            raise Truncated(_WHAT, f"{len(data)} bytes")
        body, digest = bytes(data[:-_DIGEST_BYTES]), bytes(data[-_DIGEST_BYTES:])
        _, version, part, size = _HEAD.unpack_from(body)
        if version != _VERSION:
            raise BadVersion(_WHAT, f"of version {version}")
        if hashlib.sha256(body).digest() != digest:
            raise BadChecksum(_WHAT, "does not match its checksum")
        if not 0 < part <= MOST_PART or not size:
            raise BadField(_WHAT, f"{size} bytes in parts of {part}")
        count, rest = divmod(len(body) - _HEAD.size, _DIGEST_BYTES)
        if rest or count != count_of(size, part):
            raise BadField(
                _WHAT, f"{len(body) - _HEAD.size} bytes of digests for {size} bytes in parts of {part}"
            )
        digests = (body[at : at + _DIGEST_BYTES] for at in range(_HEAD.size, len(body), _DIGEST_BYTES))
        return cls(size, tuple(digests), part)


def count_of(size: int, part: int) -> int:
    """Return how many parts so many bytes have."""
    return -(-size // part)


def require_header(data: bytes | memoryview) -> None:
    """Refuse what cannot be the beginning of a profile, before all of it is fetched.

    Raises:
        Truncated, BadMagic: it is not that.
    """
    if len(data) < _LENGTH.size:
        raise Truncated("profile", f"{len(data)} bytes")
    (length,) = _LENGTH.unpack_from(data)
    if not 0 < length <= MOST_HEADER:
        raise BadMagic("profile", f"its header claims {length} bytes; it is no profile")
