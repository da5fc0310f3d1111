"""vLLM's connector: blocks of the engine's own cache go to kvtcd, and come back a layer at a time.

Set up in ``--kv-transfer-config`` as ``{"kv_connector": "KvtcdConnector", "kv_role": "kv_both",
"kv_connector_module_path": "kvtcd.integrations.vllm_connector", "kv_load_failure_policy": "recompute"}``.
vLLM makes one half in its scheduler (`vllm_planner`), and one where the model runs (`vllm_worker`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtcd.client import Client
from kvtcd.core.errors import BadIdentity, BadRequest
from kvtcd.core.identity import Identity
from kvtcd.integrations.model_files import FileWatch, Settings
from kvtcd.integrations.options import read
from kvtcd.integrations.vllm_daemon import Daemon
from kvtcd.integrations.vllm_finder import Finder
from kvtcd.integrations.vllm_identity import identities
from kvtcd.integrations.vllm_kernels import attention_in
from kvtcd.integrations.vllm_metrics import stats_of
from kvtcd.integrations.vllm_model import model_of
from kvtcd.integrations.vllm_paged import paged, pages_in
from kvtcd.integrations.vllm_planner import Planner
from kvtcd.integrations.vllm_prometheus import KvtcdMetrics
from kvtcd.integrations.vllm_staging import Staging, slots_in
from kvtcd.integrations.vllm_steps import Cache, Options, Sent, Step
from kvtcd.integrations.vllm_threads import Carriers, Lookout
from kvtcd.integrations.vllm_worker import Worker

T = TypeVar("T")
_LOG = logging.getLogger("vllm.kvtcd")  # below the logger that vLLM sets up


@dataclass
class KvtcdMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """A step, on its way from the scheduler to the worker."""

    step: Step


@dataclass
class KvtcdSent(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """What the worker says behind a step, on its way to the scheduler."""

    sent: Sent

    def aggregate(self, other: KvtcdSent) -> KvtcdSent:
        """Return what two workers say; there is but one."""
        return KvtcdSent(self.sent | other.sent)


@dataclass
class KvtcdHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # as above
    """What the worker says at start, on its way to the scheduler."""

    cache: Cache


class KvtcdConnector(KVConnectorBase_V1):  # type: ignore[misc]  # as above
    """A connector for one worker and one cache group that keeps chunks in a kvtcd daemon.

    Args:
        vllm_config, role, kv_cache_config: by vLLM; ``kv_connector_extra_config`` holds `Options`.

    Raises:
        BadRequest: the options do not say enough, or something impossible.
        BadIdentity: the engine has several workers or cache groups.
        Unavailable: a weight or adapter file is missing or cannot be read.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = read(Options, self._kv_transfer_config.kv_connector_extra_config)
        self._settings = Settings.of(
            str(vllm_config.model_config.model),
            weights=self._options.weights,
            adapters=self._options.adapters,
            variant=self._options.variant,
            full_digest=self._options.full_digest,
        )
        self._unchanged = FileWatch("an adapter", self._settings.adapters)  # from before their digest
        if vllm_config.parallel_config.world_size != 1:
            raise BadIdentity("parallel", "the connector serves one worker; several are for the tier")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise BadIdentity("layout", "the connector serves one cache group; several are for the tier")
        self._block = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        if self._options.chunk_tokens % self._block:
            raise BadRequest("chunk_tokens", f"is no multiple of the engine's block of {self._block} tokens")
        self._planner: Planner | None = None
        self._finder: Finder | None = None
        self._worker: Worker | None = None
        self._lookout: Lookout | None = None
        self._cache: Cache | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a store has to succeed: no, what is not stored is computed again."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003 - vLLM's
        """Say that layers ask for their pages, which a graph of the whole model would skip."""
        return True

    # The worker half.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Begin to serve the engine's cache."""
        client, options, cached = self._client(), self._options, self._kv_cache_config
        caches = paged(kv_caches, cached.kv_cache_groups[0].layer_names, int(cached.num_blocks))
        attention = attention_in(self._settings)
        pages = pages_in(caches, self._vllm_config, attention, options.chunk_tokens)
        served = identities(pages, model_of(self._settings, attention))
        slots = slots_in(options.buffer_bytes, pages.chunk_bytes)
        blocks = options.chunk_tokens // self._block

        def staging() -> Staging:
            return Staging(caches, blocks, client.region(slots * pages.chunk_bytes))

        self._lookout = lookout = Lookout(self._daemon(client, served))
        self._worker = Worker(
            staging,
            lambda row: Carriers(lookout.daemon, row),
            tokens=options.chunk_tokens,
            seconds=options.timeout_seconds,
        )
        self._cache = Cache(served[0].to_json(), slots // 2)

    def get_handshake_metadata(self) -> KvtcdHandshake | None:
        """Return what the scheduler half has to know of the cache."""
        return KvtcdHandshake(self._cache) if self._cache else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002 - vLLM's
        """Begin to load what this step needs."""
        metadata = self._get_connector_metadata()
        self._guarded(lambda worker: worker.begin(metadata.step))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return once a layer's pages hold what was to be loaded, or are known not to."""
        self._guarded(lambda worker: worker.layer(layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        """Do nothing: a chunk holds all layers, and its pages are taken at the end of the step."""

    def wait_for_save(self) -> None:
        """Take the pages of chunks that are complete now; they are sent later."""
        self._guarded(Worker.end)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002 - vLLM's
        """Name finished requests whose blocks are not needed any more."""
        return set(self._get_connector_metadata().step.released) or None, None

    def build_connector_worker_meta(self) -> KvtcdSent | None:
        """Return which chunks are not on their way to the daemon any more."""
        sent = self._worker.take_sent() if self._worker else Sent()
        return KvtcdSent(sent) if sent.keys else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that were to be loaded and were not."""
        return self._worker.take_failed() if self._worker else set()

    # The scheduler half.

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KvtcdHandshake]) -> None:
        """Begin to look for chunks, now that the worker has said whose they are."""
        cache = metadata[0].cache
        served = {0: Identity.from_json(cache.identity)}
        lift = self._options.retry_seconds / 2
        connect = self._daemon(self._client(), served, lift=lift)
        self._finder = Finder(connect, served, self._options.retry_seconds)
        hashed = int(self._kv_cache_config.hash_block_size or self._block)
        self._planner = Planner(
            self._finder,
            chunk=self._options.chunk_tokens,
            block=self._block,
            hashed=hashed,
            slots=cache.load_slots,
        )

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
        """Begin to look for a request's chunks."""
        self._planned(lambda planner: planner.arrived(request), None)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401 - vLLM's
        """Return how many tokens can be loaded, None while that is not known; they load within the step."""
        none: int | None = 0
        return self._planned(lambda planner: planner.matched(request, num_computed_tokens), none), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401, ARG002 - vLLM's
        """Note what the next step has to load."""
        if self._planner:
            self._planner.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvtcdMetadata:  # noqa: ANN401 - vLLM's
        """Plan a step."""
        return KvtcdMetadata(self._planned(lambda planner: planner.step(scheduler_output), Step()))

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401 - vLLM's
        """Learn what could not be loaded."""
        blocks = connector_output.invalid_block_ids or ()
        self._planned(lambda planner: planner.failed(blocks), None)
        if told := connector_output.kv_connector_worker_meta:
            self._planned(lambda planner: planner.sent(told.sent), None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401 - vLLM's
        """Forget a request, and say whether its blocks are needed until `get_finished` names it."""
        held = self._planned(lambda planner: planner.finished(request.request_id, block_ids), otherwise=False)
        return held, None

    def reset_cache(self) -> bool | None:
        """Ask for everything anew; what the daemon has stays there."""
        if self._finder:
            self._finder.forget()
        return True

    # Both.

    def get_kv_connector_stats(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call."""
        if self._worker:
            return stats_of(self._worker.take_counts(), up=None)
        return stats_of(self._finder.take_counts(), up=self._finder.daemon.link.up) if self._finder else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadingConnectorStats:
        """Build what `get_kv_connector_stats` returned from its form on the wire."""
        return OffloadingConnectorStats(data=data) if data else OffloadingConnectorStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,  # noqa: ANN401 - vLLM's
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvtcdMetrics:
        """Make the metrics that show it."""
        return KvtcdMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Let transfers end, and stop the threads."""
        for half in (self._worker, self._lookout, self._finder):
            if half:
                half.close()
        self._worker = self._lookout = self._finder = self._planner = None

    def _guarded(self, act: Callable[[Worker], None]) -> None:
        """Let the engine live on whatever is wrong here: blocks that were to be loaded are computed."""
        if self._worker is None:
            return
        try:
            act(self._worker)
        except Exception:  # noqa: BLE001 - the log has it
            _LOG.exception("kvtcd: a step failed")
            self._worker.give_up()

    def _planned(self, act: Callable[[Planner], T], otherwise: T) -> T:
        """Let the engine live on here too, unless blocks are promised that nobody would load."""
        if self._planner is None:
            return otherwise
        try:
            return act(self._planner)
        except Exception:
            if self._planner.promised:
                raise
            _LOG.exception("kvtcd: planning failed")
            return otherwise

    def _client(self) -> Client:
        return Client(self._options.socket, timeout=self._options.timeout_seconds)

    def _daemon(
        self, client: Client, served: Mapping[int, Identity], *, lift: float = 0.0
    ) -> Callable[[Callable[[], None]], Daemon]:
        return lambda on_lost: Daemon(
            client,
            served,
            salt=self._options.salt,
            seconds=self._options.timeout_seconds,
            valid=self._unchanged,
            on_lost=on_lost,
            lift=lift,
        )
