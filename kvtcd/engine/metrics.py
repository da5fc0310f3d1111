"""What is counted: a listener to the same events and actions that drive the daemon."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from kvtcd.core.blob import CodecId
from kvtcd.core.errors import Corrupt, UnknownProfile
from kvtcd.core.kv_events import CLEARED, REMOVED, STORED
from kvtcd.core.messages import Outcome
from kvtcd.core.notices import What
from kvtcd.core.place import Place, Tier
from kvtcd.core.reason import Reason
from kvtcd.engine.changes import EVICTED, SUPERSEDED
from kvtcd.engine.timeline import Span

disable_created_metrics()  # type: ignore[no-untyped-call] # a series beside each counter, which nothing asks for
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
NOWHERE, HURRY, LOST = "nowhere", "hurry", "device-lost"
_WAYS = (
    (Place.GPU, Place.HOST), (Place.HOST, Place.GPU), (Place.HOST, Place.PACKED), (Place.HOST, Place.DISK),
    (Place.PACKED, Place.HOST), (Place.PACKED, Place.DISK), (Place.DISK, Place.HOST),
    (Place.DISK, Place.PACKED),
)  # fmt: skip
"""From where to where a move can go."""
_MOVED, LANDED = "moved", "landed"
_LOST = (Reason.NO_TIER, Reason.PRESSURE, Reason.DAMAGED, Reason.EXPIRED)
_REFUSING: list[type[Exception]] = [Corrupt, *Corrupt.__subclasses__(), UnknownProfile]
REFUSALS = tuple(kind.__name__ for kind in _REFUSING)
"""What is said of records that fail their checks."""


class Metrics:
    """Counters and gauges of one daemon, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.puts = self.counter("puts", "Blocks offered, by outcome", outcome=get_args(Outcome))
        self.gets = self.counter(
            "gets", "Blocks asked for, by where they were found",
            found=(*Place, Tier.REMOTE, Reason.FAILED, Reason.TOO_LARGE, NOWHERE),
        )  # fmt: skip
        self.moves = self.counter(
            "moves", "Moves ended, by direction and outcome",
            direction=[_way(*way) for way in _WAYS],
            outcome=(_MOVED, Reason.FAILED, Reason.DAMAGED, Reason.DRIFT),
        )  # fmt: skip
        self.straight = self.counter(
            "straight_reads",
            "Blocks copied or unpacked into memory of their readers on a GPU, by source and outcome",
            source=(Place.GPU, Place.PACKED, Place.DISK), outcome=(LANDED, Reason.DAMAGED, Reason.FAILED),
        )  # fmt: skip
        self.lost = self.counter("lost", "Blocks that left the cache, by reason", reason=_LOST)
        self.dropped = self.counter(
            "dropped_copies", "Copies that were let go, by place and reason", place=Place,
            reason=(EVICTED, SUPERSEDED, Reason.DELETED, *_LOST[1:]),
        )  # fmt: skip
        self.packed = self.counter(
            "packed_blocks",
            "Blocks packed, by the codec used",
            codec=[codec.name.lower() for codec in CodecId],
        )
        self.lossless_because = self.counter(
            "lossless_fallbacks", "Blocks stored finer, or losslessly, than the policy asks",
            reason=(HURRY, LOST),  # and those of the codecs
        )  # fmt: skip
        self.on_cpu = self.counter(
            "codec_on_cpu", "Stages of blocks that a CPU did because the GPU could not, by why",
            why=("memory", "nvcomp"),
        )  # fmt: skip
        self.unreplayed = self.counter(
            "codec_not_replayed",
            "Shapes of blocks whose work a GPU is told operation by operation for good, by why",
            why=("memory", "capture", "different"),
        )
        self.unprofiled = self.counter(
            "unprofiled_namespaces", "Namespaces stored losslessly although their policy asks for more"
        )
        self.drifts = self.counter(
            "drifts", "Times that blocks of a namespace became unlike calibration, or like it",
            state=("drifting", "usual"),
        )  # fmt: skip
        self.drifting = self.gauge("namespace_drifting", "Whether blocks are unlike calibration", "namespace")
        self.watched = self.gauge(
            "namespace_watched_blocks", "Blocks that were compared with calibration", "namespace"
        )
        self.drift = self.gauge(
            "namespace_drift",
            "Of the last sampled blocks, over calibration: energy, what its basis misses; kurtosis",
            "namespace",
            "stream",
            "figure",
        )
        self.raw_bytes = self.counter("packed_raw_bytes", "Raw bytes of the blocks packed")
        self.blob_bytes = self.counter("packed_blob_bytes", "Bytes of the blobs they became")
        self.warmed = self.counter("warmed_blocks", "Blocks brought up after a start because they were hot")
        self.damaged = self.counter("damaged_records", "Records refused by their checks", error=REFUSALS)
        self.foreign = self.counter("foreign_records", "Records on disk that belong to nothing known")
        self.internal_errors = self.counter(
            "internal_errors",
            "Unexpected failures in the background",
            where=("mover", "drop", "open", "tick"),
        )
        self.disk_full = self.counter("disk_full", "Blocks that a disk refused because it was full")
        self.withheld = self.gauge(
            "disk_withheld_bytes",
            "Bytes of the disk tier that full disks do not hold, and that are not counted on until they do",
        )
        self.quarantined = self.counter("quarantined_environments", "Disk environments set aside as damaged")
        self.degraded = self.gauge(
            "degraded", "What is not as it should be while everything else is served", "what"
        )
        self.stage_seconds = Histogram(
            "kvtcd_stage_seconds", "Time of one stage of one block's way up or down", ["pipeline", "stage"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.loop_lag = Histogram(
            "kvtcd_loop_lag_seconds", "How late the event loop was with what was due, looked at each second",
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.oldest_reader = self.gauge(
            "oldest_reader_seconds", "For how long the oldest reader has held its block in host memory"
        )
        self.notices = self.counter("notices", "Notices to listeners, by kind", what=What)
        self.overflows = self.counter("notice_overflows", "Times that a listener was too slow")
        self.kv_events = self.counter(
            "kv_events", "KV events that were published, by type", type=(STORED, REMOVED, CLEARED["type"])
        )
        self.untold = self.counter(
            "kv_events_untold", "Notices that are no KV event, such as copies on a GPU"
        )
        self.recorded = self.counter("recorded_lines", "Lines of the recording that were written")
        self.unrecorded = self.counter("unrecorded_lines", "Lines of the recording that were left out")
        self.certificate_ends = self.gauge(
            "certificate_ends_seconds", "Unix time at which the certificate of TCP ends, 0 without TLS"
        )
        self.leases = self.gauge("leases", "Leases that are held")
        self.listeners = self.gauge("listeners", "Listeners to notices")
        self.regions = self.gauge("regions", "Memory that clients share, by kind", "kind")
        self.region_bytes = self.gauge("region_bytes", "Bytes of memory that clients share", "kind")
        self.unshared = self.counter(
            "refused_regions", "Memory that clients offered and that was not taken", kind=(), reason=()
        )
        self.devices_failed = self.counter(
            "failed_devices", "GPUs that failed under the memory of clients that was open on them"
        )
        self.used = self.gauge("used_bytes", "Bytes in use, of each GPU by itself", "tier", "device")
        self.capacity = self.gauge("capacity_bytes", "Bytes at most, of each GPU by itself", "tier", "device")
        self.pinned = self.gauge(
            "host_pinned", "Share of host memory that a GPU copies from and to on its own"
        )
        self.tier_blocks = self.gauge("tier_blocks", "Blocks that can be read from each tier", "tier")
        self.blocks = self.gauge("blocks", "Blocks that can be served")
        self.waiting = self.gauge("waiting", "Requests that wait for room or a move")
        self.queue = self.gauge("lane_pending", "Calls on each lane", "lane")

    def counter(self, name: str, text: str, **labels: Iterable[object]) -> Counter:
        """Return a new counter; its name goes behind that of the program.

        Args:
            name: without the program's.
            text: what it counts.
            labels: the values that each label can have, as far as they are known. Their series are there from
                the start: of one that only comes with the first event, `rate` and `increase` miss that event.
        """
        made = Counter(f"kvtcd_{name}", text, labels, registry=self.registry)
        for values in product(*labels.values()) if labels else ():
            made.labels(*values)
        return made

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Return a new gauge; see `counter`."""
        return Gauge(f"kvtcd_{name}", text, labels, registry=self.registry)

    def moved(self, source: Place, target: Place, outcome: Reason | None) -> None:
        """Note the end of a move; `outcome` None is success."""
        self.moves.labels(_way(source, target), outcome or _MOVED).inc()

    def staged(self, span: Span) -> None:
        """Note the end of a stage."""
        self.stage_seconds.labels(span.pipeline, span.stage).observe(span.end - span.begin)

    def damage(self) -> dict[str, int]:
        """Return how many records failed their checks, by the fault; empty if none did."""
        samples = (sample for family in self.damaged.collect() for sample in family.samples)
        return {sample.labels["error"]: int(sample.value) for sample in samples if sample.value}

    def text(self) -> bytes:
        """Return everything in the Prometheus text format."""
        return generate_latest(self.registry)


def _way(source: Place, target: Place) -> str:
    return f"{source}-{target}"
