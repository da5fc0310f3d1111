"""`tq-prod`: TurboQuant_prod (arXiv 2504.19874, algorithm 2): one bit less of `tq`, and QJL for what is left.

Inner products are right on average, at three times the variance that `tq` with `unbiased` has. As many signs
as there are dimensions, of normal projections as the paper has them, and the norm of the remainder in
float16. One bit is the sketch alone. Keys after RoPE, as `tq`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvtcd.codec.rivals.method import Field, Method, Site
from kvtcd.codec.rivals.setting import Setting
from kvtcd.codec.rivals.sketch import Sketch
from kvtcd.codec.rivals.tq import SKETCH, Tq, draw, rotation, split


class TqProd(Method):
    """TurboQuant_prod of whole vectors.

    Args:
        site: the stream.
        coarse: what is coded first; None: nothing is.
        sketch: of the remainder.
    """

    before_rope = False

    def __init__(self, site: Site, coarse: Tq | None, sketch: Sketch) -> None:
        self._site, self._coarse, self._sketch = site, coarse, sketch

    def fields(self, tokens: int) -> list[Field]:
        """Return the arrays of the sketch, then those of the coarse vectors."""
        coarse = self._coarse.fields(tokens) if self._coarse else []
        return [*self._sketch.fields(self._site.vectors(tokens)), *coarse]

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays; see `Method`."""
        coarse = self._coarse.encode(x) if self._coarse else []
        rest = x - self._coarse.decode(coarse, x.shape[1]) if self._coarse else x
        return [*self._sketch.encode(rest.reshape(-1, self._site.dim)), *coarse]

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:
        """Return the values; see `Method`."""
        site = self._site
        rest = self._sketch.decode(arrays[:2]).view(site.layers, tokens, site.heads, site.dim)
        return rest + self._coarse.decode(arrays[2:], tokens) if self._coarse else rest


def make(setting: Setting, site: Site) -> Method:
    """Return the method of a stream."""

    def of(part: Site) -> Method:
        coarse = Tq(part, setting.bits - 1, rotation(setting, part)) if setting.bits > 1 else None
        return TqProd(part, coarse, Sketch.normal(part.dim, part.dim, draw(setting, part, SKETCH)))

    return split(site, of)
