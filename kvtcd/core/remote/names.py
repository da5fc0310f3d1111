"""What lies in a shared store, under which name, and in which form.

::

    <tenant tag>/<namespace digest>/<generation>/<record key>   length of the envelope (u16), envelope, blob
    <tenant tag>/<namespace digest>/generation                  the number that names of records have now
    profiles/<SHA-256>, profiles/parts/<SHA-256>                a profile (`manifest`)

Tag, digest and keys are lower-case hex, the number is decimal, and numbers in bytes are little endian. All of
a namespace has one prefix, so a purge can list it. Whoever can write to the store can put anything anywhere:
records say themselves, under a MAC, which key and generation they belong to; the generation object has a MAC
of its own; profiles are what their name says, or are refused.
"""

from __future__ import annotations

import hmac
import struct

from blake3 import blake3

from kvtcd.core.errors import BadChecksum, BadField, BadMagic, Truncated
from kvtcd.core.keys import RecordKey, TenantKeys
from kvtcd.core.record import MAX_ENVELOPE_BYTES

GENERATION = "generation"
FIRST = 0
"""The generation of a namespace that was never purged: there is no object that says so."""
_LENGTH = struct.Struct("<H")
_STATED = struct.Struct("<4s4xQ")
_MAGIC = b"KVTG"
_MAC_BYTES = 32


def prefix(keys: TenantKeys, namespace: bytes) -> str:
    """Return what the names of all that is stored of a namespace begin with."""
    return f"{keys.tag.hex()}/{namespace.hex()}/"


def record_prefix(keys: TenantKeys, namespace: bytes, generation: int) -> str:
    """Return what the names of the records of one generation begin with."""
    return f"{prefix(keys, namespace)}{generation}/"


def record_name(keys: TenantKeys, namespace: bytes, generation: int, key: RecordKey) -> str:
    """Return the name of a record."""
    return record_prefix(keys, namespace, generation) + key.hex()


def generation_name(keys: TenantKeys, namespace: bytes) -> str:
    """Return the name of the object that says which generation of a namespace is valid."""
    return prefix(keys, namespace) + GENERATION


def profile_name(digest: bytes) -> str:
    """Return the name of a profile."""
    return f"profiles/{digest.hex()}"


def part_name(digest: bytes) -> str:
    """Return the name of a part of a profile."""
    return f"profiles/parts/{digest.hex()}"


def parts(envelope: bytes, blob: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
    """Return the bytes of a record: what comes before the blob, and the blob, which is not copied."""
    return _LENGTH.pack(len(envelope)) + envelope, blob


def split(data: bytes | memoryview) -> tuple[bytes, memoryview]:
    """Return envelope and blob of a record, neither of them checked.

    Raises:
        Truncated: it is shorter than it says, or says what no envelope can be.
    """
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise Truncated("record", f"{len(view)} bytes")
    end = _LENGTH.size + _LENGTH.unpack_from(view)[0]
    if end > min(len(view), _LENGTH.size + MAX_ENVELOPE_BYTES):
        raise Truncated("record", f"{len(view)} bytes, for an envelope that ends at {end}")
    return bytes(view[_LENGTH.size : end]), view[end:]


def state_generation(keys: TenantKeys, namespace: bytes, generation: int) -> bytes:
    """Write the object that says which generation of a namespace is valid."""
    body = _STATED.pack(_MAGIC, generation)
    return body + _mac(keys, namespace, body)


def stated_generation(keys: TenantKeys, namespace: bytes, data: bytes | memoryview) -> int:
    """Read what `state_generation` wrote.

    Raises:
        Truncated, BadMagic, BadChecksum: it is not that, or of another namespace or tenant.
    """
    if len(data) != _STATED.size + _MAC_BYTES:
        raise Truncated(GENERATION, f"{len(data)} bytes, not {_STATED.size + _MAC_BYTES}")
    body, mac = bytes(data[: _STATED.size]), bytes(data[_STATED.size :])
    magic, generation = _STATED.unpack(body)
    if magic != _MAGIC:
        raise BadMagic(GENERATION, f"begins with {magic.hex()}, not {_MAGIC.hex()}")
    if not hmac.compare_digest(mac, _mac(keys, namespace, body)):
        raise BadChecksum(GENERATION, "does not match its MAC")
    if generation == FIRST:
        raise BadField(GENERATION, f"{FIRST} is said by there being no object")
    return int(generation)


def _mac(keys: TenantKeys, namespace: bytes, body: bytes) -> bytes:
    return blake3(b"kvtcd-generation-v1" + namespace + body, key=keys.mac).digest()
