"""`xkv`: xKV (Chang et al., arXiv 2503.18893): neighbouring layers of one block in one low-rank product.

Four layers side by side, RoPE undone, make ``A [T, 4 H D]``; stored are the best ``U [T, r]`` and ``U^T A [r,
4 H D]`` in float16, with no quantiser behind them. The dial is the ratio of the values to the two factors.
Values get half as many components again as keys, as in the paper's runs (512 and 768).

The paper takes whole prompts of 64,000 tokens, where ``U`` is most of the cost. A block of 256 tokens also
pays for its own ``U^T A``, so the rank at a ratio is far smaller: 1 / ratio of ``T W / (T + W)``, W being ``4
H D``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtcd.codec.rivals.method import F16, F32, Field, Method, Site
from kvtcd.codec.rivals.setting import Setting

_LAYERS = 4
_KEYS, _VALUES = 0.8, 1.2
"""Of the rank, so that both together have the ratio."""


class Xkv(Method):
    """Layers of one stream in groups.

    Args:
        site: the stream.
        ratio: of values to factors, all streams together.
    """

    before_rope = True

    def __init__(self, site: Site, ratio: float) -> None:
        self._site, self._ratio = site, ratio
        whole, rest = divmod(site.layers, _LAYERS)
        self._groups = [(whole, _LAYERS)] * (whole > 0) + [(1, rest)] * (rest > 0)

    def fields(self, tokens: int) -> list[Field]:
        """Return both factors of whole groups of layers, then those of the layers left over."""
        found = []
        for groups, layers in self._groups:
            width = layers * self._site.heads * self._site.dim
            rank = self._rank(tokens, width)
            found += [Field(F16, (groups, tokens, rank)), Field(F16, (groups, rank, width))]
        return found

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays; see `Method`."""
        arrays, tokens = [], x.shape[1]
        split = torch.split(x, [groups * layers for groups, layers in self._groups])
        for (groups, layers), part in zip(self._groups, split, strict=True):
            wide = part.view(groups, layers, tokens, -1).transpose(1, 2).reshape(groups, tokens, -1)
            # Left singular vectors as those of A A^T: T is the shorter side in a block, or near it.
            vectors = torch.linalg.eigh(wide.to(torch.float64) @ wide.to(torch.float64).mT).eigenvectors
            left = vectors[..., -self._rank(tokens, wide.shape[2]) :].flip(-1).to(F32)
            arrays += [left.to(F16), (left.mT @ wide).to(F16)]
        return arrays

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:
        """Return the values; see `Method`."""
        site, found = self._site, []
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        for (groups, layers), (left, right) in zip(self._groups, pairs, strict=True):
            wide = left.to(F32) @ right.to(F32)
            by_layer = wide.view(groups, tokens, layers, site.heads * site.dim).transpose(1, 2)
            found.append(by_layer.reshape(groups * layers, tokens, site.heads, site.dim))
        return torch.cat(found)

    def _rank(self, tokens: int, width: int) -> int:
        share = _KEYS if self._site.key else _VALUES
        rank = int(share * tokens * width / (self._ratio * (tokens + width)))
        return max(1, min(rank, tokens, width))


def make(setting: Setting, site: Site) -> Method:
    """Return the method of a stream."""
    return Xkv(site, setting.dial)
