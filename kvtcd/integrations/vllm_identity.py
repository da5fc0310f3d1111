"""Whose pages a vLLM engine hands over: identities, from what it tells a tier and what it keeps to itself.

vLLM tells a tier names, sizes and parallelism, but neither heads nor RoPE, and nothing of weights, adapters
or arguments that override the model's configuration. Those come from the model's folder and from the tier's
JSON. What cannot be seen from either has to be named there as `variant`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtcd.core.errors import BadIdentity, KvtcdError
from kvtcd.core.identity import Identity, Rope
from kvtcd.core.kv_events import HASH_BYTES, VLLM_KEYS
from kvtcd.core.layout import Dtype, Layout, canonical_json, kv_layout
from kvtcd.integrations.opaque import opaque
from kvtcd.integrations.transformers_identity import rope_of

ENGINE = "vllm"
GROUP_BYTES = 4
KEY_BYTES = HASH_BYTES + GROUP_BYTES

VEC = "vllm-cpu-vec"
"""Pages of vLLM's plain CPU kernels: layers, blocks of the chunk, heads, then keys ``[D, N]`` and values
``[N, D]`` of the N tokens of a block. The name ends with N."""
FLASH = "vllm-flash"
"""Pages of vLLM's FlashAttention and Triton kernels: layers, blocks of the chunk, heads, the N tokens of a
block, and of each its keys, then its values. The name ends with N."""
ORDER = "LBHNC"
"""Layers, blocks, heads, tokens, content: the order of known pages."""
_KNOWN = {
    ("cpu", "vec", ORDER): VEC,
    ("cuda", "FLASH_ATTN", ORDER): FLASH,
    ("cuda", "TRITON_ATTN", ORDER): FLASH,
}
"""Page formats by device, kernels and order."""


@dataclass(frozen=True, slots=True)
class Group:
    """A cache group: layers that share block tables. `tokens` are of a chunk, `block` of an engine block."""

    number: int
    tokens: int
    block: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What an engine says of the pages it hands over.

    Attributes:
        version: of vLLM.
        device: type of its device, e.g. ``cpu`` or ``cuda``.
        kernels: what decides how the inside of a page is ordered, as far as it is known; else empty.
        order: of the bytes, in vLLM's words, e.g. ``LBHNC``.
        dtype: of the cache.
        chunk_bytes: bytes of a chunk, over all layers and workers.
        parallel: ``canonical`` for one worker.
        groups: by their number.
    """

    version: str
    device: str
    kernels: str
    order: str
    dtype: str
    chunk_bytes: int
    parallel: str
    groups: Mapping[int, Group]


@dataclass(frozen=True, slots=True)
class Attention:
    """What a model's configuration says of its keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    rope: Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model behind the pages.

    Attributes:
        name: for people, part of the identity all the same.
        weights: digest of its weight files, 64 hex digits.
        settings: digest of all else that decides what the pages hold, see `model_files`.
        adapter: digest of the adapters that are served, or ``none``.
        attention: None where the configuration has nothing that is known here, or does not hold.
    """

    name: str
    weights: str
    settings: str
    adapter: str
    attention: Attention | None


def pages_of(spec: Any, *, version: str, device: str, kernels: str) -> Pages:  # noqa: ANN401 - a class of vLLM
    """Read an `OffloadingSpec` of vLLM: chunks as its tiers have them.

    Raises:
        BadIdentity: it has no cache group or no bytes.
    """
    config = spec.config
    parallel = config.parallel
    per_chunk = int(config.cache.blocks_per_chunk)
    copies = 1 if spec.replicated_layout else int(parallel.world_size)
    nbytes = int(config.worker_kv_bytes_per_block) * copies * per_chunk
    groups = {
        int(group.group_id): Group(
            int(group.group_id),
            int(group.tokens_per_block) * per_chunk,
            int(group.tokens_per_block),
            tuple(group.layer_names),
        )
        for group in config.groups
    }
    if not groups or nbytes <= 0:
        raise BadIdentity("layout", "the engine has no cache that could be offloaded")
    sizes = [(name, int(getattr(parallel, f"{name}_size"))) for name in ("tp", "pp", "pcp", "dcp")]
    many = copies > 1 or any(size > 1 for _, size in sizes) or bool(config.canonical_layout)
    words = [f"{name}{size}" for name, size in sizes] + [f"copies{copies}"]
    words += ["canonical-pages"] if config.canonical_layout else []
    return Pages(
        version=version,
        device=device,
        kernels=kernels,
        order=str(config.kv_cache_layout or "-"),
        dtype=str(config.model.dtype),
        chunk_bytes=nbytes,
        parallel="-".join(words) if many else "canonical",
        groups=groups,
    )


def identities(pages: Pages, model: Model) -> dict[int, Identity]:
    """Return the identity of each cache group's chunks, by its number.

    Raises:
        BadIdentity: the pages do not divide into tokens, or a value is out of range.
    """
    return {number: _identity(pages, group, model) for number, group in pages.groups.items()}


def _identity(pages: Pages, group: Group, model: Model) -> Identity:
    mapped = _mapped(pages, group, model.attention)
    layout, scales = mapped, "none"
    if layout is None:
        layers = len(group.layers) or 1
        layout, scales = opaque(pages.chunk_bytes, group.tokens, [pages.dtype], layers=layers)
    return Identity(
        engine=f"{ENGINE} {model.settings}",
        hash_scheme=VLLM_KEYS,
        model=model.name,
        weights=model.weights,
        layout=layout,
        rope=model.attention.rope if mapped and model.attention else None,
        adapter=model.adapter,
        scales=scales,
        block_tokens=group.tokens,
        page_format=f"{_named(pages)}:{group.block}" if mapped else _unnamed(pages, group),
        parallel=pages.parallel,
    )


def _mapped(pages: Pages, group: Group, attention: Attention | None) -> Layout | None:
    """Return the layout of pages whose format has a name."""
    plain = pages.dtype in tuple(Dtype) and len(pages.groups) == 1 and pages.parallel == "canonical"
    if attention is None or not plain or not _named(pages):
        return None
    layout = kv_layout(
        layers=attention.layers,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        dtype=Dtype(pages.dtype),
    )
    numbers = [int(found[0]) for name in group.layers if (found := re.findall(r"\d+", name))]
    in_order = numbers == list(range(attention.layers))
    return layout if in_order and layout.nbytes(group.tokens) == pages.chunk_bytes else None


def _named(pages: Pages) -> str:
    return _KNOWN.get((pages.device, pages.kernels, pages.order), "")


def _unnamed(pages: Pages, group: Group) -> str:
    """Name pages whose inside is not known: another release, kernel or device may order it differently."""
    facts = {
        "groups": [[g.number, g.tokens, g.block, list(g.layers)] for g in pages.groups.values()],
        "chunk_bytes": pages.chunk_bytes,
    }
    digest = hashlib.sha256(canonical_json(facts)).hexdigest()[:16]
    words = [
        pages.version,
        pages.device,
        pages.kernels,
        pages.order,
        pages.dtype,
        f"group{group.number}",
        digest,
    ]
    return "-".join(["vllm", *(word for word in words if word)])


def attention_of(config: Any) -> Attention | None:  # noqa: ANN401 - a configuration of transformers
    """Read a model's configuration; None where its keys are rotated in a way that is not known here."""
    text = config.get_text_config(decoder=True)
    try:
        rope = rope_of(text)
        heads = int(text.num_attention_heads)
        return Attention(
            layers=int(text.num_hidden_layers),
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            rope=rope,
        )
    except (KvtcdError, AttributeError, KeyError, TypeError):
        return None
