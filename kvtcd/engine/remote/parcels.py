"""A record on its way to another host and back. Every function here runs on a lane, none on the loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvtcd.core import cipher
from kvtcd.core import record as records
from kvtcd.core.errors import BadField, WrongRecord
from kvtcd.core.keys import RecordKey
from kvtcd.core.record import Envelope
from kvtcd.core.remote import names
from kvtcd.engine.namespaces import Namespace, Tenant
from kvtcd.engine.ports import Bytes
from kvtcd.engine.steps import Record


def leaving(record: Record, key: RecordKey, tenant: Tenant, generation: int, *, encrypt: bool) -> bytes:
    """Return the bytes of a record for a store: of the generation that holds there, encrypted if asked for.

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
    return names.join(sealed, blob)


def arriving(
    data: bytes, key: RecordKey, namespace: Namespace, tenant: Tenant, generation: int
) -> tuple[Record, Envelope] | None:
    """Check every byte of what a store had under the name of a record; None if its time is over.

    Returns:
        the record as it may lie in the tiers of this daemon, and what its envelope says.

    Raises:
        Corrupt: it is no record of this key, namespace and generation that a daemon with our keys made.
    """
    sealed, blob = names.split(data)
    envelope = records.open_envelope(tenant.keys, key, sealed)
    if envelope.namespace != namespace.digest or envelope.generation != generation:
        raise WrongRecord("envelope", "is intact, but of a generation that was purged")
    records.check_blob(tenant.keys, envelope, blob)
    identity = namespace.identity
    if envelope.tokens != identity.block_tokens or envelope.raw_bytes != identity.layout.nbytes(
        envelope.tokens
    ):
        raise BadField(
            "envelope", f"{envelope.tokens} tokens in {envelope.raw_bytes} bytes: no block of its namespace"
        )
    if envelope.expires is not None and envelope.expires <= time.time_ns() // 1_000_000:
        return None
    here = replace(envelope, generation=namespace.generation)
    return Record(records.seal(tenant.keys, here), np.frombuffer(blob, dtype=np.uint8)), here


def lay(record: Record, pieces: Sequence[Bytes]) -> None:
    """Copy a blob into host memory."""
    start = 0
    whole = np.frombuffer(record.bytes, dtype=np.uint8)
    for piece in pieces:
        np.copyto(piece, whole[start : start + piece.size])
        start += piece.size
