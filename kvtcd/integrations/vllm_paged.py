"""The engine's own cache, as the connector finds it where the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import vllm

from kvtcd.core.errors import BadIdentity
from kvtcd.integrations.vllm_identity import ORDER, Attention, Group, Pages
from kvtcd.integrations.vllm_kernels import cpu_kernels, device_type, gpu_kernels


def paged(kv_caches: Mapping[str, Any], names: Iterable[str], blocks: int) -> dict[str, torch.Tensor]:
    """Return the caches of layers that have one of their own, ``[B, k, H, N, C]``: k pages to a block.

    Args:
        kv_caches: of vLLM, ``[B * k, H, N, C]``, by layer.
        names: of layers, in order.
        blocks: of the engine, B.

    Raises:
        BadIdentity: a cache is no tensor of pages.
    """
    caches: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name in names:
        cache = kv_caches.get(name)
        plain = isinstance(cache, torch.Tensor) and cache.dim() == 4 and cache.stride(-1) == 1
        if cache is None or not plain or cache.shape[0] % blocks:
            raise BadIdentity("layout", f"the cache of {name} is not plain pages [B, H, N, C]")
        if cache.data_ptr() not in seen:
            caches[name] = cache.unflatten(0, (blocks, -1))
        seen.add(cache.data_ptr())
    return caches


def pages_in(
    caches: Mapping[str, torch.Tensor],
    config: Any,  # noqa: ANN401 - a VllmConfig
    attention: Attention | None,
    chunk_tokens: int,
) -> Pages:
    """Describe the caches that `paged` returned, as chunks of so many tokens."""
    cached = config.cache_config.cache_dtype
    dtype = str(config.model_config.dtype if cached == "auto" else cached).removeprefix("torch.")
    per_block, tokens = (next(iter(caches.values())).shape[place] for place in (1, 3))
    alike = all((cache.shape[1], cache.shape[3]) == (per_block, tokens) for cache in caches.values())
    if device_type() == "cpu":
        kernels = cpu_kernels(dtype, tokens, attention)
    else:
        kernels = gpu_kernels(config, list(caches))
    block_bytes = sum(cache[0].numel() * cache.element_size() for cache in caches.values())
    return Pages(
        version=vllm.__version__,
        device=device_type(),
        kernels=kernels if alike else "",
        order=ORDER,  # whatever it is in the engine: pages are copied as it names their dimensions
        dtype=dtype,
        chunk_bytes=block_bytes * chunk_tokens // (per_block * tokens),
        parallel="canonical",
        groups={0: Group(0, chunk_tokens, tokens, tuple(caches))},
    )
