"""What a persistent tier stores: an envelope that says what a blob is, and authenticates it.

Little endian::

    fixed fields    `_FIXED`, magic and version first
    engine key      1-64 bytes
    salt            0-255 bytes
    envelope MAC    32 bytes: keyed BLAKE3 over everything before it

The fixed fields hold the keyed BLAKE3 of the blob, so the envelope's MAC covers both, an index can be built
from envelopes alone and still be authentic, and a blob moved under another envelope is refused.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from kvtcd.core.cipher import NONCE_BYTES, TAG_BYTES, decrypt
from kvtcd.core.errors import BadChecksum, BadField, BadMagic, BadVersion, Truncated, WrongRecord
from kvtcd.core.keys import MAX_KEY, MAX_SALT, EngineKey, RecordKey, TenantKeys

MAGIC = b"KVTR"
VERSION = 1
MAC_BYTES = 32
FIELDS = (
    ("magic", "4s"), ("version", "H"), ("cipher", "B"), ("flags", "B"), ("salt_bytes", "H"),
    ("key_bytes", "B"), ("zero", "B"), ("tokens", "I"), ("nonce", "24s"), ("key", "32s"), ("tag", "16s"),
    ("key_id", "8s"), ("namespace", "32s"), ("generation", "Q"), ("parent", "32s"), ("first_token", "Q"),
    ("raw_bytes", "Q"), ("blob_bytes", "Q"), ("created", "Q"), ("expires", "Q"), ("blob_mac", "32s"),
)  # fmt: skip
"""Name and `struct` code of each fixed field, in order and without gaps."""
_FIXED = struct.Struct("<" + "".join(code for _, code in FIELDS))
FIXED_BYTES = _FIXED.size
HAS_PARENT, HAS_FIRST = 1, 2
PLAINTEXT, AES_256_GCM = 0, 1
_NONCE_BYTES = {PLAINTEXT: 0, AES_256_GCM: NONCE_BYTES}
MAX_NUMBER = (1 << 63) - 1
MAX_ENVELOPE_BYTES = _FIXED.size + MAX_KEY + MAX_SALT + MAC_BYTES


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is known of a stored block without its blob.

    Times are Unix milliseconds; `expires` None means never. `blob_bytes` and `blob_mac`, its keyed BLAKE3,
    are those of the blob as it is stored; with a `nonce` it is encrypted (`core.cipher`).
    """

    key: RecordKey
    tenant_tag: bytes
    key_id: bytes
    namespace: bytes
    generation: int
    engine_key: EngineKey
    salt: bytes
    parent: RecordKey | None
    first_token: int | None
    tokens: int
    raw_bytes: int
    blob_bytes: int
    created: int
    expires: int | None
    blob_mac: bytes
    nonce: bytes = b""


def blob_mac(keys: TenantKeys, blob: bytes | bytearray | memoryview) -> bytes:
    """Return the keyed BLAKE3 of a blob, 32 bytes."""
    return blake3(blob, key=keys.mac).digest()


def seal(keys: TenantKeys, envelope: Envelope) -> bytes:
    """Write an envelope and its MAC."""
    flags = (HAS_PARENT if envelope.parent else 0) | (HAS_FIRST if envelope.first_token is not None else 0)
    body = (
        _FIXED.pack(
            MAGIC, VERSION, AES_256_GCM if envelope.nonce else PLAINTEXT, flags, len(envelope.salt),
            len(envelope.engine_key), 0, envelope.tokens, envelope.nonce, envelope.key, envelope.tenant_tag,
            envelope.key_id,
            envelope.namespace, envelope.generation, envelope.parent or bytes(32),
            envelope.first_token or 0, envelope.raw_bytes, envelope.blob_bytes, envelope.created,
            envelope.expires or 0, envelope.blob_mac,
        )
        + envelope.engine_key
        + envelope.salt
    )  # fmt: skip
    return body + blake3(body, key=keys.mac).digest()


def parse(data: bytes | memoryview) -> Envelope:
    """Check an envelope's form, not its MAC: what `kvtcd inspect` may show without a key.

    Raises:
        Truncated, BadMagic, BadVersion, BadField: the first rule that is broken.
    """
    if len(data) < _FIXED.size + MAC_BYTES:
        raise Truncated("envelope", f"{len(data)} bytes, at least {_FIXED.size + MAC_BYTES} are needed")
    (magic, version, cipher, flags, salt_bytes, key_bytes, zero, tokens, nonce, key, tag, key_id, namespace,
     generation, parent, first, raw_bytes, blob_bytes, created, expires, mac,
    ) = _FIXED.unpack_from(data)  # fmt: skip
    if magic != MAGIC:
        raise BadMagic("envelope", f"begins with {magic.hex()}, not {MAGIC.hex()}")
    if version != VERSION:
        raise BadVersion("envelope", f"version {version}; this release reads {VERSION}")
    if cipher not in _NONCE_BYTES:
        raise BadField("envelope", f"cipher {cipher}; this release reads {', '.join(map(str, _NONCE_BYTES))}")
    used, rest = nonce[: _NONCE_BYTES[cipher]], nonce[_NONCE_BYTES[cipher] :]
    if any(rest) or (cipher == AES_256_GCM and (not any(used) or blob_bytes <= TAG_BYTES)):
        raise BadField("envelope", f"nonce {nonce.hex()} and {blob_bytes} bytes for cipher {cipher}")
    if not 1 <= key_bytes <= MAX_KEY or salt_bytes > MAX_SALT or zero or flags > HAS_PARENT | HAS_FIRST:
        raise BadField("envelope", f"key of {key_bytes} bytes, salt of {salt_bytes}, flags {flags}")
    if len(data) != _FIXED.size + key_bytes + salt_bytes + MAC_BYTES:
        raise Truncated("envelope", f"{len(data)} bytes for a key of {key_bytes} and a salt of {salt_bytes}")
    if not 1 <= tokens <= raw_bytes or not blob_bytes:
        raise BadField("envelope", f"{tokens} tokens, {raw_bytes} raw bytes, {blob_bytes} stored bytes")
    if max(first, raw_bytes, blob_bytes, created, expires) > MAX_NUMBER:
        raise BadField("envelope", "a number of more than 63 bits")
    tail = bytes(data[_FIXED.size : _FIXED.size + key_bytes + salt_bytes])
    return Envelope(
        key=key, tenant_tag=tag, key_id=key_id, namespace=namespace, generation=generation,
        engine_key=EngineKey(tail[:key_bytes]), salt=tail[key_bytes:],
        parent=RecordKey(parent) if flags & HAS_PARENT else None,
        first_token=first if flags & HAS_FIRST else None, tokens=tokens, raw_bytes=raw_bytes,
        blob_bytes=blob_bytes, created=created, expires=expires or None, blob_mac=mac,
        nonce=used,
    )  # fmt: skip


def open_envelope(keys: TenantKeys, stored_under: RecordKey, data: bytes | memoryview) -> Envelope:
    """Check form, MAC and place of an envelope.

    Args:
        keys: of the tenant in whose environment it was found.
        stored_under: the record key it was found under.
        data: the envelope's bytes.

    Raises:
        Corrupt: any rule is broken; `WrongRecord` when it is intact but belongs under another key.
    """
    envelope = parse(data)
    body, mac = data[:-MAC_BYTES], data[-MAC_BYTES:]
    if not hmac.compare_digest(blake3(body, key=keys.mac).digest(), bytes(mac)):
        raise BadChecksum("envelope", "does not match its MAC")
    named = keys.record_key(envelope.namespace, envelope.salt, envelope.engine_key)
    if envelope.key != stored_under or named != stored_under or envelope.tenant_tag != keys.tag:
        raise WrongRecord("envelope", "is intact, but was stored under another key")
    return envelope


def check_blob(keys: TenantKeys, envelope: Envelope, blob: bytes | bytearray | memoryview) -> None:
    """Compare a blob with its envelope, before one byte of it is decoded.

    Raises:
        Truncated, BadChecksum: the blob is not the one that was sealed.
    """
    if len(blob) != envelope.blob_bytes:
        raise Truncated("record", f"{len(blob)} bytes of {envelope.blob_bytes}")
    if not hmac.compare_digest(blob_mac(keys, blob), envelope.blob_mac):
        raise BadChecksum("record", "the blob does not match its MAC")


def fresh(nbytes: int) -> memoryview:
    """Give new memory."""
    return memoryview(bytearray(nbytes))


def content(
    keys: TenantKeys, envelope: Envelope, stored: memoryview, take: Callable[[int], memoryview]
) -> memoryview:
    """Return the blob that is stored: as it is, or deciphered into memory that `take` gives.

    Raises:
        BadChecksum: it does not match its tag.
    """
    if not envelope.nonce:
        return stored
    plain = take(len(stored) - TAG_BYTES)
    decrypt(keys, envelope.key, envelope.nonce, stored, plain)
    return plain
