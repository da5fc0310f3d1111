"""`qjl`: QJL (Zandieh, Daliri and Han, arXiv 2406.03482) for keys, and 2-bit values as KIVI has them.

As the reference code does it: signs of orthogonal projections, `bits` times as many as there are dimensions
    (the paper's default is 2, and 4 in its first layers); in each group of 32 tokens the 8 channels with the
    largest norm are left out of that sketch and have one of their own, of twice as many signs as there are
    dimensions. Norms of both are float16. Keys after RoPE. Published for queries that are not quantised; what
    a store gives back is the key such a query meets (`sketch`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtcd.codec.rivals.kivi import GROUP, Grouped, groups
from kvtcd.codec.rivals.method import I16, U8, Field, Method, Site
from kvtcd.codec.rivals.setting import Setting
from kvtcd.codec.rivals.sketch import Sketch
from kvtcd.codec.rivals.tq import SKETCH, draw
from kvtcd.core.errors import BadField

_OUTLIERS = 8
_OUTLIER_SIGNS = 2
"""Signs for a dimension in the sketch of the outliers."""
_OUTLIER_SKETCH = SKETCH + 1
_VALUE_BITS = 2
_MAX_U8 = 256


class Qjl(Method):
    """The keys of one stream.

    Args:
        site: the stream.
        inner, outer: sketches of all channels but the outliers, and of those.
        outliers: channels of a group of tokens that are outliers.
    """

    before_rope = False

    def __init__(self, site: Site, inner: Sketch, outer: Sketch, outliers: int) -> None:
        self._site, self._inner, self._outer, self._outliers = site, inner, outer, outliers

    def fields(self, tokens: int) -> list[Field]:
        """Return the arrays of both sketches, then the channels ``[L, groups, H, outliers]``."""
        site, vectors = self._site, self._site.vectors(tokens)
        channels = (site.layers, -(-tokens // GROUP), site.heads, self._outliers)
        kind = U8 if site.dim <= _MAX_U8 else I16
        return [*self._inner.fields(vectors), *self._outer.fields(vectors), Field(kind, channels)]

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays; see `Method`."""
        norms = torch.stack([part.norm(dim=1) for part in torch.split(x, GROUP, dim=1)], dim=1)
        channels = norms.topk(self._outliers, dim=-1).indices
        outside = self._mask(channels, x.shape[1])
        kind = U8 if self._site.dim <= _MAX_U8 else I16
        inner, outer = (torch.where(part, x, 0).flatten(0, 2) for part in (~outside, outside))
        return [*self._inner.encode(inner), *self._outer.encode(outer), channels.to(kind)]

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:
        """Return the values; see `Method`."""
        channels = arrays[-1].to(torch.int64)
        if channels.numel() and not 0 <= int(channels.min()) <= int(channels.max()) < self._site.dim:
            raise BadField(
                "blob", f"an outlier of {self._site.dim} channels is channel {int(channels.max())}"
            )
        outside = self._mask(channels, tokens)
        inner, outer = self._inner.decode(arrays[:2]), self._outer.decode(arrays[2:4])
        return torch.where(outside, outer.view(outside.shape), inner.view(outside.shape))

    def _mask(self, channels: Tensor, tokens: int) -> Tensor:
        """Tell which of ``[L, T, H, D]`` are outliers."""
        site = self._site
        mask = torch.zeros((*channels.shape[:3], site.dim), dtype=torch.bool, device=channels.device)
        return mask.scatter_(-1, channels, value=True).repeat_interleave(GROUP, dim=1)[:, :tokens]


def make(setting: Setting, site: Site) -> Method:
    """Return the method of a stream."""
    if not site.key:
        return Grouped(groups(site, _VALUE_BITS, GROUP))
    inner = Sketch.orthogonal(setting.bits * site.dim, site.dim, draw(setting, site, SKETCH))
    outer = Sketch.orthogonal(_OUTLIER_SIGNS * site.dim, site.dim, draw(setting, site, _OUTLIER_SKETCH))
    return Qjl(site, inner, outer, min(_OUTLIERS, site.dim // 2))
