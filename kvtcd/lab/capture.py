"""Run a model over a text and hand out the keys and values it made.

Shapes use the axes of `core.layout`: T tokens, L layers, H KV heads, D head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from transformers import DynamicCache

    from kvtcd.lab.models import LoadedModel

PREFILL_STEP = 2048
"""Tokens of one forward pass of a long context."""


def windows(
    texts: Sequence[Sequence[int]], length: int, per_text: int | None = None
) -> Iterator[tuple[int, Sequence[int]]]:
    """Cut texts into windows of `length` tokens and deal them out in turn, one of each text.

    A budget of the first n windows is then an even mixture of the texts for any n. What is left of a text
    behind its last whole window is not used.

    Args:
        texts: token ids of each text.
        length: tokens of a window.
        per_text: at most so many windows of each text, spread evenly over it; all when None.

    Yields:
        Index of the text and its window. The order depends on nothing but the arguments.
    """
    whole = [len(text) // length for text in texts]
    wanted = [count if per_text is None else min(count, per_text) for count in whole]
    for turn in range(max(wanted, default=0)):
        for index, text in enumerate(texts):
            if turn < wanted[index]:
                start = turn * whole[index] // wanted[index] * length
                yield index, text[start : start + length]


def prefill(loaded: LoadedModel, tokens: Sequence[int], step: int = PREFILL_STEP) -> DynamicCache:
    """Return the cache of `tokens` at positions 0 to T-1.

    Args:
        loaded: the model.
        tokens: ids.
        step: tokens of one forward pass, which bounds memory; passes of another size round otherwise.

    Raises:
        UnsupportedCache: a layer does not keep its whole past.
    """
    import torch  # noqa: PLC0415 - takes seconds

    from kvtcd.integrations.transformers_blocks import require_full_attention  # noqa: PLC0415 - loads torch

    with torch.no_grad():
        ids = torch.tensor([tokens], device=loaded.model.device)
        cache: DynamicCache | None = None
        for start in range(0, len(tokens), step):
            part = ids[:, start : start + step]
            cache = loaded.model(part, cache=cache, use_cache=True, logits_to_keep=1).cache
    assert cache is not None, "no tokens"
    require_full_attention(cache)
    return cache


def kv_rows(loaded: LoadedModel, tokens: Sequence[int]) -> dict[str, Tensor]:
    """Return keys (after RoPE, positions 0 to T-1) and values of `tokens` as a codec's training rows.

    Returns:
        Streams ``k`` and ``v``, each ``[T, L, H, D]``, in the dtype and on the device of the model.

    Raises:
        UnsupportedCache: a layer does not keep its whole past.
    """
    import torch  # noqa: PLC0415 - takes seconds

    layers = prefill(loaded, tokens).layers
    return {
        name: torch.stack([getattr(layer, field)[0].transpose(0, 1) for layer in layers], dim=1)
        for name, field in (("k", "keys"), ("v", "values"))
    }
