"""What an earlier process left in an environment: mended, read, told apart from what belongs to nobody."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvtcd.core import record as records
from kvtcd.core.errors import Corrupt
from kvtcd.core.events import Reason, Recovered
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


def scan(
    environment: Environment, keys: TenantKeys, known: Mapping[bytes, Namespace], metrics: Metrics
) -> tuple[list[Recovered], list[RecordKey]]:
    """Read the envelopes of all records.

    Args:
        environment: of a tenant.
        keys: the tenant's.
        known: the tenant's namespaces, by digest.
        metrics: told of what is refused.

    Returns:
        what is to be taken in, the oldest first, and the keys of what fails its MAC, has expired, or belongs
        to no namespace.
    """
    now = time.time_ns() // 1_000_000
    found, refused = [], []
    for stored in environment.scan():
        key = RecordKey(stored.key)
        try:
            envelope = records.open_envelope(keys, key, stored.envelope)
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
        event = Recovered(
            key, namespace.number, envelope.tokens, envelope.raw_bytes, stored.footprint,
            envelope.parent, envelope.first_token or 0, left,
        )  # fmt: skip
        found.append((envelope.created, event))
    found.sort(key=lambda pair: pair[0])  # for the order of use, which is not kept
    return [event for _, event in found], refused


def belongs_elsewhere(envelope: bytes, namespace: bytes) -> bool:
    """Tell whether an envelope is intact and of another namespace."""
    try:
        return records.parse(envelope).namespace != namespace
    except Corrupt:
        return False
