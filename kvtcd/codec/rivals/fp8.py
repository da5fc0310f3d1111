"""`fp8`: E4M3 with one scale for each layer of a stream, as serving engines store a cache in 8 bits.

The scale is that of the block's own largest value over 448, in float32; engines calibrate one for each layer,
or take 1. Keys after RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtcd.codec.rivals.method import F32, U8, Field, Method, Site
from kvtcd.codec.rivals.setting import Setting

_MOST = 448.0
_LEAST = torch.finfo(torch.float32).tiny


class Fp8(Method):
    """One stream in E4M3."""

    before_rope = False

    def __init__(self, site: Site) -> None:
        self._site = site

    def fields(self, tokens: int) -> list[Field]:
        """Return codes, then scales ``[L]``."""
        site = self._site
        return [Field(U8, (site.layers, tokens, site.heads, site.dim)), Field(F32, (site.layers,))]

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays; see `Method`."""
        scales = (x.abs().amax(dim=(1, 2, 3)) / _MOST).clamp_min(_LEAST)
        # Whether the cast saturates or makes a NaN differs between devices and releases of torch.
        codes = (x / scales[:, None, None, None]).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn)
        return [codes.view(U8), scales]

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:  # noqa: ARG002 - the codes' shape says it
        """Return the values; see `Method`."""
        codes, scales = arrays
        values: Tensor = codes.view(torch.float8_e4m3fn).to(F32) * scales[:, None, None, None]
        return values


def make(setting: Setting, site: Site) -> Method:  # noqa: ARG001 - there is nothing to set
    """Return the method of a stream."""
    return Fp8(site)
