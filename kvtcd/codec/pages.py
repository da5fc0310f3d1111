"""Engines' pages as index maps: from their order to that of `core.layout` and back, bytes unchanged.

A namespace names its page format in its identity. One that is not here is stored losslessly. Lossless blobs
hold pages as the engine handed them over, map or no map: what was stored before a format got its map stays
readable.

``vllm-cpu-vec:N`` is vLLM on a CPU without matrix tiles: layers, blocks of N tokens, heads, then the keys of
the block as ``[D, N]`` and its values as ``[N, D]``. (Compared with caches of transformers, value by value.)

``vllm-flash:N`` is vLLM with FlashAttention or Triton kernels: layers, blocks of N tokens, heads, tokens, and
of each token its keys ``[D]`` and its values ``[D]``. (After vLLM's source; not run on a GPU yet.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtcd.codec.lossless import Lossless
from kvtcd.codec.ports import BlobDecoder, Encoded, Encoder, Symbols
from kvtcd.codec.sections import Scratch
from kvtcd.core.blob import Blob, CodecId
from kvtcd.core.errors import BlockMismatch
from kvtcd.core.identity import Identity
from kvtcd.core.layout import Layout

_NAMED = re.compile(r"(vllm-cpu-vec|vllm-flash):([1-9][0-9]{0,3})")
_FLASH = "vllm-flash"
_ELEMENT = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class PageMap:
    """Pages of `tokens` tokens each, of a layout with keys and values.

    Attributes:
        layout: of the block.
        tokens: of a page.
        by_token: whether the values of a token are next to its keys; else all keys of a page come before all
            values, and are transposed.

    Raises:
        BlockMismatch: a block is not whole pages, or has another length than its layout.
    """

    layout: Layout
    tokens: int
    by_token: bool = False

    def to_canonical(self, pages: Tensor, tokens: int) -> Tensor:
        """Return a block in the order of `core.layout`, flat uint8 like `pages`."""
        canonical = torch.empty_like(pages)
        for there, here in self._pairs(pages, canonical, tokens):
            here.copy_(there)
        return canonical

    def to_pages(self, canonical: Tensor, tokens: int, out: Tensor) -> None:
        """Write a block into `out` in the engine's order."""
        for there, here in self._pairs(out, canonical, tokens):
            there.copy_(here)

    def _pairs(self, pages: Tensor, canonical: Tensor, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views ``[L, B, N, H, D]`` of each stream's elements, in pages and in the canonical block."""
        blocks, rest = divmod(tokens, self.tokens)
        if rest or pages.numel() != self.layout.nbytes(tokens):
            raise BlockMismatch(
                "bytes", f"whole pages of {self.tokens} tokens", f"{pages.numel()} of {tokens}"
            )
        layers, element = self.layout.layers, _ELEMENT[self.layout.dtype.itemsize]
        keys, values = self.layout.streams
        heads = keys.heads
        n, dk, dv = self.tokens, keys.head_dim, values.head_dim
        page = pages.view(element).view(layers, blocks, heads, n * (dk + dv))
        if self.by_token:
            by_token = page.view(layers, blocks, heads, n, dk + dv).transpose(2, 3)
            there = by_token[..., :dk], by_token[..., dk:]
        else:
            there = (
                page[..., : n * dk].view(layers, blocks, heads, dk, n).permute(0, 1, 4, 2, 3),
                page[..., n * dk :].view(layers, blocks, heads, n, dv).permute(0, 1, 3, 2, 4),
            )
        for (stream, offset, nbytes), view in zip(self.layout.spans(tokens), there, strict=True):
            here = canonical[offset : offset + nbytes].view(element)
            yield view, here.view(layers, blocks, n, heads, stream.head_dim)


def page_map(identity: Identity) -> PageMap | None:
    """Return the map of a namespace's page format; None where it has none, or needs none."""
    streams = identity.layout.streams
    named = _NAMED.fullmatch(identity.page_format)
    if named is None or [s.name for s in streams] != ["k", "v"] or streams[0].heads != streams[1].heads:
        return None
    return PageMap(identity.layout, int(named[2]), by_token=named[1] == _FLASH)


class PagedEncoder(Encoder):
    """Encodes pages with an encoder of canonical blocks, or as they are where that encodes losslessly."""

    def __init__(self, encoder: Encoder, pages: PageMap) -> None:
        self._encoder, self._pages = encoder, pages
        self._lossless = Lossless(pages.layout)

    def analyze(
        self, raw: Tensor, *, tokens: int, first_token: int | None, after: int, scratch: Scratch
    ) -> Symbols:
        """Put a block in order and turn it into symbols; see `Encoder`."""
        canonical = self._pages.to_canonical(raw, tokens)
        symbols = self._encoder.analyze(
            canonical, tokens=tokens, first_token=first_token, after=after, scratch=scratch
        )
        if symbols.header.codec is not CodecId.LOSSLESS:
            return symbols
        exact = self._lossless.analyze(
            raw, tokens=tokens, first_token=first_token, after=after, scratch=scratch
        )
        return replace(exact, reason=symbols.reason)

    def deflate(self, symbols: Symbols) -> Encoded:
        """Write a blob; see `Encoder`."""
        return self._encoder.deflate(symbols)


class PagedDecoder(BlobDecoder):
    """Decodes into pages with a decoder of canonical blocks."""

    def __init__(self, decoder: BlobDecoder, pages: PageMap) -> None:
        self._decoder, self._pages = decoder, pages

    def check(self, blob: Blob) -> None:
        """Compare a blob with layout and profile; see `BlobDecoder`."""
        self._decoder.check(blob)

    def inflate(self, blob: Blob, scratch: Scratch) -> Symbols:
        """Check a blob and read its symbols; see `BlobDecoder`."""
        return self._decoder.inflate(blob, scratch)

    def synthesize(self, symbols: Symbols, out: Tensor) -> None:
        """Decode a block and put it in the engine's order; see `BlobDecoder`."""
        if symbols.header.codec is CodecId.LOSSLESS:
            self._decoder.synthesize(symbols, out)
            return
        canonical = torch.empty_like(out)
        self._decoder.synthesize(symbols, canonical)
        self._pages.to_pages(canonical, symbols.header.tokens, out)
