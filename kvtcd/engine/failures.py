"""Blocks that did not come where they were wanted: why, counted, and told in the log."""

from __future__ import annotations

import logging

from kvtcd.core.errors import (
    Corrupt,
    DeviceLost,
    Drifted,
    KvtcdError,
    RemoteFailed,
    StoreFailed,
    StoreFull,
    UnknownProfile,
)
from kvtcd.core.events import Move, MoveFailed
from kvtcd.core.keys import RecordKey, log_name
from kvtcd.core.place import Form, Place
from kvtcd.core.reason import Reason
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Namespace

_log = logging.getLogger(__name__)


class Failures:
    """Says what errors mean for blocks.

    Args:
        metrics: told of them.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def of_move(self, move: Move, namespace: Namespace, error: KvtcdError) -> MoveFailed:
        """Take note that a move has failed; return what the catalog is told."""
        reason = self._why(error)
        full = isinstance(error, StoreFull) and move.target is Place.DISK
        self._metrics.disk_full.inc(full)
        self._metrics.moved(move.source, move.target, reason)
        by_the_writer = isinstance(error, StoreFailed) and move.target is Place.DISK
        self._say(error, namespace, move.key, move.source, move.target, told=by_the_writer)
        damaged = reason is Reason.DAMAGED and move.source.form is Form.PACKED
        return MoveFailed(move.key, damaged, full)

    def of_landing(self, key: RecordKey, namespace: Namespace, source: Place, error: KvtcdError) -> Reason:
        """Take note that a block could not land in memory of its reader; return why."""
        self._say(error, namespace, key, source, "memory of its reader")
        return self._why(error)

    def _why(self, error: KvtcdError) -> Reason:
        """Return what an error means for a block, and count damage."""
        if isinstance(error, Drifted):
            return Reason.DRIFT
        # A block whose profile has gone cannot be served; forgetting it lets a client store it anew.
        if not isinstance(error, Corrupt | UnknownProfile):
            return Reason.FAILED
        self._metrics.damaged.labels(type(error).__name__).inc()
        return Reason.DAMAGED

    def _say(
        self, error: KvtcdError, namespace: Namespace, key: RecordKey, source: Place, target: Place | str, *,
        told: bool = False,
    ) -> None:  # fmt: skip
        """Log why a block did not come where it was wanted, unless somebody has `told` of that already."""
        # Drift is told once for all blocks, by `drift`, the loss of a device by who ends the process, and
        # what becomes of a profile that is on its way by who fetches it.
        told = told or isinstance(error, Drifted | DeviceLost | RemoteFailed)
        log = _log.debug if told else _log.warning
        log(
            "record %s of namespace %s, tenant %s: the move from %s to %s failed: %s",
            log_name(key), namespace.name, namespace.tenant, source, target, error,
            extra=namespace.named,
        )  # fmt: skip
