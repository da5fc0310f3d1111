"""What became of chunks, as vLLM's metrics."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

CHUNKS, UP = "vllm:kvtcd_chunks", "vllm:kvtcd_up"
CHUNKS_ARE = (
    "Chunks by what became of them: hit, miss, late, away, foreign (lookups); loaded, lost, overdue (loads); "
    "stored, duplicate, dropped, failed (stores)."
)
UP_IS = "1 while the kvtcd daemon can be used."


def stats_of(counts: Mapping[str, int], *, up: bool | None) -> OffloadingConnectorStats:
    """Return what happened since the last call; `up` is None where somebody else says it."""
    stats = OffloadingConnectorStats()
    if up is not None:
        stats.set_gauge(UP, float(up))
    for what, chunks in counts.items():
        if chunks:
            stats.increase_counter(CHUNKS, chunks, (what,))
    return stats
