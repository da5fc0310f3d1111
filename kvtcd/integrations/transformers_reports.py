"""What the prefix cache for transformers answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtcd.client import BlockResult
from kvtcd.core.errors import KvtcdError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What became of a cache.

    Attributes:
        tokens: tokens of the cache, without a partial block that was not to be stored.
        found: leading tokens that were stored already, and were not sent.
        results: what became of each block that was sent.
        failure: what the daemon failed with, if it did.
    """

    tokens: int
    found: int
    results: tuple[BlockResult, ...]
    failure: KvtcdError | None = None

    @property
    def complete(self) -> bool:
        """Whether all of that is stored now."""
        return self.failure is None and all(result.outcome != "dropped" for result in self.results)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A cache of the first `tokens` tokens, empty if nothing was stored, or the daemon failed: `failure`."""

    cache: DynamicCache
    tokens: int
    failure: KvtcdError | None = None


@dataclass(frozen=True, slots=True)
class LoadBatchReport:
    """A batch as `generate` takes it, what is stored of it in its cache.

    Attributes:
        input_ids: int64 ``[B, W]``; the first slots are those of the cache.
        attention_mask: int64 ``[B, W]``, 0 where there is no token.
        cache: of all sequences, empty if nothing was stored of any.
        tokens: leading tokens of each sequence that are in the cache.
        failure: what the daemon failed with, if it did.
    """

    input_ids: Tensor
    attention_mask: Tensor
    cache: DynamicCache
    tokens: tuple[int, ...]
    failure: KvtcdError | None = None
