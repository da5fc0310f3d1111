"""Namespaces whose blocks are unlike what their profile was made from: told once, and shown in the metrics.

`/metrics` is for readers of all tenants, so it says no names: a namespace is the beginning of its digest
there, as `/v1/namespaces` shows it to its owner.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvtcd.core.drift import Drift
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Namespace

SHOWN = 32
"""Namespaces that the metrics show: those that drift first, then those that were looked at most."""
_DIGITS = 12
_log = logging.getLogger(__name__)


def notice(namespace: Namespace, metrics: Metrics) -> None:
    """Tell when blocks of a namespace begin to be unlike calibration, and when they are as before."""
    drift = namespace.codec.drift
    drifting = drift is not None and drift.state == "drifting"
    if drift is None or drifting is namespace.drifting:
        return
    namespace.drifting = drifting
    metrics.drifts.labels("drifting" if drifting else "usual").inc()
    if drifting:
        _log.warning(
            "blocks of namespace %s, tenant %s, are unlike calibration (%s); quality.on_drift is %s",
            namespace.name, namespace.tenant, drift.why, namespace.policy.codec.on_drift,
            extra=namespace.named,
        )  # fmt: skip
    else:
        _log.info(
            "blocks of namespace %s, tenant %s, are like those of calibration again",
            namespace.name, namespace.tenant, extra=namespace.named,
        )  # fmt: skip


def show(namespaces: Iterable[Namespace], metrics: Metrics) -> None:
    """Bring the gauges of namespaces up to date; of several with one identity the one that drifts counts."""
    watched = [(ns.digest.hex()[:_DIGITS], ns.codec.drift) for ns in namespaces]
    found = sorted(((name, drift) for name, drift in watched if drift), key=lambda each: _rank(each[1]))
    for gauge in (metrics.drifting, metrics.watched, metrics.drift):
        gauge.clear()
    for name, drift in reversed(found[:SHOWN]):
        metrics.drifting.labels(name).set(drift.state == "drifting")
        metrics.watched.labels(name).set(drift.blocks)
        for stream, reading in drift.streams.items():
            for figure in ("energy", "missed", "kurtosis"):
                metrics.drift.labels(name, stream, figure).set(getattr(reading, figure))


def _rank(drift: Drift) -> tuple[bool, int]:
    return drift.state != "drifting", -drift.blocks
