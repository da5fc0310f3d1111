"""What an earlier process left in an environment: mended, read, told apart from what belongs to nobody."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import numpy as np
from prometheus_client import Counter

from kvtcd.core import record as records
from kvtcd.core.errors import Corrupt
from kvtcd.core.keys import RecordKey, TenantKeys, log_name
from kvtcd.core.reason import Reason
from kvtcd.engine import envelopes
from kvtcd.engine.envelopes import Rows
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.ports import Environment

SHOWN = 10
"""Damaged records that are named; of the others only their number is told."""
_log = logging.getLogger(__name__)


def mend(environment: Environment, tag: str) -> dict[str, bytes]:
    """Put an environment in order after an unclean end; return what it keeps under namespace names."""
    environment.check_readers()
    if environment.recovered and (orphans := environment.drop_orphans()):
        _log.warning("environment of tenant %s: %d records lacked their header and are removed", tag, orphans)
    return environment.namespaces()


def scan(
    environment: Environment, keys: TenantKeys, known: Mapping[bytes, Namespace], metrics: Metrics
) -> tuple[Rows, list[RecordKey]]:
    """Read the envelopes of all records.

    After a clean end only their form is checked now: whatever is read later is checked in full then, and a
    false envelope can mislead about itself alone. After an unclean one every MAC is checked here.

    Args:
        environment: of a tenant.
        keys: the tenant's.
        known: the tenant's namespaces, by digest.
        metrics: told of what is refused.

    Returns:
        what is to be taken in, the oldest first; and the keys of what fails its MAC, has expired, or belongs
        to no namespace.
    """
    now = time.time_ns() // 1_000_000
    damaged = list[str]()

    def fault(key: RecordKey, sealed: bytes) -> Counter | None:
        """Return what counts the reason why a record is not taken in, None if it is."""
        try:
            whole = environment.recovered
            envelope = records.open_envelope(keys, key, sealed) if whole else records.parse(sealed)
        except Corrupt as error:
            damaged.append(f"{log_name(key)} of {_whose(sealed, known)}, tenant {keys.tenant}: {error}")
            return metrics.damaged.labels(type(error).__name__)
        namespace = known.get(envelope.namespace)
        if namespace is None or namespace.generation != envelope.generation:
            return metrics.foreign
        if envelope.expires is not None and (envelope.expires - now) // 1000 <= 0:
            return metrics.lost.labels(Reason.EXPIRED)
        return None

    # One growing piece of memory: arrays for each page would leave holes when they go.
    taken, refused = bytearray(), list[RecordKey]()
    for page in environment.scan():
        rows, sound = envelopes.read(page.keys, page.envelopes, page.footprints, known, now)
        doubtful = range(len(rows)) if environment.recovered else np.flatnonzero(~sound).tolist()
        for index in doubtful:
            key, envelope = RecordKey(page.keys[index]), page.envelopes[index]
            why = fault(key, envelope)
            sound[index] = why is None
            if why is not None:
                why.inc()
                refused.append(key)
        taken += (rows if sound.all() else rows[sound]).tobytes()
    for each in damaged[:SHOWN]:
        _log.warning("damaged record %s", each)
    if more := len(damaged[SHOWN:]):
        _log.warning("%d more damaged records of tenant %s", more, keys.tenant)
    found = np.frombuffer(taken, envelopes.ROW)
    return found[np.argsort(found["created"], kind="stable")], refused  # the order of use is not kept


def _whose(sealed: bytes, known: Mapping[bytes, Namespace]) -> str:
    """Say which namespace an envelope names, whether that is true or not."""
    try:
        namespace = known.get(records.parse(sealed).namespace)
    except Corrupt:
        namespace = None
    return f"namespace {namespace.name}" if namespace else "an unknown namespace"


def without(environment: Environment, namespace: bytes, remaining: dict[str, bytes]) -> set[RecordKey] | None:
    """Leave no byte of a namespace, and none of what was set aside; return what stays, None if all the rest.

    Args:
        environment: of its tenant.
        namespace: its digest.
        remaining: what the environment keeps under the names of the others.
    """
    whole = environment.rewrite(lambda envelope: belongs_elsewhere(envelope, namespace), remaining)
    environment.drop_set_aside()
    if whole:
        return None
    return {RecordKey(key) for page in environment.scan() for key in page.keys}


def belongs_elsewhere(envelope: bytes, namespace: bytes) -> bool:
    """Tell whether an envelope is intact and of another namespace."""
    try:
        return records.parse(envelope).namespace != namespace
    except Corrupt:
        return False
