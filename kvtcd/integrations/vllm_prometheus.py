"""The metrics of the connector on vLLM's own `/metrics`."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvtcd.integrations.vllm_metrics import CHUNKS, CHUNKS_ARE, UP, UP_IS


class KvtcdMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Counts chunks by what became of them, and says whether the daemon is there.

    Args:
        vllm_config, metric_types, labelnames, per_engine_labelvalues: by vLLM.
    """

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            CHUNKS: metric_types[Counter](
                name=CHUNKS, documentation=CHUNKS_ARE, labelnames=[*labelnames, "what"]
            ),
            UP: metric_types[Gauge](name=UP, documentation=UP_IS, labelnames=labelnames),
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Show what was counted."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data.get("data", {}).items():
            for labels, value in values.items():
                metric = self._metrics[name].labels(*engine, *labels)
                if name == UP:
                    metric.set(value)
                else:
                    metric.inc(value)
