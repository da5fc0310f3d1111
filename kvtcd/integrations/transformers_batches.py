"""Several sequences at once: caches of single sequences side by side, and single ones out of a padded batch.

A batch has slots, ``[B, W]``; a mask says which of them hold a token. Positions count tokens, not slots, as
`generate` counts them: what a mask leaves out may lie before, behind or between tokens and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from kvtcd.core.errors import BadRequest, BlockMismatch
from kvtcd.integrations.transformers_blocks import TORCH_DTYPE, require_full_attention

if TYPE_CHECKING:
    from torch import Tensor

    from kvtcd.core.layout import Layout


def padded(sequences: Sequence[Sequence[int]], known: Sequence[int], pad: int) -> tuple[Tensor, Tensor]:
    """Return sequences as one batch whose cached parts end in the same slot, and so do the sequences.

    Args:
        sequences: token ids, of any lengths.
        known: leading tokens of each that are in its cache.
        pad: token id of slots without a token.

    Returns:
        Token ids and mask, both int64 ``[B, W]``. The first ``max(known)`` slots are those of the cache.

    Raises:
        BadRequest: `pad` is no token id.
    """
    if type(pad) is not int or pad < 0:
        raise BadRequest("pad", f"is {pad!r}, not a token id; where a tokenizer has none take any, such as 0")
    cached = max(known)
    width = cached + max(len(ids) - count for ids, count in zip(sequences, known, strict=True))
    tokens = torch.full((len(sequences), width), pad)
    mask = torch.zeros_like(tokens)
    for row, (ids, count) in enumerate(zip(sequences, known, strict=True)):
        slots = [*range(cached - count, cached), *range(width - len(ids) + count, width)]
        tokens[row, slots] = torch.tensor(ids)
        mask[row, slots] = 1
    return tokens, mask


def stacked(caches: Sequence[DynamicCache], layout: Layout) -> DynamicCache:
    """Return the caches of single sequences, any of them empty, as rows of one; all end in its last slot.

    Args:
        caches: each of one sequence, on one device.
        layout: of all of them.
    """
    filled = {row: list(_pairs(cache)) for row, cache in enumerate(caches) if cache.get_seq_length()}
    if not filled:
        return DynamicCache()
    cached = max(cache.get_seq_length() for cache in caches)
    layers = []
    for index in range(layout.layers):
        pair = []
        for which, stream in enumerate(layout.streams):
            parts = {row: pairs[index][which] for row, pairs in filled.items()}
            shape = (len(caches), stream.heads, cached, stream.head_dim)
            device = next(iter(parts.values())).device
            together = torch.zeros(shape, dtype=TORCH_DTYPE[layout.dtype], device=device)
            for row, part in parts.items():
                together[row, :, cached - part.shape[2] :] = part[0]
            pair.append(together)
        layers.append(tuple(pair))
    return DynamicCache(layers)


def rows(cache: DynamicCache, token_ids: Tensor, mask: Tensor) -> Iterator[tuple[DynamicCache, list[int]]]:
    """Yield the cache and the tokens of each sequence of a batch.

    Args:
        cache: of ``[B, W']`` slots.
        token_ids: ``[B, W]``, at least as many slots as the cache has.
        mask: ``[B, V]``, not 0 where a slot holds a token; slots behind it do.

    Raises:
        UnsupportedCache: a layer does not keep its whole past.
        BlockMismatch: tokens or mask are of another batch than the cache.
    """
    require_full_attention(cache)
    slots, layers = cache.get_seq_length(), list(_pairs(cache))
    batch = layers[0][0].shape[0] if slots else len(token_ids)
    for what, tensor, least in (("token_ids", token_ids, slots), ("attention_mask", mask, 0)):
        if tensor.ndim != 2 or tensor.shape[0] != batch or tensor.shape[1] < least:
            raise BlockMismatch(what, f"a batch of {batch}, {least} slots or more", tuple(tensor.shape))
    for row in range(batch):
        held = torch.ones(slots, dtype=torch.bool)
        told = mask[row, :slots].cpu() != 0
        held[: len(told)] = told
        where = held.nonzero()[:, 0]
        tokens: list[int] = token_ids[row].cpu()[where].tolist()
        one = [[tensor[row : row + 1, :, where.to(tensor.device)] for tensor in pair] for pair in layers]
        yield DynamicCache([tuple(pair) for pair in one] if slots else None), tokens


def _pairs(cache: DynamicCache) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield keys and values of each layer, ``[B, H, T, D]``."""
    for keys, values, *_ in cache:
        yield keys, values
