"""What only vLLM and transformers know of a model's cache: heads, RoPE, and which kernels order its pages."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from transformers import AutoConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

from kvtcd.integrations.model_files import Settings
from kvtcd.integrations.vllm_identity import Attention, attention_of


def device_type() -> str:
    """Return the type of vLLM's device, e.g. ``cpu`` or ``cuda``."""
    return str(current_platform.device_type)


def attention_in(settings: Settings) -> Attention | None:
    """Read the model's configuration as transformers does; None for one that it does not know by itself."""
    try:
        return attention_of(AutoConfig.from_pretrained(settings.folder, local_files_only=True))
    except (OSError, ValueError, KeyError):
        return None


def cpu_kernels(dtype: str, block: int, attention: Attention | None) -> str:
    """Name the CPU kernels that order a page's inside; empty where vLLM does not say.

    Args:
        dtype: of the cache.
        block: tokens of a page.
        attention: of the model.
    """
    if device_type() != "cpu" or attention is None:
        return ""
    with suppress(ImportError, AttributeError, KeyError, TypeError, NotImplementedError):
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - only on a CPU

        return str(_get_attn_isa(STR_DTYPE_TO_TORCH_DTYPE[dtype], block, attention.head_dim))
    return ""


def gpu_kernels(config: Any, layers: list[str]) -> str:  # noqa: ANN401 - a VllmConfig
    """Name the attention backend of layers, e.g. ``FLASH_ATTN``; empty where they have several."""
    from vllm.distributed.kv_transfer.kv_connector.utils import (  # noqa: PLC0415 - only where there is a GPU
        get_current_attn_backends,
    )

    backends = {str(backend.get_name()) for backend in get_current_attn_backends(config, layers)}
    return backends.pop() if len(backends) == 1 else ""
