"""What one stage does to one block. Every function here runs on a stream, none on the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvtcd.core import blob as blobs
from kvtcd.core import cipher
from kvtcd.core import record as records
from kvtcd.core.blob import Blob
from kvtcd.core.errors import Truncated
from kvtcd.core.keys import EngineKey, RecordKey
from kvtcd.core.layout import Layout
from kvtcd.core.record import Envelope
from kvtcd.engine.namespaces import Namespace, Tenant
from kvtcd.engine.ports import Bytes, Inflated, Packed, Scratch


@dataclass(frozen=True, slots=True)
class Origin:
    """What the envelope of a block says that its bytes do not.

    Attributes:
        envelope: that of its packed copy in memory; None without one.
    """

    namespace: Namespace
    engine_key: EngineKey
    salt: bytes
    parent: RecordKey | None
    first_token: int | None
    tokens: int
    raw_bytes: int
    created: int
    expires: int | None = None
    envelope: bytes | None = None

    @classmethod
    def of(cls, namespace: Namespace, envelope: Envelope, sealed: bytes | None = None) -> Origin:
        """Return what an envelope says; `sealed`: it belongs to a packed copy in memory."""
        return cls(
            namespace, envelope.engine_key, envelope.salt, envelope.parent, envelope.first_token,
            envelope.tokens, envelope.raw_bytes, envelope.created, envelope.expires, sealed,
        )  # fmt: skip


class Record(NamedTuple):
    """A block as it lies at rest: a sealed envelope around a blob."""

    envelope: bytes
    blob: bytearray | Bytes

    @property
    def bytes(self) -> memoryview:
        """The bytes of the blob."""
        return memoryview(self.blob) if isinstance(self.blob, bytearray) else self.blob.data


class Checked(NamedTuple):
    """A record whose every byte was checked."""

    envelope: Envelope
    blob: Blob


def gather(pieces: Sequence[Bytes], scratch: Scratch) -> Bytes:
    """Return a block as one array: in place when it is one piece, else a copy."""
    if len(pieces) == 1:
        return pieces[0]
    whole = scratch.take(sum(piece.size for piece in pieces))
    np.concatenate(pieces, out=whole)
    return whole


def seal(packed: Packed, key: RecordKey, origin: Origin, tenant: Tenant) -> Record:
    """Make the record of a packed block."""
    nonce, blob = b"", packed.blob
    if tenant.encrypts:
        nonce = cipher.new_nonce()
        blob = cipher.encrypt(tenant.keys, key, nonce, blob)
    envelope = Envelope(
        key=key, tenant_tag=tenant.keys.tag, key_id=tenant.keys.key_id,
        namespace=origin.namespace.digest, generation=origin.namespace.generation,
        engine_key=origin.engine_key, salt=origin.salt, parent=origin.parent,
        first_token=origin.first_token, tokens=origin.tokens, raw_bytes=origin.raw_bytes,
        blob_bytes=len(blob), created=origin.created, expires=origin.expires,
        blob_mac=records.blob_mac(tenant.keys, blob), nonce=nonce,
    )  # fmt: skip
    return Record(records.seal(tenant.keys, envelope), blob)


def read(key: RecordKey, tenant: Tenant, scratch: Scratch) -> Record:
    """Read the record of a block from disk.

    Raises:
        Truncated: there is none.
    """
    assert tenant.writer is not None, "the catalog promotes only from a tier that exists"
    found = tenant.writer.environment.read(key, scratch.take)
    if found is None:
        raise Truncated("record", "is missing")
    return Record(*found)


def verify(record: Record, key: RecordKey, tenant: Tenant) -> Envelope:
    """Check envelope and MACs: the whole record.

    Raises:
        Corrupt: it is not what was stored.
    """
    envelope = records.open_envelope(tenant.keys, key, record.envelope)
    records.check_blob(tenant.keys, envelope, record.bytes)
    return envelope


def check(record: Record, key: RecordKey, tenant: Tenant, layout: Layout, scratch: Scratch) -> Checked:
    """Check a record, decipher its blob if need be and check its form, before a byte of it is decoded.

    Raises:
        Corrupt: it is not what was stored, or not of this layout.
    """
    envelope = verify(record, key, tenant)
    content = records.content(tenant.keys, envelope, record.bytes, lambda nbytes: scratch.take(nbytes).data)
    return Checked(envelope, formed(content, envelope.tokens, envelope.raw_bytes, layout))


def formed(content: memoryview, tokens: int, raw_bytes: int, layout: Layout) -> Blob:
    """Read a blob whose bytes are authentic, and compare it with what was said of it.

    Raises:
        Corrupt: it is not of this form, length or layout.
    """
    blob = blobs.parse(content)
    if (blob.header.tokens, blob.header.raw_bytes) != (tokens, raw_bytes):
        raise Truncated("blob", "has another length than its envelope says")
    if blob.header.layout != layout.digest or layout.nbytes(tokens) != raw_bytes:
        raise Truncated("blob", "is of another layout than its namespace")
    return blob


def synthesize(inflated: Inflated, pieces: Sequence[Bytes], scratch: Scratch) -> Bytes:
    """Return the block as one array: in place when that is one piece."""
    whole = pieces[0] if len(pieces) == 1 else scratch.take(sum(piece.size for piece in pieces))
    inflated.synthesize(whole)
    return whole


def scatter(whole: Bytes, pieces: Sequence[Bytes]) -> None:
    """Copy one array over the pieces of a block, unless it lies there already."""
    start = 0
    for piece in () if pieces[0] is whole else pieces:
        np.copyto(piece, whole[start : start + piece.size])
        start += piece.size
