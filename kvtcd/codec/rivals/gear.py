"""`gear`: GEAR (Kang et al., arXiv 2403.05527): KIVI's groups, what they miss in low rank, and outliers.

Of each channel of the keys over its tokens, and of each token of the values over all channels of a layer, the
largest and the smallest percent are kept in float16 and replaced by the mean before the rest is quantised, in
groups of 64.
What is then missing is approximated, for each layer and head, by four components: three rounds of power
iteration. Keys after RoPE.

The reference code has ``bits^2 - 1`` levels where ``2^bits - 1`` is meant, the same at 2 and 4 bits alone,
and one of its variants puts outliers back into the wrong tensor; neither is so here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtcd.codec.rivals.draws import Draw
from kvtcd.codec.rivals.groups import Groups
from kvtcd.codec.rivals.kivi import groups
from kvtcd.codec.rivals.method import F16, F32, I16, U8, Field, Method, Site
from kvtcd.codec.rivals.setting import Setting
from kvtcd.codec.rivals.tq import TURN, draw
from kvtcd.core.errors import BadField

GROUP = 64
_SHARE = 0.01
"""Of a row, at each end, that are outliers."""
_RANK = 4
_ROUNDS = 3
_MAX_U8 = 256


class Outliers:
    """The ends of rows, kept as they are.

    Args:
        site: the stream. A row is a channel over tokens for keys, for values a token over a layer's channels.
    """

    def __init__(self, site: Site) -> None:
        self._site = site

    def fields(self, tokens: int) -> list[Field]:
        """Return values and places ``[rows, outliers]``."""
        rows, length = self._rows(tokens)
        kept = 2 * int(_SHARE * length)
        return [Field(F16, (rows, kept)), Field(U8 if length <= _MAX_U8 else I16, (rows, kept))]

    def take(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return values, places, and float32 ``[L, T, H, D]`` with the mean of the row in their place."""
        rows, length = self._lines(x), self._rows(x.shape[1])[1]
        ends = int(_SHARE * length)
        at = torch.cat([rows.topk(ends, largest=largest).indices for largest in (True, False)], dim=1)
        values = rows.gather(1, at).to(F16)
        kept = rows.scatter(1, at, rows.mean(dim=1, keepdim=True).expand(at.shape)) if ends else rows
        return values, at.to(U8 if length <= _MAX_U8 else I16), self._back(kept, x.shape[1])

    def put(self, x: Tensor, values: Tensor, places: Tensor) -> Tensor:
        """Return float32 ``[L, T, H, D]`` with outliers where they were."""
        tokens = x.shape[1]
        rows, length = self._lines(x), self._rows(tokens)[1]
        at = places.to(torch.int64) & (0xFF if places.dtype == U8 else 0xFFFF)
        if at.numel() and int(at.max()) >= length:
            raise BadField("blob", f"an outlier is at {int(at.max())} of {length}")
        return self._back(rows.scatter(1, at, values.to(F32)), tokens)

    def _rows(self, tokens: int) -> tuple[int, int]:
        """Return how many rows there are, and how long they are."""
        site = self._site
        rows = site.layers * (site.heads * site.dim if site.key else tokens)
        return rows, site.vectors(tokens) * site.dim // rows

    def _lines(self, x: Tensor) -> Tensor:
        return (x.movedim(1, 3) if self._site.key else x).reshape(self._rows(x.shape[1]))

    def _back(self, rows: Tensor, tokens: int) -> Tensor:
        site = self._site
        if site.key:
            return rows.view(site.layers, site.heads, site.dim, tokens).movedim(3, 1).contiguous()
        return rows.view(site.layers, tokens, site.heads, site.dim)


class Gear(Method):
    """GEAR of one stream.

    Args:
        site: the stream.
        coarse: the quantiser.
        start: of the power iteration.
    """

    before_rope = False

    def __init__(self, site: Site, coarse: Groups, start: Draw) -> None:
        self._site, self._coarse, self._start, self._outliers = site, coarse, start, Outliers(site)

    def fields(self, tokens: int) -> list[Field]:
        """Return low-rank factors ``[L, H, T, r]`` and ``[L, H, D, r]``, outliers, groups."""
        site, rank = self._site, self._rank(tokens)
        factors = [Field(F16, (site.layers, site.heads, length, rank)) for length in (tokens, site.dim)]
        return [*factors, *self._outliers.fields(tokens), *self._coarse.fields(tokens)]

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays; see `Method`."""
        tokens = x.shape[1]
        values, places, rest = self._outliers.take(x)
        coarse = self._coarse.encode(rest)
        missing = x - self._outliers.put(self._coarse.decode(coarse, tokens), values, places)
        left, right = self._low_rank(missing.transpose(1, 2))
        return [left.to(F16), right.to(F16), values, places, *coarse]

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:
        """Return the values; see `Method`."""
        left, right, values, places, *coarse = arrays
        low = (left.to(F32) @ right.to(F32).mT).transpose(1, 2)
        whole = self._outliers.put(self._coarse.decode(coarse, tokens), values, places) + low
        return self._outliers.put(whole, values, places)

    def _low_rank(self, missing: Tensor) -> tuple[Tensor, Tensor]:
        """Approximate float32 ``[L, H, T, D]`` by left ``[L, H, T, r]`` times right ``[L, H, D, r]``."""
        start = self._start.normals(self._site.dim, self._rank(missing.shape[2]))
        right = start.to(missing.device, F32).expand(*missing.shape[:2], -1, -1)
        left = missing @ right
        for _ in range(_ROUNDS):
            left = torch.linalg.qr(missing @ right).Q
            right = missing.mT @ left
        return left, right

    def _rank(self, tokens: int) -> int:
        return min(_RANK, tokens, self._site.dim)


def make(setting: Setting, site: Site) -> Method:
    """Return the method of a stream."""
    return Gear(site, groups(site, setting.bits, GROUP), draw(setting, site, TURN))
