"""What an earlier process left in an environment: mended, read, told apart from what belongs to nobody."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping

from kvtcd.core import record as records
from kvtcd.core.errors import Corrupt
from kvtcd.core.events import Found, Reason
from kvtcd.core.keys import RecordKey, TenantKeys
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.ports import Environment


def mend(environment: Environment) -> dict[str, bytes]:
    """Put an environment in order after an unclean end; return what it keeps under namespace names."""
    environment.check_readers()
    if environment.recovered:
        environment.drop_orphans()
    return environment.namespaces()


_ROW = struct.Struct(">QQIIQQQ32s32s")
_NO_PARENT, _NEVER = bytes(32), (1 << 64) - 1


def scan(
    environment: Environment, keys: TenantKeys, known: Mapping[bytes, Namespace], metrics: Metrics
) -> tuple[list[bytes], list[RecordKey]]:
    """Read the envelopes of all records.

    After a clean end only their form is checked now: whatever is read later is checked in full then, and a
    false envelope can mislead about itself alone. After an unclean one every MAC is checked here.

    Args:
        environment: of a tenant.
        keys: the tenant's.
        known: the tenant's namespaces, by digest.
        metrics: told of what is refused.

    Returns:
        what is to be taken in, the oldest first, as rows for `found`: bytes take a fifth of the memory of
        what they say, and leave no hole in it when they go; and the keys of what fails its MAC, has expired,
        or belongs to no namespace.
    """
    now = time.time_ns() // 1_000_000
    rows, refused = [], []
    for stored in environment.scan():
        key = RecordKey(stored.key)
        try:
            envelope = (
                records.open_envelope(keys, key, stored.envelope)
                if environment.recovered
                else records.parse(stored.envelope)
            )
        except Corrupt as error:
            metrics.damaged.labels(type(error).__name__).inc()
            refused.append(key)
            continue
        namespace = known.get(envelope.namespace)
        if namespace is None or namespace.generation != envelope.generation:
            metrics.foreign.inc()
            refused.append(key)
            continue
        left = None if envelope.expires is None else (envelope.expires - now) // 1000
        if left is not None and left <= 0:
            metrics.lost.labels(Reason.EXPIRED).inc()
            refused.append(key)
            continue
        rows.append(
            _ROW.pack(
                envelope.created, envelope.raw_bytes, namespace.number, envelope.tokens, stored.footprint,
                envelope.first_token or 0, _NEVER if left is None else left, key,
                envelope.parent or _NO_PARENT,
            )
        )  # fmt: skip
    rows.sort()  # by creation, for the order of use, which is not kept
    return rows, refused


def found(row: bytes) -> Found:
    """Return what a row of `scan` says."""
    _, raw_bytes, namespace, tokens, nbytes, first, left, key, parent = _ROW.unpack(row)
    return Found(
        RecordKey(key), namespace, tokens, raw_bytes, nbytes,
        None if parent == _NO_PARENT else RecordKey(parent), first, None if left == _NEVER else left,
    )  # fmt: skip


def belongs_elsewhere(envelope: bytes, namespace: bytes) -> bool:
    """Tell whether an envelope is intact and of another namespace."""
    try:
        return records.parse(envelope).namespace != namespace
    except Corrupt:
        return False
