"""A namespace in a file, as `kvtcd export` writes it: without its key none can read it, or change it unseen.

Little endian::

    header    `_HEADER`: magic, version, 32 random bytes, and a keyed hash by which the right key is known
    frames    `_PREFIX`: length and kind; then so many bytes: AES-256-GCM of the content, its tag last

The key of the frames follows from that of the file and the random bytes of the header (HKDF-SHA256), so no
two files share one. A frame's nonce is its number, and its prefix is authenticated with it: a frame that was
changed, moved, repeated, left out, or that comes from another file, does not open (the STREAM construction of
Hoang, Reyhanitabar, Rogaway and Vizár, 2015). The kinds come in this order::

    NAMESPACE  BLOCK…  (PROFILE PART…)…  END

so a file that was cut short lacks its END. Blocks are named by engine keys and salt, which hold for every
daemon; master key and tenant of the one that wrote them do not.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Iterator
from itertools import count

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtcd.core.archive_messages import Kind, Message, ProfileHead, decode, encode
from kvtcd.core.cipher import TAG_BYTES
from kvtcd.core.errors import BadChecksum, BadField, BadMagic, BadVersion, Truncated
from kvtcd.core.keys import hkdf

MAGIC = b"KVTX"
VERSION = 1
KEY_BYTES = SALT_BYTES = 32
MAX_FRAME = (256 << 20) + (64 << 10)
"""Bytes of a frame: of the largest record that a store takes, and what is said of it."""
PART_BYTES = 8 << 20
"""Bytes of a profile in one frame."""
_HEADER = struct.Struct("<4sH2x32s32s")
HEADER_BYTES = _HEADER.size
_PREFIX = struct.Struct("<IB")
_WHAT = "export"


_FOLLOWS = {
    None: {Kind.NAMESPACE},
    Kind.NAMESPACE: {Kind.BLOCK, Kind.PROFILE, Kind.END},
    Kind.BLOCK: {Kind.BLOCK, Kind.PROFILE, Kind.END},
    Kind.PROFILE: {Kind.PART},
    Kind.PART: {Kind.PART, Kind.PROFILE, Kind.END},
}


class Writer:
    """Writes a file, one message after the other.

    Args:
        key: `KEY_BYTES` random bytes; whoever has them can read the file, and write one that is believed.
        salt: `SALT_BYTES` random bytes that no other file has.
        give: takes what is written.
    """

    def __init__(self, key: bytes, salt: bytes, give: Callable[[bytes], object]) -> None:
        self._cipher, check = _keys(key, salt)
        self._give, self._number = give, 0
        give(_HEADER.pack(MAGIC, VERSION, salt, check))

    def put(self, message: Message) -> None:
        """Write a message."""
        self._frame(*encode(message))

    def end(self) -> None:
        """Write that nothing more follows."""
        self._frame(Kind.END, b"")

    def _frame(self, kind: Kind, content: bytes) -> None:
        prefix = _PREFIX.pack(len(content) + TAG_BYTES, kind)
        self._give(prefix)
        self._give(self._cipher.encrypt(_nonce(self._number), content, prefix))
        self._number += 1


def read(key: bytes, take: Callable[[int], bytes]) -> Iterator[Message]:
    """Yield what a file says, each message once its frame is found to be what was written in this place.

    Args:
        key: of the file.
        take: returns the next so many bytes, fewer at the end of the file.

    Raises:
        Corrupt: the file is none, of another key, damaged, or cut short; what came before it is authentic.
    """
    cipher = _opened(key, take(_HEADER.size))
    last: Kind | None = None
    lacking, digest, sum_so_far = 0, b"", hashlib.sha256()
    for number in count():
        kind, content = _frame(cipher, number, take)
        if kind not in _FOLLOWS[last]:
            before = "the header" if last is None else last.name
            raise BadField(_WHAT, f"frame {number} is {kind.name} behind {before}")
        if lacking and kind is not Kind.PART:
            raise Truncated(_WHAT, f"frame {number}: a profile lacks {lacking} bytes")
        message, last = decode(kind, content), kind
        if kind is Kind.END:
            if content or take(1):
                raise BadField(_WHAT, "something follows its end")
            return
        if isinstance(message, ProfileHead):
            lacking, digest, sum_so_far = message.nbytes, message.digest, hashlib.sha256()
        elif isinstance(message, bytes):
            lacking -= len(content)
            sum_so_far.update(content)
            if lacking < 0 or not content:
                raise BadField(_WHAT, f"frame {number}: {len(content)} bytes are no part of its profile")
            if not lacking and sum_so_far.digest() != digest:
                raise BadChecksum(_WHAT, f"frame {number}: the profile is not {digest.hex()}")
        yield message


def parts(head: ProfileHead, messages: Iterator[Message]) -> Iterator[bytes]:
    """Yield the parts of a profile, which are next in what `read` yields; the last one only if all is right.

    Raises:
        Corrupt: see `read`.
    """
    lacking = head.nbytes
    while lacking:
        part = next(messages)
        assert isinstance(part, bytes), "`read` yields parts until there are all"
        lacking -= len(part)
        yield part


def _keys(key: bytes, salt: bytes) -> tuple[AESGCM, bytes]:
    """Return the cipher of a file's frames, and what is written into its header."""
    return AESGCM(hkdf(key, b"kvtcd-export-aes-v1", salt)), hkdf(key, b"kvtcd-export-check-v1", salt)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def header(data: bytes) -> tuple[int, bytes]:
    """Return version and salt of a file, as its first `HEADER_BYTES` say; its key alone says if that is true.

    Raises:
        Corrupt: they are no header, or that of another release.
    """
    if len(data) < _HEADER.size:
        raise Truncated(_WHAT, f"{len(data)} bytes; its header has {_HEADER.size}")
    magic, version, salt, _ = _HEADER.unpack(data)
    if magic != MAGIC:
        raise BadMagic(
            _WHAT, f"begins with {magic.hex()}, not {MAGIC.hex()}; it is no file of `kvtcd export`"
        )
    if version != VERSION:
        raise BadVersion(_WHAT, f"version {version}; this release reads {VERSION}")
    return version, salt


def _opened(key: bytes, head: bytes) -> AESGCM:
    version, salt = header(head)
    cipher, right = _keys(key, salt)
    if not hmac.compare_digest(head, _HEADER.pack(MAGIC, version, salt, right)):
        raise BadChecksum(_WHAT, "this is not the key that it was written with, or its header was changed")
    return cipher


def _frame(cipher: AESGCM, number: int, take: Callable[[int], bytes]) -> tuple[Kind, bytes]:
    """Read the next frame."""
    prefix = take(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise Truncated(_WHAT, f"ends before frame {number}; it was cut short")
    nbytes, kind = _PREFIX.unpack(prefix)
    if not TAG_BYTES <= nbytes <= MAX_FRAME or kind > Kind.END:
        raise BadField(_WHAT, f"frame {number} of kind {kind} has {nbytes} bytes; at most {MAX_FRAME}")
    sealed = take(nbytes)
    if len(sealed) < nbytes:
        raise Truncated(_WHAT, f"frame {number}: {len(sealed)} bytes of {nbytes}; it was cut short")
    try:
        return Kind(kind), cipher.decrypt(_nonce(number), sealed, prefix)
    except InvalidTag:
        raise BadChecksum(_WHAT, f"frame {number} was changed, or belongs elsewhere") from None
