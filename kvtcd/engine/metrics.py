"""What is counted: a listener to the same events and actions that drive the daemon."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvtcd.core.events import Reason
from kvtcd.core.place import Place
from kvtcd.engine.timeline import Span

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics:
    """Counters and gauges of one daemon, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.puts = self._counter("puts", "Blocks offered, by outcome", "outcome")
        self.gets = self._counter("gets", "Blocks asked for, by where they were found", "found")
        self.moves = self._counter("moves", "Moves ended, by direction and outcome", "direction", "outcome")
        self.lost = self._counter("lost", "Blocks that left the cache, by reason", "reason")
        self.dropped = self._counter(
            "dropped_copies", "Copies that were let go, by place and reason", "place", "reason"
        )
        self.packed = self._counter("packed_blocks", "Blocks packed, by the codec used", "codec")
        self.lossless_because = self._counter(
            "lossless_fallbacks", "Blocks stored finer, or losslessly, than the policy asks", "reason"
        )
        self.unprofiled = self._counter(
            "unprofiled_namespaces", "Namespaces stored losslessly although their policy asks for more"
        )
        self.drifts = self._counter(
            "drifts", "Times that blocks of a namespace became unlike calibration, or like it", "state"
        )
        self.drifting = self._of_namespaces("drifting", "Whether blocks are unlike calibration")
        self.watched = self._of_namespaces("watched_blocks", "Blocks that were compared with calibration")
        self.drift = Gauge(
            "kvtcd_namespace_drift",
            "Of the last sampled blocks, over calibration: energy, what its basis misses; kurtosis",
            ["namespace", "stream", "figure"],
            registry=self.registry,
        )
        self.raw_bytes = self._counter("packed_raw_bytes", "Raw bytes of the blocks packed")
        self.blob_bytes = self._counter("packed_blob_bytes", "Bytes of the blobs they became")
        self.warmed = self._counter("warmed_blocks", "Blocks brought up after a start because they were hot")
        self.damaged = self._counter("damaged_records", "Records refused by their checks", "error")
        self.foreign = self._counter("foreign_records", "Records on disk that belong to nothing known")
        self.internal_errors = self._counter(
            "internal_errors", "Unexpected failures in the background", "where"
        )
        self.disk_full = self._counter("disk_full", "Blocks that a disk refused because it was full")
        self.withheld = Gauge(
            "kvtcd_disk_withheld_bytes",
            "Bytes of the disk tier that full disks do not hold, and that are not counted on until they do",
            registry=self.registry,
        )
        self.quarantined = self._counter("quarantined_environments", "Disk environments set aside as damaged")
        self.stage_seconds = Histogram(
            "kvtcd_stage_seconds", "Time of one stage of one block's way up or down", ["pipeline", "stage"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.loop_lag = Histogram(
            "kvtcd_loop_lag_seconds", "How late the event loop was with what was due, looked at each second",
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.oldest_reader = Gauge(
            "kvtcd_oldest_reader_seconds", "For how long the oldest reader has held its block in host memory",
            registry=self.registry,
        )  # fmt: skip
        self.notices = self._counter("notices", "Notices to listeners, by kind", "what")
        self.overflows = self._counter("notice_overflows", "Times that a listener was too slow")
        self.kv_events = self._counter("kv_events", "KV events that were published, by type", "type")
        self.untold = self._counter(
            "kv_events_untold", "Notices that are no KV event, such as copies on a GPU"
        )
        self.recorded = self._counter("recorded_lines", "Lines of the recording that were written")
        self.unrecorded = self._counter("unrecorded_lines", "Lines of the recording that were left out")
        self.certificate_ends = Gauge(
            "kvtcd_certificate_ends_seconds",
            "Unix time at which the certificate of TCP ends, 0 without TLS",
            registry=self.registry,
        )
        self.leases = Gauge("kvtcd_leases", "Leases that are held", registry=self.registry)
        self.listeners = Gauge("kvtcd_listeners", "Listeners to notices", registry=self.registry)
        self.regions = Gauge(
            "kvtcd_regions", "Memory that clients share, by kind", ["kind"], registry=self.registry
        )
        self.region_bytes = Gauge(
            "kvtcd_region_bytes", "Bytes of memory that clients share", ["kind"], registry=self.registry
        )
        self.unshared = self._counter(
            "refused_regions", "Memory that clients offered and that was not taken", "kind", "reason"
        )
        self.devices_failed = self._counter(
            "failed_devices", "GPUs that failed under the memory of clients that was open on them"
        )
        self.used = Gauge("kvtcd_used_bytes", "Bytes in use", ["tier"], registry=self.registry)
        self.capacity = Gauge("kvtcd_capacity_bytes", "Bytes at most", ["tier"], registry=self.registry)
        self.pinned = Gauge(
            "kvtcd_host_pinned",
            "Whether a GPU copies from and to host memory on its own",
            registry=self.registry,
        )
        self.tier_blocks = Gauge(
            "kvtcd_tier_blocks", "Blocks that can be read from each tier", ["tier"], registry=self.registry
        )
        self.blocks = Gauge("kvtcd_blocks", "Blocks that can be served", registry=self.registry)
        self.waiting = Gauge("kvtcd_waiting", "Requests that wait for room or a move", registry=self.registry)
        self.queue = Gauge("kvtcd_lane_pending", "Calls on each lane", ["lane"], registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvtcd_{name}", text, labels, registry=self.registry)

    def _of_namespaces(self, name: str, text: str) -> Gauge:
        return Gauge(f"kvtcd_namespace_{name}", text, ["namespace"], registry=self.registry)

    def moved(self, source: Place, target: Place, outcome: Reason | None) -> None:
        """Note the end of a move; `outcome` None is success."""
        self.moves.labels(f"{source}-{target}", outcome or "moved").inc()

    def staged(self, span: Span) -> None:
        """Note the end of a stage."""
        self.stage_seconds.labels(span.pipeline, span.stage).observe(span.end - span.begin)

    def text(self) -> bytes:
        """Return everything in the Prometheus text format."""
        return generate_latest(self.registry)
