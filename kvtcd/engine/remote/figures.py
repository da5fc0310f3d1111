"""What is counted of the remote tier."""

from __future__ import annotations

from prometheus_client import Counter

from kvtcd.core.errors import Corrupt
from kvtcd.core.remote.backlog import Offer
from kvtcd.core.remote.breaker import BreakerState
from kvtcd.engine.metrics import REFUSALS, Metrics

STORED, THERE, FAILED, UNWANTED = "stored", "there", "failed", "unwanted"
HIT, MISS, REFUSED = "hit", "miss", "refused"


class Figures:
    """Counters and gauges, for `/metrics` and for who asks how the tier is.

    Args:
        metrics: of the daemon.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.offers = metrics.counter(
            "remote_offers", "Blocks offered to the queue, by what became of them", outcome=Offer
        )
        self.puts = metrics.counter(
            "remote_puts", "Blocks that left the queue, by outcome",
            outcome=(STORED, THERE, FAILED, UNWANTED),
        )  # fmt: skip
        self.gets = metrics.counter(
            "remote_gets", "Blocks asked for, by outcome", outcome=(HIT, MISS, REFUSED, FAILED)
        )
        self.refused = metrics.counter("remote_refused", "Objects refused by their checks", error=REFUSALS)
        self.failures = metrics.counter(
            "remote_failures", "Calls of the store that failed, by call and cause", call=(), cause=()
        )
        self.bytes = metrics.counter(
            "remote_bytes", "Bytes of records, by direction", direction=("in", "out")
        )
        self.profiles = metrics.counter(
            "remote_profiles",
            "Profiles, by what became of them",
            outcome=(STORED, HIT, MISS, REFUSED, FAILED),
        )
        self.opened = metrics.counter("remote_opened", "Times that the store was left alone")
        self.state = metrics.gauge("remote_breaker", "1 for what the circuit breaker is now", "state")
        self.queue_blocks = metrics.gauge("remote_queue_blocks", "Blocks that wait")
        self.queue_bytes = metrics.gauge("remote_queue_bytes", "Bytes of these")
        self.purges = metrics.gauge(
            "remote_pending_purges", "Purges and deletes that the store still has to do"
        )

    def refused_profile(self, error: Corrupt) -> None:
        """Note what has the name of a profile, or of a part of one, and is none."""
        self.refused.labels(type(error).__name__).inc()
        self.profiles.labels(REFUSED).inc()

    def breaker(self, state: BreakerState) -> None:
        """Note what the circuit breaker is."""
        for one in BreakerState:
            self.state.labels(one).set(one is state)


def count(counter: Counter, *labels: str) -> int:
    """Return what a counter with these labels stands at."""
    return int(counter.labels(*labels)._value.get())  # noqa: SLF001 - the library has no other way to read one
