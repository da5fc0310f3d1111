"""Raw blocks out of a transformers cache, and a cache out of raw blocks.

The cache holds ``[1, H, T, D]`` per layer and stream, a block ``[L, T, H, D]`` per stream (`core.layout`).
Both directions copy bytes and compute nothing, so a cache goes through them unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvtcd.core.errors import BlockMismatch, UnsupportedCache
from kvtcd.core.layout import Dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from kvtcd.core.layout import Layout

TORCH_DTYPE = {Dtype.F32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.F16: torch.float16}
_STREAMS = ("k", "v")
_KINDS = {
    "Sliding": "sliding windows or chunks, which forget what is far back",
    "Linear": "linear attention, which keeps no tokens",
    "Quant": "quantised",
    "Static": "of a fixed size",
}
"""What layers of other caches are, by part of their class's name."""


def require_full_attention(cache: DynamicCache) -> None:
    """Refuse a cache that is not, in every layer, all keys and values since the first token.

    Raises:
        UnsupportedCache: a layer of another kind, named with its index.
    """
    others = [index for index, layer in enumerate(cache.layers) if type(layer) is not DynamicLayer]
    if others:
        name = type(cache.layers[others[0]]).__name__
        kind = next((words for part, words in _KINDS.items() if part in name), name)
        raise UnsupportedCache(
            f"{len(others)} of its {len(cache.layers)} layers, the first of them layer {others[0]}, are "
            f"{kind}; supported are models whose layers all keep keys and values of every token as they are, "
            "such as Llama, Qwen2, Qwen3 and SmolLM2"
        )


def raw_block(cache: DynamicCache, start: int, stop: int, layout: Layout) -> Tensor:
    """Return tokens ``start`` to ``stop`` of a cache of one sequence as a raw block.

    Args:
        cache: filled by a forward pass; its tensors are only read.
        start: first token, counted from the start of the sequence.
        stop: token behind the last.
        layout: layout of the namespace.

    Returns:
        A new flat uint8 tensor of ``layout.nbytes(stop - start)`` bytes on the device of the cache.

    Raises:
        UnsupportedCache: a layer does not keep its whole past.
        BlockMismatch: the cache has another shape or dtype than the layout, or not these tokens.
    """
    require_full_attention(cache)
    _require("layers", layout.layers, len(cache.layers))
    _require("streams", _STREAMS, tuple(stream.name for stream in layout.streams))
    tokens = cache.get_seq_length()
    if not 0 <= start < stop <= tokens:
        raise BlockMismatch("tokens", f"a range within 0:{tokens}", f"{start}:{stop}")
    layers = [(keys, values) for keys, values, *_ in cache]
    raw = torch.empty(layout.nbytes(stop - start), dtype=torch.uint8, device=layers[0][0].device)
    for which, (stream, rows) in enumerate(zip(layout.streams, _views(raw, layout), strict=True)):
        for index, layer in enumerate(layers):
            tensor, what = layer[which], f"{stream.name} of layer {index}"
            _require(what, (1, stream.heads, tokens, stream.head_dim), tuple(tensor.shape))
            _require(what, rows.dtype, tensor.dtype)
            rows[index].copy_(tensor[0, :, start:stop].transpose(0, 1))
    return raw


def cache_from_raw(blocks: Iterable[Tensor], layout: Layout) -> DynamicCache:
    """Return the cache whose tokens are those of consecutive raw blocks, the inverse of `raw_block`.

    Args:
        blocks: flat uint8 tensors on the device where the cache is wanted, the first token of the sequence in
            the first block.
        layout: layout of the namespace.

    Returns:
        A cache that shares no memory with the blocks. `generate` computes at least one token, so give it one
        token less than its input has.

    Raises:
        BlockMismatch: no block, one that is not a whole number of tokens, or a layout of other streams than k
            and v.
    """
    _require("streams", _STREAMS, tuple(stream.name for stream in layout.streams))
    aligned = [b.clone() if b.storage_offset() % layout.dtype.itemsize else b for b in blocks]
    if not aligned:
        raise BlockMismatch("blocks", "at least one block", 0)
    views = [list(_views(block, layout)) for block in aligned]
    keys, values = (torch.cat(rows, dim=1).transpose(1, 2) for rows in zip(*views, strict=True))
    return DynamicCache(list(zip(keys[:, None], values[:, None], strict=True)))


def _views(raw: Tensor, layout: Layout) -> Iterator[Tensor]:
    """Yield each stream of a raw block as ``[L, T, H, D]`` over the same memory."""
    tokens, rest = divmod(raw.numel(), layout.token_bytes)
    if rest:
        raise BlockMismatch("bytes of a block", f"a multiple of {layout.token_bytes}", raw.numel())
    for stream, offset, nbytes in layout.spans(tokens):
        flat = raw[offset : offset + nbytes].view(TORCH_DTYPE[layout.dtype])
        yield flat.view(layout.layers, tokens, stream.heads, stream.head_dim)


def _require(what: str, want: object, got: object) -> None:
    if want != got:
        raise BlockMismatch(what, want, got)
