"""SGLang's host pools and factory, on a machine without CUDA: modules that only kernels need are stubs."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

STUBS = ("torchvision", "sgl_kernel", "flashinfer", "torch_memory_saver", "decord")
LAYERS, HEADS, HEAD_DIM, PAGE, TOKENS = 3, 2, 8, 16, 256
LATENT, ROTATED = 12, 4
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        known = fullname.split(".", maxsplit=1)[0] in STUBS
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__, module.__file__ = [], spec, spec.name, "stub"
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


@contextmanager
def installed() -> Iterator[SimpleNamespace]:
    """Import what the tests need of SGLang; leave nothing of it behind, for others look for these modules."""
    import_module("transformers.models.auto.processing_auto")  # looks for the real torchvision
    before, finder = set(sys.modules), _Finder()
    sys.meta_path.insert(0, finder)
    try:
        cache = "sglang.srt.mem_cache"
        # It wants 10 GB of memory left over, whatever it takes.
        import_module(f"{cache}.pool_host.base").HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
        yield SimpleNamespace(
            storage=import_module(f"{cache}.hicache_storage"),
            factory=import_module(f"{cache}.storage.backend_factory").StorageBackendFactory,
            pools=import_module(f"{cache}.memory_pool"),
            mha=import_module(f"{cache}.pool_host.mha"),
            mla=import_module(f"{cache}.pool_host.mla"),
            hash=import_module(f"{cache}.utils").get_hash_str,
        )
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.split(".")[0] in (*STUBS, "sglang") or name == "kvtcd.integrations.sglang_hicache":
                del sys.modules[name]


def keys_and_values(
    sglang: Any,
    layout: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int = LAYERS,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    page: int = PAGE,
    tokens: int = TOKENS,
    seed: int | None = None,
) -> Any:
    """A host pool of keys and values, random or empty."""
    device = sglang.pools.MHATokenToKVPool(tokens, page, dtype, heads, head_dim, layers, "cpu", False)
    host = sglang.mha.MHATokenToKVPoolHost(
        device._mha_buffer_info(), 2.0, 0, page, layout, False, "cpu",
        device_capacity_tokens=tokens, start_layer=0, end_layer=layers,
    )  # fmt: skip
    return _filled(host, seed)


def latent(sglang: Any, layout: str, *, dtype: torch.dtype = torch.bfloat16, seed: int | None = None) -> Any:
    """A host pool of an MLA model."""
    device = sglang.pools.MLATokenToKVPool(TOKENS, PAGE, dtype, LATENT, ROTATED, LAYERS, "cpu", False)
    host = sglang.mla.MLATokenToKVPoolHost(
        device._mla_buffer_info(), 2.0, 0, PAGE, layout, False, "cpu",
        device_capacity_tokens=TOKENS, start_layer=0, end_layer=LAYERS, target_layer_num=LAYERS,
    )  # fmt: skip
    return _filled(host, seed)


def _filled(host: Any, seed: int | None) -> Any:
    raw = host.kv_buffer.view(torch.uint8)
    if seed is None:
        raw.zero_()
    else:
        draw = torch.Generator().manual_seed(seed)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=draw, dtype=torch.uint8))
    return host


def element(host: Any, stream: int, token: int, layer: int) -> bytes:
    """Return keys (0) or values (1) of one token and layer, ``[H, D]``, by the documented place of each."""
    kv = host.kv_buffer[stream]
    page, within = divmod(token, host.page_size)
    match host.layout:
        case "layer_first":
            held = kv[layer, token]
        case "page_first":
            held = kv[token, layer]
        case "page_first_direct":
            held = kv[page, layer, within]
        case _:
            held = torch.stack([kv[page, head, within, layer] for head in range(kv.shape[1])])
    return held.contiguous().view(torch.uint8).numpy().tobytes()


def block(host: Any, first: int) -> bytes:
    """Return the page that begins at a token as a block: keys ``[L, T, H, D]``, then values."""
    tokens = range(first, first + host.page_size)
    return b"".join(
        element(host, stream, token, layer)
        for stream in (0, 1)
        for layer in range(host.layer_num)
        for token in tokens
    )


def latent_block(host: Any, first: int) -> bytes:
    """Return the page of an MLA pool that begins at a token: latent vectors ``[L, T, 1, D]``, then keys."""
    rows = {}
    for layer in range(host.layer_num):
        for token in range(first, first + host.page_size):
            page, within = divmod(token, host.page_size)
            held = {
                "layer_first": lambda: host.kv_buffer[layer, token, 0],  # noqa: B023 - called right here
                "page_first": lambda: host.kv_buffer[token, layer, 0],  # noqa: B023 - the same
                "page_first_direct": lambda: host.kv_buffer[page, layer, within, 0],  # noqa: B023 - the same
            }[host.layout]()
            rows[layer, token] = held.contiguous().view(torch.uint8).numpy().tobytes()
    cut = LATENT * host.dtype.itemsize
    return b"".join(row[:cut] for row in rows.values()) + b"".join(row[cut:] for row in rows.values())


def indices(*pages: int, page: int = PAGE) -> torch.Tensor:
    """Return the tokens of pages of a pool."""
    return torch.cat([torch.arange(number * page, (number + 1) * page) for number in pages])
