"""vLLM's secondary tier: chunks of the CPU tier go to kvtcd, and come back in another life of the engine.

Set up in ``--kv-transfer-config`` under ``secondary_tiers`` as
``{"type": "KvtcdTier", "module_path": "kvtcd.integrations.vllm_tier", "socket": "/run/kvtcd/kvtcd.sock"}``.
Runs inside vLLM's scheduler: nothing here waits for the daemon but `drain_jobs` and `shutdown`, whose
contract it is, and neither numba nor anything else is loaded that vLLM has not loaded itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtcd.client import Client
from kvtcd.core.keys import EngineKey
from kvtcd.integrations.model_files import FileWatch, Settings
from kvtcd.integrations.options import read
from kvtcd.integrations.vllm_daemon import Daemon
from kvtcd.integrations.vllm_finder import Finder
from kvtcd.integrations.vllm_identity import identities, pages_of
from kvtcd.integrations.vllm_jobs import Chains, Chunk, Job, is_ours
from kvtcd.integrations.vllm_kernels import attention_in, cpu_kernels, device_type
from kvtcd.integrations.vllm_lookups import Answer
from kvtcd.integrations.vllm_metrics import CHUNKS, CHUNKS_ARE, UP, UP_IS, stats_of
from kvtcd.integrations.vllm_model import model_of
from kvtcd.integrations.vllm_steps import TierOptions
from kvtcd.integrations.vllm_threads import Carriers

_RESULTS = {Answer.HIT: LookupResult.HIT, Answer.MISS: LookupResult.MISS, Answer.RETRY: LookupResult.RETRY}


class KvtcdTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """A tier of vLLM's offloading that keeps chunks in a kvtcd daemon.

    Args:
        offloading_spec, primary_kv_view, tier_type, backpressure_detector: by vLLM.
        locality: vLLM hands it over where it is set; the daemon is on this machine whatever it says.
        options: `TierOptions`, from the JSON of the tier.

    Raises:
        BadRequest: the JSON of the tier does not say enough, or something impossible.
        Unavailable: a weight or adapter file is missing or cannot be read.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,  # noqa: ANN401 - vLLM's
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,  # noqa: ANN401 - vLLM's
        *,
        locality: str | None = None,
        **options: Any,  # noqa: ANN401 - JSON
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality else Locality.LOCAL
        served = str(offloading_spec.config.model.name)
        given = read(TierOptions, options)
        seconds = given.timeout_seconds
        settings = Settings.of(
            served,
            weights=given.weights,
            adapters=given.adapters,
            variant=given.variant,
            full_digest=given.full_digest,
        )
        unchanged = FileWatch("an adapter", settings.adapters)  # from before their digest
        attention = attention_in(settings)
        config = offloading_spec.config
        pages = pages_of(
            offloading_spec,
            version=vllm.__version__,
            device=device_type(),
            kernels=cpu_kernels(config.model.dtype, config.groups[0].tokens_per_block, attention),
        )
        self._identities = identities(pages, model_of(settings, attention))
        self._rows = primary_kv_view.cast("B")
        self._row_bytes = pages.chunk_bytes
        self._chains = Chains({number: group.tokens for number, group in pages.groups.items()})

        def connect(on_lost: Callable[[], None]) -> Daemon:
            return Daemon(
                Client(given.socket, timeout=seconds),
                self._identities,
                salt=given.salt,
                seconds=seconds,
                valid=unchanged,
                on_lost=on_lost,
            )

        self._finder = Finder(connect, self._identities, given.retry_seconds)
        self._carriers = Carriers(self._finder.daemon, self._row)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:  # noqa: ANN401 - vLLM's
        """Say whether a chunk is there: RETRY until the daemon has answered, for a while."""
        if is_ours(key, self._identities):
            end = req_context.get_offload_key_position(key)
            self._chains.seen(req_context.req_id, EngineKey(key), end)
        return _RESULTS[self._finder.ask(key, req_context.req_id)]

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:  # noqa: ANN401, ARG002 - vLLM's
        """Want every chunk once, as soon as it is computed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:  # noqa: ANN401 - vLLM's
        """Forget what only this request asked for."""
        self._finder.finished(req_context.req_id)
        self._chains.finished(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ANN401, ARG002 - vLLM's
        """Send this step's lookups."""
        self._finder.send()

    def submit_store(self, job_metadata: Any) -> None:  # noqa: ANN401 - vLLM's
        """Begin to store rows of the primary tier."""
        self._carriers.begin(self._job(job_metadata, is_load=False))

    def submit_load(self, job_metadata: Any) -> None:  # noqa: ANN401 - vLLM's
        """Begin to fill rows of the primary tier."""
        self._carriers.begin(self._job(job_metadata, is_load=True))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return a result for each job that ended since the last call."""
        results = []
        for ended in self._carriers.jobs.take():
            moved = ended.moved
            if ended.job.is_load:
                self._finder.lost({chunk.key for chunk in ended.job.chunks} - set(moved))
            else:
                self._finder.stored(moved)
            results.append(
                JobResult(
                    job_id=ended.job.number,
                    success=ended.complete,
                    successful_keys=moved if ended.job.is_load and moved and not ended.complete else None,
                    transfer_time=ended.seconds,
                    transfer_bytes=len(moved) * self._row_bytes,
                )
            )
        return results

    def drain_jobs(self) -> None:
        """Return once no transfer touches the primary tier."""
        self._carriers.jobs.drain()

    def shutdown(self) -> None:
        """Let transfers end, stop the threads and let go of the primary tier."""
        self._carriers.close()
        self._finder.close()
        self._rows.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003 - vLLM's
        """Describe what `get_stats` reports."""
        return {
            CHUNKS: OffloadingCounterMetadata(CHUNKS_ARE, ("what",)),
            UP: OffloadingGaugeMetadata(UP_IS),
        }

    def get_stats(self) -> OffloadingConnectorStats:
        """Return what was counted since the last call."""
        counts = self._carriers.take_counts() + self._finder.take_counts()
        return stats_of(counts, up=self._finder.daemon.link.up)

    def _job(self, asked: Any, *, is_load: bool) -> Job:  # noqa: ANN401 - vLLM's
        request, position = asked.req_context.req_id, asked.req_context.get_offload_key_position
        chunks: list[Chunk] = []
        for key, row in zip(asked.keys, asked.chunk_ids, strict=True):
            if is_ours(key, self._identities):
                end = position(key)
                self._chains.seen(request, EngineKey(key), end)
                chunks.append(self._chains.chunk(request, EngineKey(key), end, int(row)))
        return Job(asked.job_id, tuple(chunks), is_load, whole=len(chunks) == len(asked.keys))

    def _row(self, number: int) -> memoryview:
        start = number * self.block_size_bytes
        return self._rows[start : start + self._row_bytes]
