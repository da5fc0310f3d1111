"""Stand-ins of SGLang's host pools, for tests where it is not installed; `tests/peers` has the real ones."""

from __future__ import annotations

import torch

LAYERS, PAGE, PAGES = 3, 4, 6


class MHATokenToKVPoolHost:
    """Keys and values, numbered element by element."""

    dcp_size = 1
    storage_format_tag = None

    def __init__(
        self,
        layout: str,
        *,
        dtype: torch.dtype = torch.float32,
        heads: int = 2,
        head_dim: int = 8,
        layers: int = LAYERS,
        filled: bool = True,
    ) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, PAGE
        self.layer_num, self.head_num = layers, heads
        self.head_dim = self.v_head_dim = head_dim
        tokens = PAGES * PAGE
        shape = {
            "layer_first": (layers, tokens, heads, head_dim),
            "page_first": (tokens, layers, heads, head_dim),
            "page_first_direct": (PAGES, layers, PAGE, heads, head_dim),
            "page_head": (PAGES, heads, PAGE, layers, head_dim),
        }[layout]
        self.kv_buffer = torch.zeros((2, *shape), dtype=dtype)
        if filled:
            flat = self.kv_buffer.view(-1)
            flat.copy_(torch.arange(flat.numel(), dtype=torch.float32) % 251)

    @property
    def k_buffer(self) -> torch.Tensor:
        return self.kv_buffer[0]

    @property
    def v_buffer(self) -> torch.Tensor:
        return self.kv_buffer[1]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = index // PAGE
        cut = {
            "layer_first": lambda kv: kv[:, :, index : index + PAGE],
            "page_first": lambda kv: kv[:, index : index + PAGE],
        }.get(self.layout, lambda kv: kv[:, page])(self.kv_buffer)
        return cut.flatten() if flat else cut

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.get_data_page(0))

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        there = self.get_data_page(index, flat=False)
        there.copy_(data_page.view(there.shape))


class OtherPoolHost(MHATokenToKVPoolHost):
    """A pool whose order nobody knows."""


class ClosedPoolHost(MHATokenToKVPoolHost):
    """A pool that gives no pages away."""

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        raise NotImplementedError("not from this one")

    k_buffer = v_buffer = torch.zeros(0)
