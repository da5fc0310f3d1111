"""`tq`: TurboQuant_mse (Zandieh et al., arXiv 2504.19874, algorithm 1), which needs no calibration.

The vector of one token and head is turned by one random rotation, and each coordinate gets the nearest level
of the Lloyd-Max codebook of the density that coordinates then have. The norm is stored in float16. Keys as
they are in the cache, after RoPE; vectors that RoPE turns only in part are cut there, each part with a norm
of its own.

No official code is known; this is the paper's algorithm. Rotation: one round of the randomised Hadamard
transform, as arXiv 2607.09683 has it, where dimensions are a power of two, and Haar where they are not or
`haar` asks for it (the paper's own). What is decoded is too short by ``1 - D`` on average, since levels are
centroids. `norm` makes every vector as long as it was, `unbiased` every inner product right on average
(Vargaftik et al., EDEN); both are in the stored norm, and cost nothing.

Fractional rates by outlier channels, of which the paper gives one composition, are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvtcd.codec.rivals import codebook, narrow
from kvtcd.codec.rivals.draws import Draw
from kvtcd.codec.rivals.method import F16, F32, Field, Method, Site, Split
from kvtcd.codec.rivals.rotation import haar, hadamard
from kvtcd.codec.rivals.setting import Setting

TURN, SKETCH = 0, 1
"""Uses of a stream's seed."""
_USES = 4
"""Uses that a stream, and each part of its vectors, may have."""


def draw(setting: Setting, site: Site, use: int) -> Draw:
    """Return the random bits of one use of one stream."""
    return Draw(setting.seed, site.number * _USES + use)


class Tq(Method):
    """TurboQuant_mse of whole vectors.

    Args:
        site: the stream.
        bits: of a coordinate.
        turn: the rotation, float32 ``[D, D]``.
        scale: ``norm`` or ``unbiased``; anything else leaves what is decoded as it is.
    """

    before_rope = False

    def __init__(self, site: Site, bits: int, turn: Tensor, scale: str = "") -> None:
        self._site, self._bits, self._turn, self._scale = site, bits, turn, scale
        self._book = codebook.beta(bits, site.dim)

    def fields(self, tokens: int) -> list[Field]:
        """Return codes, then norms ``[vectors]``."""
        vectors = self._site.vectors(tokens)
        return [*narrow.fields(vectors * self._site.dim, self._bits), Field(F16, (vectors,))]

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays; see `Method`."""
        vectors = x.reshape(-1, self._site.dim)
        norms = vectors.norm(dim=1)
        turned = (vectors @ self._turn.to(x.device).t()) / norms.clamp_min(torch.finfo(F32).tiny)[:, None]
        codes = self._book.nearest(turned)
        if self._scale == "norm":
            norms = norms / self._book.values(codes).norm(dim=1)
        elif self._scale == "unbiased":
            norms = norms / (1 - self._book.distortion)
        return [*narrow.split(codes, self._bits), norms.to(F16)]

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:
        """Return the values; see `Method`."""
        *codes, norms = arrays
        site = self._site
        turned = self._book.values(narrow.join(codes, self._bits, len(norms) * site.dim)).view(-1, site.dim)
        vectors = (turned @ self._turn.to(turned.device)) * norms.to(F32)[:, None]
        return vectors.view(site.layers, tokens, site.heads, site.dim)


def make(setting: Setting, site: Site) -> Method:
    """Return the method of a stream."""
    scale = next((word for word in ("norm", "unbiased") if word in setting.options), "")
    return split(site, lambda part: Tq(part, setting.bits, rotation(setting, part), scale))


def rotation(setting: Setting, site: Site) -> Tensor:
    """Return the rotation of a stream's vectors."""
    power_of_two = site.dim & (site.dim - 1) == 0
    turn = hadamard if power_of_two and "haar" not in setting.options else haar
    return turn(site.dim, draw(setting, site, TURN))


def split(site: Site, make_part: Callable[[Site], Method]) -> Method:
    """Cut vectors that RoPE turns only in part."""
    turning = site.rope.rotary_dim if site.rope else site.dim
    if turning == site.dim:
        return make_part(site)
    return Split([(dim, make_part(site.of(dim))) for dim in (turning, site.dim - turning)])
