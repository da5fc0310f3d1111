"""Memory for chunks on their way between an engine's pages and the daemon, which maps it too."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch

from kvtcd.client.regions import Region
from kvtcd.core.errors import BadRequest
from kvtcd.integrations.vllm_steps import Move

_FEWEST = 4
"""Chunks that there has to be memory for: two each way."""


def slots_in(buffer_bytes: int, chunk_bytes: int) -> int:
    """Return how many chunks memory holds.

    Raises:
        BadRequest: too few.
    """
    if (slots := buffer_bytes // chunk_bytes) < _FEWEST:
        raise BadRequest(
            "buffer_bytes",
            f"{buffer_bytes:,} bytes hold {slots} chunks of {chunk_bytes:,} bytes; "
            f"give at least {_FEWEST * chunk_bytes}, or make chunks smaller (chunk_tokens)",
        )
    return slots


class Staging:
    """Slots of one chunk each: layers in order, the blocks of the chunk, their pages ``[H, N, C]``.

    Args:
        caches: each layer's cache, ``[B, k, H, N, C]`` in any physical order but for C; see `paged`.
        blocks: engine blocks of a chunk.
        region: whole slots.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], blocks: int, region: Region) -> None:
        self._caches = {name: cache.view(torch.uint8) for name, cache in caches.items()}
        self._blocks, self.region = blocks, region
        pages = {name: cache[0].numel() for name, cache in self._caches.items()}
        self.chunk_bytes = sum(pages.values()) * blocks
        ends = accumulate(pages.values())
        self._spans = {
            name: ((end - pages[name]) * blocks, end * blocks) for name, end in zip(pages, ends, strict=True)
        }
        self._memory = torch.frombuffer(region.memory, dtype=torch.uint8)
        slots = len(region.memory) // self.chunk_bytes
        self.for_loads = list(range(slots // 2))
        """Slots that are free for chunks to be loaded, and here for those to be stored."""
        self.for_stores = list(range(slots // 2, slots))

    @property
    def layers(self) -> frozenset[str]:
        """Names of the layers."""
        return frozenset(self._caches)

    def row(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        return self.region.memory[slot * self.chunk_bytes : (slot + 1) * self.chunk_bytes]

    def fill(self, layer: str, slot: int, move: Move) -> None:
        """Copy one layer of a chunk from its slot into the engine's pages."""
        cache = self._caches[layer]
        pages = self._pages(layer, slot)[move.skip : move.skip + len(move.blocks)]
        cache.index_copy_(0, self._numbers(layer, move), pages.to(cache.device))

    def take(self, slot: int, move: Move) -> None:
        """Copy all layers of a chunk from the engine's pages into a slot."""
        for layer, cache in self._caches.items():
            self._pages(layer, slot).copy_(cache.index_select(0, self._numbers(layer, move)))

    def _pages(self, layer: str, slot: int) -> torch.Tensor:
        begin, end = self._spans[layer]
        start = slot * self.chunk_bytes
        return self._memory[start + begin : start + end].view(self._blocks, *self._caches[layer].shape[1:])

    def _numbers(self, layer: str, move: Move) -> torch.Tensor:
        return torch.tensor(move.blocks, dtype=torch.int64, device=self._caches[layer].device)
