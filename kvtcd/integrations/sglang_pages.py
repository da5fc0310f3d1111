"""Pages of SGLang's host pools as blocks: gathered from the pool's order, scattered into it.

Where an order is known, a block has that of `core.layout`, so pools of every layout share blocks and the
codec can work on them. Of any other pool a block is the page as SGLang itself hands it over, and is opaque.

========================= ========================================
layout of a pool          order of its keys, and of its values
========================= ========================================
``layer_first``           ``[L, tokens, H, D]``
``page_first``            ``[tokens, L, H, D]``
``page_first_direct``     ``[pages, L, T, H, D]``
``page_head``             ``[pages, H, T, L, D]``
``page_first_kv_split``   ``[pages, L, T, 1, D]``, of MLA alone
========================= ========================================

MLA has one tensor of the first three orders, whose ``D`` is the latent vector and then the rotated part of
the key; ``page_first_kv_split`` holds these two apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvtcd.core.errors import BadIdentity
from kvtcd.core.layout import Dtype, Layout, Stream, canonical_json
from kvtcd.integrations.opaque import opaque

CANONICAL = "canonical"
_PERMUTED = {  # from a page's own order to [L, T, H, D]
    "layer_first": (0, 1, 2, 3),
    "page_first": (1, 0, 2, 3),
    "page_first_direct": (0, 1, 2, 3),
    "page_head": (2, 1, 0, 3),
    "page_first_kv_split": (0, 1, 2, 3),
}
_KEYS_AND_VALUES = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost")
_LATENT = ("MLATokenToKVPoolHost",)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a pool's blocks are.

    Attributes:
        layout: of a block.
        tokens: of a page.
        page_format: ``canonical``, or a name that no other pool's pages have.
        scales: as in an identity.
        dtype: of the pool, by torch's name.
    """

    layout: Layout
    tokens: int
    page_format: str
    scales: str
    dtype: str


class Pages(Protocol):
    """The pages of one pool; `index` is the number of a page's first token there."""

    kind: Kind

    def gather(self, index: int, block: Tensor) -> None:
        """Write a page into a block, flat uint8."""

    def scatter(self, block: Tensor, index: int) -> None:
        """Write a block into a page."""

    def pack(self, page: Tensor, block: Tensor) -> None:
        """Write a page that SGLang has taken out of the pool, flat, into a block."""

    def unpack(self, block: Tensor, page: Tensor) -> None:
        """Write a block into a page that SGLang will put into the pool, flat."""


class CanonicalPages:
    """Pages whose order is known.

    Args:
        kind: of the pool.
        native: returns the tensors of a page, in the pool's order.
        canonical: returns the streams ``[L, T, H, D]`` that one such tensor holds, as views.
    """

    def __init__(
        self,
        kind: Kind,
        native: Callable[[int], Sequence[Tensor]],
        canonical: Callable[[Tensor], Sequence[Tensor]],
    ) -> None:
        self.kind = kind
        self._native, self._canonical = native, canonical
        self._shapes = [tensor.shape for tensor in native(0)]

    def gather(self, index: int, block: Tensor) -> None:
        """Write a page into a block; see `Pages`."""
        for page, part in self._pairs(self._native(index), block):
            part.copy_(page)

    def scatter(self, block: Tensor, index: int) -> None:
        """Write a block into a page; see `Pages`."""
        for page, part in self._pairs(self._native(index), block):
            page.copy_(part)

    def pack(self, page: Tensor, block: Tensor) -> None:
        """Write a flat page into a block; see `Pages`."""
        for piece, part in self._pairs(self._pieces(page), block):
            part.copy_(piece)

    def unpack(self, block: Tensor, page: Tensor) -> None:
        """Write a block into a flat page; see `Pages`."""
        for piece, part in self._pairs(self._pieces(page), block):
            piece.copy_(part)

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        pieces = torch.split(flat, [shape.numel() for shape in self._shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def _pairs(self, native: Sequence[Tensor], block: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each stream of a page with the part of the block that holds it."""
        offset = 0
        for tensor in native:
            for view in self._canonical(tensor):
                nbytes = view.numel() * view.element_size()
                yield view, block[offset : offset + nbytes].view(view.dtype).view(view.shape)
                offset += nbytes


class OpaquePages:
    """Pages as SGLang takes them out of a pool, flat, and puts them back."""

    def __init__(self, kind: Kind, pool: Any) -> None:  # noqa: ANN401 - SGLang's
        self.kind, self._pool = kind, pool

    def gather(self, index: int, block: Tensor) -> None:
        """Write a page into a block; see `Pages`."""
        self.pack(self._pool.get_data_page(index, flat=True), block)

    def scatter(self, block: Tensor, index: int) -> None:
        """Write a block into a page; see `Pages`."""
        page = self._pool.get_dummy_flat_data_page()
        self.unpack(block, page)
        self._pool.set_from_flat_data_page(index, page)

    def pack(self, page: Tensor, block: Tensor) -> None:
        """Write a flat page into a block; see `Pages`."""
        block.copy_(page.contiguous().view(torch.uint8).view(-1))

    def unpack(self, block: Tensor, page: Tensor) -> None:
        """Write a block into a flat page; see `Pages`."""
        page.view(torch.uint8).view(-1).copy_(block)


class SplitPages:
    """Pages of several tensors, one after the other, each in its own order."""

    def __init__(self, kind: Kind, buffers: Sequence[Tensor]) -> None:
        self.kind, self._buffers = kind, buffers

    def gather(self, index: int, block: Tensor) -> None:
        """Write a page into a block; see `Pages`."""
        for page, part in self._pairs(index, block):
            part.copy_(page)

    def scatter(self, block: Tensor, index: int) -> None:
        """Write a block into a page; see `Pages`."""
        for page, part in self._pairs(index, block):
            page.copy_(part)

    def pack(self, page: Tensor, block: Tensor) -> None:
        """Write a flat page into a block; see `Pages`."""
        block.copy_(_bytes(page))

    def unpack(self, block: Tensor, page: Tensor) -> None:
        """Write a block into a flat page; see `Pages`."""
        _bytes(page).copy_(block)

    def _pairs(self, index: int, block: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        pages = [_bytes(buffer[index // self.kind.tokens]) for buffer in self._buffers]
        return zip(pages, torch.split(block, [page.numel() for page in pages]), strict=True)


def pages_of(pool: Any, name: str, *, version: str) -> Pages:  # noqa: ANN401 - SGLang's
    """Return the pages of a host pool, which is called `name`; `version` is SGLang's.

    Raises:
        BadIdentity: SGLang itself does not take pages out of this pool.
    """
    return _known(pool) or _unknown(pool, name, version)


def _known(pool: Any) -> Pages | None:  # noqa: ANN401 - SGLang's
    what, dtype = type(pool).__name__, _name(pool.dtype)
    order, widths = _PERMUTED.get(pool.layout), None
    plain = getattr(pool, "dcp_size", 1) == 1 and not getattr(pool, "storage_format_tag", None)
    if order is None or dtype not in tuple(Dtype) or not plain:
        return None
    tokens, split = int(pool.page_size), pool.layout == "page_first_kv_split"
    if what in _KEYS_AND_VALUES and not split:
        buffers, names = [pool.k_buffer, pool.v_buffer], ("k", "v")
        sizes = [(int(pool.head_num), int(pool.head_dim)), (int(pool.head_num), int(pool.v_head_dim))]
    elif what in _LATENT and pool.layout != "page_head" and getattr(pool, "index_k_buffer", None) is None:
        buffers, names = [pool.k_buffer, pool.v_buffer] if split else [pool.kv_buffer], ("latent", "k_pe")
        sizes = [(1, int(pool.kv_lora_rank)), (1, int(pool.qk_rope_head_dim))]
        widths = None if split else [width for _, width in sizes]
    else:
        return None

    def native(index: int) -> list[Tensor]:
        return [_page(buffer, pool.layout, index, tokens) for buffer in buffers]

    def canonical(tensor: Tensor) -> Sequence[Tensor]:
        ordered = tensor.permute(order)
        return torch.split(ordered, widths, -1) if widths else (ordered,)

    layers = int(pool.layer_num)
    held = [tuple(stream.shape) for tensor in native(0) for stream in _fitting(tensor, canonical, widths)]
    if held != [(layers, tokens, *size) for size in sizes]:
        return None
    streams = tuple(
        Stream(stream, heads, width, rope=False) for stream, (heads, width) in zip(names, sizes, strict=True)
    )
    return CanonicalPages(
        Kind(Layout(streams, layers, Dtype(dtype)), tokens, CANONICAL, "none", dtype), native, canonical
    )


def _fitting(
    tensor: Tensor, canonical: Callable[[Tensor], Sequence[Tensor]], widths: Sequence[int] | None
) -> Sequence[Tensor]:
    """Return the streams of a tensor, none where it is wider or narrower than they are."""
    return canonical(tensor) if widths is None or tensor.shape[-1] == sum(widths) else ()


def _unknown(pool: Any, name: str, version: str) -> Pages:  # noqa: ANN401 - SGLang's
    what, layout, dtype = type(pool).__name__, str(getattr(pool, "layout", "-")), _name(pool.dtype)
    tokens = int(getattr(pool, "page_size", 1) or 1)
    buffers = _split_buffers(pool) if layout == "page_first_kv_split" else []
    try:
        pages = [buffer[0] for buffer in buffers] or [pool.get_dummy_flat_data_page()]
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise BadIdentity(
            "page_format", f"SGLang takes no pages out of a {what} of layout {layout}: {error}"
        ) from None
    shapes = [[_name(page.dtype), *page.shape] for page in pages]
    tag = str(getattr(pool, "storage_format_tag", None) or "-")
    ranks = [int(getattr(pool, rank, default)) for rank, default in (("dcp_size", 1), ("dcp_rank", 0))]
    facts = [name, what, layout, dtype, tokens, tag, ranks, shapes]
    digest = hashlib.sha256(canonical_json(facts)).hexdigest()[:16]
    nbytes = sum(page.numel() * page.element_size() for page in pages)
    held, scales = opaque(nbytes, tokens, [dtype])
    kind = Kind(held, tokens, f"sglang-{version}-{what}-{layout}-{digest}"[:256], scales, dtype)
    return SplitPages(kind, buffers) if buffers else OpaquePages(kind, pool)


def _split_buffers(pool: Any) -> list[Tensor]:  # noqa: ANN401 - SGLang's
    """Return the tensors of ``page_first_kv_split`` that hold anything, each ``[pages, ...]``."""
    names = ["k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer"]
    if getattr(pool, "dsa_kv_cache_store_fp8", False):
        names.remove("v_buffer")  # keys have it
    return [buffer for name in names if (buffer := getattr(pool, name, None)) is not None]


def _page(buffer: Tensor, layout: str, index: int, tokens: int) -> Tensor:
    match layout:
        case "layer_first":
            return buffer[:, index : index + tokens]
        case "page_first":
            return buffer[index : index + tokens]
        case _:
            return buffer[index // tokens]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
