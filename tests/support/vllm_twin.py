"""The twin of vLLM's tiering interface: the names that the tier imports, with vLLM's own fields and defaults.

`tests/peers/test_vllm_interface.py` holds every one of them against the real package.
"""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pytest

BASE = "vllm.v1.kv_offload.base"
TIERING = "vllm.v1.kv_offload.tiering.base"
CONFIG = "vllm.v1.kv_offload.config"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class OffloadPolicy(Enum):
    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"


@dataclass
class RequestOffloadingContext:
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


@dataclass(frozen=True)
class OffloadingCounterMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadingGaugeMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    ends: dict[bytes, int] = field(default_factory=dict)

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self.ends.get(key)


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: ReqContext
    submit_time: float = 0.0


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager(ABC):
    medium = None

    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None) -> None:
        self._offloading_spec = offloading_spec
        self._primary_kv_view = primary_kv_view
        self._block_size_bytes = primary_kv_view.strides[0]
        self.tier_type = tier_type
        self.locality = None
        self._bp_detector = backpressure_detector

    @property
    def block_size_bytes(self) -> int:
        return self._block_size_bytes

    @abstractmethod
    def lookup(self, key, req_context): ...

    @abstractmethod
    def submit_store(self, job_metadata): ...

    @abstractmethod
    def submit_load(self, job_metadata): ...

    @abstractmethod
    def get_finished_jobs(self): ...

    def has_pending_work(self):
        return False

    @abstractmethod
    def on_new_request(self, req_context): ...

    def on_request_finished(self, req_context):  # noqa: ARG002, RUF100 - vLLM's name
        return

    def on_schedule_end(self, context):  # noqa: ARG002, RUF100 - vLLM's name
        return

    @abstractmethod
    def drain_jobs(self): ...

    def shutdown(self):
        return

    @classmethod
    def build_metric_definitions(cls, extra_config):  # noqa: ARG003 - vLLM's name
        return {}

    def get_stats(self):
        return None


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.counters: dict[tuple[str, tuple[str, ...]], float] = {}
        self.gauges: dict[str, float] = {}

    def increase_counter(self, counter_name, counter_increase_value=1, labelvalues=()) -> None:
        self.counters[counter_name, labelvalues] = counter_increase_value

    def set_gauge(self, gauge_name, gauge_value, labelvalues=()) -> None:  # noqa: ARG002 - vLLM's name
        self.gauges[gauge_name] = gauge_value


@dataclass(frozen=True)
class OffloadingGroupConfig:
    tokens_per_block: int
    layer_names: tuple[str, ...]
    group_id: int


@dataclass(frozen=True)
class OffloadingModelConfig:
    name: str
    dtype: str


@dataclass(frozen=True)
class OffloadingCacheConfig:
    tokens_per_hash: int
    blocks_per_chunk: int


@dataclass(frozen=True)
class OffloadingParallelConfig:
    rank: int = 0
    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1


@dataclass(frozen=True)
class OffloadingConfig:
    groups: tuple[OffloadingGroupConfig, ...]
    worker_kv_bytes_per_block: int
    model: OffloadingModelConfig
    cache: OffloadingCacheConfig
    parallel: OffloadingParallelConfig = OffloadingParallelConfig()
    canonical_layout: bool = False
    kv_cache_layout: str | None = "LBHNC"


class OffloadingSpec:
    def __init__(self, config) -> None:
        self.config = config
        self.replicated_layout = False


def spec(
    model: str,
    *,
    layers: int = 3,
    block: int = 32,
    per_chunk: int = 2,
    token_bytes: int = 3 * 2 * 2 * 8 * 4,
    dtype: str = "float32",
    groups: int = 1,
    **rest: Any,
) -> OffloadingSpec:
    """An engine whose cache has the shape of `support.models.tiny_llama_config`."""
    names = tuple(f"model.layers.{i}.self_attn.attn" for i in range(layers))
    return OffloadingSpec(
        OffloadingConfig(
            groups=tuple(OffloadingGroupConfig(block, names, number) for number in range(groups)),
            worker_kv_bytes_per_block=token_bytes * block,
            model=OffloadingModelConfig(model, dtype),
            cache=OffloadingCacheConfig(block, per_chunk),
            **rest,
        )
    )


def rows(count: int, nbytes: int) -> np.ndarray:
    """A primary tier: rows of whole pages of memory, as vLLM has them."""
    return np.zeros((count, -(-nbytes // 4096) * 4096), np.int8)


def install(patch: pytest.MonkeyPatch, isa: str = "vec") -> Any:
    """Put the twin where vLLM would be; return the tier's module, loaded on top of it."""
    platform = types.SimpleNamespace(device_type="cpu")
    contents = {
        "vllm": {"__version__": "0.0.twin"},
        METRICS: {"OffloadingConnectorStats": OffloadingConnectorStats},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils.torch_utils": {"STR_DTYPE_TO_TORCH_DTYPE": {"float32": "f32", "bfloat16": "bf16"}},
        BASE: PUBLIC,
        TIERING: PUBLIC,
        "vllm.v1.attention.backends.cpu_attn": {"_get_attn_isa": lambda *_: isa},
    }
    for name, names in contents.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            package = ".".join(parts[:depth])
            if package not in sys.modules:
                patch.setitem(sys.modules, package, types.ModuleType(package))
        vars(sys.modules[name]).update(names)
    ours = [f"kvtcd.integrations.vllm_{name}" for name in ("tier", "kernels", "metrics")]
    for name in ours:
        patch.delitem(sys.modules, name, raising=False)
    module = import_module("kvtcd.integrations.vllm_tier")
    for name in ours:
        patch.delitem(sys.modules, name)  # the next engine loads its own
    return module


PUBLIC = {name: value for name, value in globals().items() if isinstance(value, type)}
"""Every class of the twin by its name, which is vLLM's."""
