"""What is counted of the remote tier."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvtcd.core.remote.breaker import BreakerState

STORED, THERE, FAILED, UNWANTED = "stored", "there", "failed", "unwanted"
HIT, MISS, REFUSED = "hit", "miss", "refused"


class Figures:
    """Counters and gauges, for `/metrics` and for who asks how the tier is.

    Args:
        registry: of the daemon's metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.offers = Counter(
            "kvtcd_remote_offers", "Blocks offered to the queue, by what became of them", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.puts = Counter(
            "kvtcd_remote_puts", "Blocks that left the queue, by outcome", ["outcome"], registry=registry
        )
        self.gets = Counter(
            "kvtcd_remote_gets", "Blocks asked for, by outcome", ["outcome"], registry=registry
        )
        self.refused = Counter(
            "kvtcd_remote_refused", "Objects refused by their checks", ["error"], registry=registry
        )
        self.failures = Counter(
            "kvtcd_remote_failures", "Calls of the store that failed, by call and cause", ["call", "cause"],
            registry=registry,
        )  # fmt: skip
        self.bytes = Counter(
            "kvtcd_remote_bytes", "Bytes of records, by direction", ["direction"], registry=registry
        )
        self.profiles = Counter(
            "kvtcd_remote_profiles", "Profiles, by what became of them", ["outcome"], registry=registry
        )
        self.opened = Counter("kvtcd_remote_opened", "Times that the store was left alone", registry=registry)
        self.state = Gauge(
            "kvtcd_remote_breaker", "1 for what the circuit breaker is now", ["state"], registry=registry
        )
        self.queue_blocks = Gauge("kvtcd_remote_queue_blocks", "Blocks that wait", registry=registry)
        self.queue_bytes = Gauge("kvtcd_remote_queue_bytes", "Bytes of these", registry=registry)
        self.purges = Gauge(
            "kvtcd_remote_pending_purges",
            "Purges and deletes that the store still has to do",
            registry=registry,
        )

    def breaker(self, state: BreakerState) -> None:
        """Note what the circuit breaker is."""
        for one in BreakerState:
            self.state.labels(one).set(one is state)


def count(counter: Counter, *labels: str) -> int:
    """Return what a counter with these labels stands at."""
    return int(counter.labels(*labels)._value.get())  # noqa: SLF001 - the library has no other way to read one
