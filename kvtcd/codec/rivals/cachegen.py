"""`cachegen`: CacheGen (Liu et al., arXiv 2310.07240), as its code does it or, with `delta`, as the paper.

Published: the values of a token in one layer, all heads together, over the largest of them, on 11 to 31
levels that are coarser in later layers; every channel of every layer with a distribution of its own,
entropy coded. The distributions go with every block, and are an eighth of the raw size of 256 tokens.

Paper: in groups of ten tokens the first one is an anchor, here in 8 bits, and the others are differences to
it as it will be decoded; the rest is the same. Its own levels for differences are not known to us, so
they are those of the code.

`level` 1 is the coarsest, 2 the default, 3 has 31 levels in all layers. Keys after RoPE. The entropy coder is
rANS where the original has a range coder: the same rate, one state for each channel (`rans`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtcd.codec.rivals import rans
from kvtcd.codec.rivals.method import ANY, F16, F32, I16, U8, Field, Method, Site
from kvtcd.codec.rivals.setting import Setting

_ALL = 1 << 20
_BINS = {
    1: (((10, 16), (20, 16), (_ALL, 12)), ((2, 16), (_ALL, 12))),
    2: (((10, 32), (_ALL, 16)), ((2, 32), (_ALL, 16))),
    3: (((_ALL, 32),), ((_ALL, 32),)),
}
"""By level, of keys and of values: up to which layer, how many bins."""
_GROUP = 10
_ANCHOR_BINS = 256


class CacheGen(Method):
    """One stream.

    Args:
        site: the stream.
        level: of quality.
        delta: whether tokens are differences to an anchor.
    """

    before_rope = False

    def __init__(self, site: Site, level: int, *, delta: bool) -> None:
        self._site, self._delta = site, delta
        bins = _BINS[level][0 if site.key else 1]
        half = [next(count for end, count in bins if layer < end) // 2 - 1 for layer in range(site.layers)]
        self._half = torch.tensor(half)
        self._alphabet = (2 * self._half + 1).repeat_interleave(site.heads * site.dim)

    def fields(self, tokens: int) -> list[Field]:
        """Return words, last states, distributions, largest values ``[L, T]``, then the same of anchors."""
        site, anchors = self._site, self._anchors(tokens)
        found = [
            Field(I16, (ANY,)),
            Field(U8, (len(self._alphabet), rans.STATE_BYTES)),
            Field(I16, (int(self._alphabet.sum()) - len(self._alphabet),)),
            Field(F16, (site.layers, tokens - anchors)),
        ]
        if self._delta:
            found.append(Field(F16, (site.layers, anchors)))
            found.append(Field(U8, (site.layers, anchors, site.heads, site.dim)))
        return found

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays; see `Method`."""
        first = self._first(x.shape[1]).to(x.device)
        anchors = x[:, first]
        anchor_tops, anchor_codes = _quantised(anchors, torch.tensor(_ANCHOR_BINS // 2 - 1))
        rest = x[:, ~first]
        if self._delta:
            decoded = _restored(anchor_codes, anchor_tops, torch.tensor(_ANCHOR_BINS // 2 - 1))
            rest = rest - self._spread(decoded, x.shape[1])
        tops, codes = _quantised(rest, self._half.to(x.device))
        symbols = codes.transpose(0, 1).flatten(1)
        alphabet = self._alphabet.to(x.device)
        cumulative = rans.table(symbols, alphabet, int(alphabet.max()))
        words, states = rans.encode(symbols, cumulative)
        arrays = [words, states, cumulative[self._inner(cumulative)].to(I16), tops]
        return [*arrays, anchor_tops, anchor_codes.to(U8)] if self._delta else arrays

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:
        """Return the values; see `Method`."""
        words, states, counts, tops, *anchored = arrays
        site, alphabet = self._site, self._alphabet.to(tops.device)
        most = int(alphabet.max())
        cumulative = torch.full((len(alphabet), most + 1), 1 << rans.SCALE, device=tops.device)
        cumulative[:, 0] = 0
        cumulative[self._inner(cumulative)] = counts.to(torch.int64) & 0xFFFF
        symbols = rans.decode(words, states, cumulative, tops.shape[1])
        codes = symbols.view(-1, site.layers, site.heads, site.dim).transpose(0, 1)
        rest = _restored(codes, tops, self._half.to(tops.device))
        if not self._delta:
            return rest
        anchor_tops, anchor_codes = anchored
        anchors = _restored(anchor_codes, anchor_tops, torch.tensor(_ANCHOR_BINS // 2 - 1))
        first = self._first(tokens).to(tops.device)
        values = torch.empty((site.layers, tokens, site.heads, site.dim), device=tops.device)
        values[:, first] = anchors
        values[:, ~first] = rest + self._spread(anchors, tokens)
        return values

    def _anchors(self, tokens: int) -> int:
        return -(-tokens // _GROUP) if self._delta else 0

    def _first(self, tokens: int) -> Tensor:
        """Tell which tokens are anchors."""
        number = torch.arange(tokens)
        return number % _GROUP == 0 if self._delta else number < 0

    def _spread(self, anchors: Tensor, tokens: int) -> Tensor:
        """Return for each token that is none its anchor."""
        first = self._first(tokens).to(anchors.device)
        return anchors.repeat_interleave(_GROUP, dim=1)[:, :tokens][:, ~first]

    def _inner(self, cumulative: Tensor) -> Tensor:
        """Tell which entries are neither 0 at the beginning nor 2^16 at the end of a lane."""
        number = torch.arange(cumulative.shape[1], device=cumulative.device)
        return (number > 0) & (number < self._alphabet.to(cumulative.device)[:, None])


def make(setting: Setting, site: Site) -> Method:
    """Return the method of a stream."""
    return CacheGen(site, int(setting.dial), delta="delta" in setting.options)


def _quantised(x: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest values, float16 ``[L, T]``, and codes ``[L, T, H, D]`` from 0 to twice `half`."""
    tops = x.abs().amax(dim=(2, 3)).to(F16)
    levels = half.to(x.device).view(-1, 1, 1, 1)
    scaled = x / tops.to(F32).clamp_min(torch.finfo(F32).tiny)[..., None, None] * levels
    return tops, scaled.round().clamp(-levels, levels).to(torch.int64) + levels


def _restored(codes: Tensor, tops: Tensor, half: Tensor) -> Tensor:
    """Return float32 values."""
    levels = half.to(codes.device).view(-1, 1, 1, 1)
    return (codes.to(torch.int64) - levels) / levels * tops.to(F32)[..., None, None]
