"""A record on its way to another host and back. What touches its blob runs on a lane."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvtcd.core import cipher
from kvtcd.core import record as records
from kvtcd.core.errors import BadField, Truncated, WrongRecord
from kvtcd.core.keys import RecordKey
from kvtcd.core.record import Envelope
from kvtcd.core.remote import names
from kvtcd.engine.namespaces import Namespace, Tenant
from kvtcd.engine.ports import Bytes, Value
from kvtcd.engine.steps import Record


def leaving(
    record: Record, key: RecordKey, tenant: Tenant, generation: int, *, encrypt: bool
) -> tuple[Value, ...]:
    """Return a record for a store: of the generation that holds there, encrypted if asked for, not copied.

    Args:
        record: sealed by this daemon a moment ago.
        key: its key.
        tenant: whose it is.
        generation: that its name has in the store.
        encrypt: encrypt a blob that is not.
    """
    envelope, blob = records.parse(record.envelope), record.bytes
    if encrypt and not envelope.nonce:
        nonce = cipher.new_nonce()
        blob = memoryview(cipher.encrypt(tenant.keys, key, nonce, blob))
        mac = records.blob_mac(tenant.keys, blob)
        envelope = replace(envelope, nonce=nonce, blob_bytes=len(blob), blob_mac=mac)
    sealed = records.seal(tenant.keys, replace(envelope, generation=generation))
    return names.parts(sealed, blob)


def opened(
    data: Value, key: RecordKey, namespace: Namespace, tenant: Tenant, generation: int
) -> tuple[Record, Envelope] | None:
    """Check the envelope of what a store had under the name of a record; None if its time is over.

    That takes microseconds, and so may be done on the loop; `lay` checks the blob.

    Returns:
        the record with an envelope for the tiers of this daemon, and what its own one says.

    Raises:
        Corrupt: it is no record of this key, namespace and generation that a daemon with our keys made.
    """
    sealed, blob = names.split(data)
    envelope = records.open_envelope(tenant.keys, key, sealed)
    if envelope.namespace != namespace.digest or envelope.generation != generation:
        raise WrongRecord("envelope", "is intact, but of a generation that was purged")
    if len(blob) != envelope.blob_bytes:
        raise Truncated("record", f"{len(blob)} bytes of {envelope.blob_bytes}")
    identity, tokens, nbytes = namespace.identity, envelope.tokens, envelope.raw_bytes
    if tokens != identity.block_tokens or nbytes != identity.layout.nbytes(tokens):
        raise BadField("envelope", f"{tokens} tokens in {nbytes} bytes: no full block of its namespace")
    if envelope.expires is not None and envelope.expires <= time.time_ns() // 1_000_000:
        return None
    here = replace(envelope, generation=namespace.generation)
    return Record(records.seal(tenant.keys, here), np.frombuffer(blob, dtype=np.uint8)), envelope


def lay(record: Record, envelope: Envelope, tenant: Tenant, pieces: Sequence[Bytes]) -> None:
    """Check every byte of a blob, and copy it into host memory.

    Raises:
        Corrupt: it is not the one that was sealed.
    """
    records.check_blob(tenant.keys, envelope, record.bytes)
    start = 0
    whole = np.frombuffer(record.bytes, dtype=np.uint8)
    for piece in pieces:
        np.copyto(piece, whole[start : start + piece.size])
        start += piece.size
