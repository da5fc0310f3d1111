"""Sequences of tokens, and their salts, as callers give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtcd.client.call import Salt
from kvtcd.core.errors import BadRequest

if TYPE_CHECKING:
    import torch


def tokens_of(token_ids: Sequence[int] | torch.Tensor) -> list[int]:
    """Return the tokens of one sequence, from a list or a tensor of shape ``[T]`` or ``[1, T]``."""
    tokens: Any = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    if tokens and isinstance(tokens[0], list):
        if len(tokens) != 1:
            raise BadRequest("token_ids", f"a batch of {len(tokens)} sequences; see load_batch, save_batch")
        tokens = tokens[0]
    return list(tokens)


def one_each(salts: Sequence[Salt] | None, count: int) -> Sequence[Salt | None]:
    """Return a salt for each of so many sequences, None where there is none."""
    if salts is not None and len(salts) != count:
        raise BadRequest("salts", f"are {len(salts)}; there are {count} sequences")
    return salts or [None] * count
