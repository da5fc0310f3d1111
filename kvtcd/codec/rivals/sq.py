"""`sq`: SpectralQuant (Gopinath and Vangara, github.com/Dynamis-Labs/spectralquant), corrected.

Each head of each layer in its own principal components, RoPE undone, mean removed; bits by reverse
water-filling over all components, and for each the Lloyd-Max codebook of a normal coordinate of its variance.
Rows are normalised, and the 16 bits of their norm are taken out of the budget; `raw` leaves norms alone, and
such blocks lose much where few tokens hold most of the energy. `norm` gives what is decoded the length it
had, as `tq` does.

What is corrected: the published allocation gives every component the same bits at whole budgets, and its
sketch of the remainder multiplies logits by up to the number of dimensions. Bits are over all components
here, and there is no sketch.

**Bases** come from the plain basis of the profile (`codec.profile`), of keys and of values each their own:
its components cut to a head, times their variances, are the head's covariance, apart from what was trimmed,
which is taken to be the same in all directions. Decoders on other machines must find the very same
eigenvectors: so they are those of float64 matrices in which a ramp of a millionth of the trace keeps equal
eigenvalues apart, and their signs are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvtcd.codec.profile import StreamProfile
from kvtcd.codec.rivals import narrow
from kvtcd.codec.rivals.codebook import gaussian
from kvtcd.codec.rivals.method import F16, F32, Field, Method, Site
from kvtcd.codec.rivals.setting import Setting
from kvtcd.codec.rivals.waterfill import MOST, water_fill

_NORM_BITS = 16
_RAMP = 1e-6
_LEAST = torch.finfo(torch.float32).tiny


class Sq(Method):
    """One stream in the components of its heads.

    Args:
        site: the stream.
        mean: of each head, float32 ``[L, 1, H, D]``.
        bases: components in rows, float32 ``[L, H, D, D]``.
        variances: of the components, float32 ``[L, H, D]``.
        bits: of each component, ``[L, H, D]``.
        options: ``raw`` and ``norm``, as the module has them.
    """

    before_rope = True

    def __init__(
        self,
        site: Site,
        mean: Tensor,
        bases: Tensor,
        variances: Tensor,
        *,
        bits: Tensor,
        options: frozenset[str],
    ) -> None:
        self._site, self._mean, self._bases = site, mean, bases
        self._raw, self._norm = "raw" in options, "norm" in options
        energy = 1 if self._raw else variances.sum(dim=-1, keepdim=True).clamp_min(_LEAST)
        self._spread = (variances / energy).clamp_min(_LEAST).sqrt().flatten()[:, None]
        order = bits.flatten()
        self._rows = {width: rows for width in range(1, MOST + 1) if len(rows := _places(order, width))}

    def fields(self, tokens: int) -> list[Field]:
        """Return norms ``[vectors]`` unless raw, then codes by bits of the component."""
        norms = [] if self._raw else [Field(F16, (self._site.vectors(tokens),))]
        return norms + [
            field for bits, rows in self._rows.items() for field in narrow.fields(len(rows) * tokens, bits)
        ]

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays; see `Method`."""
        heads = (x - self._mean.to(x.device)).transpose(1, 2)  # [L, H, T, D]
        norms = heads.norm(dim=-1)
        if not self._raw:
            heads = heads / norms.clamp_min(_LEAST)[..., None]
        components = (self._bases.to(x.device) @ heads.mT).reshape(-1, x.shape[1]) / self._spread.to(x.device)
        codes = {
            bits: gaussian(bits).nearest(components[rows.to(x.device)]) for bits, rows in self._rows.items()
        }
        if self._norm:
            lengths = self._restored(codes, x.shape[1]).norm(dim=2)
            norms = torch.where(lengths > 0, norms / lengths, norms)
        packed = [array for bits, own in codes.items() for array in narrow.split(own, bits)]
        return packed if self._raw else [norms.flatten().to(F16), *packed]

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:
        """Return the values; see `Method`."""
        site, device = self._site, arrays[0].device
        codes, at = {}, 0 if self._raw else 1
        for bits, rows in self._rows.items():
            end = at + len(narrow.pieces(bits))
            codes[bits] = narrow.join(arrays[at:end], bits, len(rows) * tokens).view(-1, tokens)
            at = end
        restored = self._restored(codes, tokens).to(device)
        heads = (self._bases.to(device).mT @ restored).mT
        if not self._raw:
            heads = heads * arrays[0].to(F32).view(site.layers, site.heads, tokens, 1)
        return heads.transpose(1, 2) + self._mean.to(device)

    def _restored(self, codes: Mapping[int, Tensor], tokens: int) -> Tensor:
        """Return components ``[L, H, D, T]``, given the codes of those of each width."""
        site = self._site
        device = next((own.device for own in codes.values()), self._spread.device)
        components = torch.zeros((len(self._spread), tokens), device=device)
        for bits, own in codes.items():
            components[self._rows[bits].to(device)] = gaussian(bits).values(own)
        return (components * self._spread.to(device)).view(site.layers, site.heads, site.dim, tokens)


def spectra(profile: StreamProfile, layers: int, heads: int) -> tuple[Tensor, Tensor]:
    """Return components in rows, float32 ``[L, H, D, D]``, and their variances ``[L, H, D]``, descending."""
    rank, features = profile.basis.shape
    by_layer = profile.basis.view(rank, layers, heads, -1).movedim(0, -1)  # [L, H, D, r]
    spectrum = profile.spectrum.to(torch.float64)
    trimmed = max(profile.total - float(spectrum.sum()), 0.0) / features
    eye = torch.eye(by_layer.shape[2], dtype=torch.float64)
    # A layer at a time: all of them in float64 are gigabytes for a large model.
    wide = (own.to(torch.float64) for own in by_layer)
    covariance = torch.stack([(own * spectrum) @ own.mT for own in wide]) + trimmed * eye
    share = covariance.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None] * _RAMP / len(eye)
    ramp = torch.arange(len(eye), 0, -1, dtype=torch.float64) / len(eye)
    values, vectors = torch.linalg.eigh(covariance + share * ramp * eye)
    rows = vectors.mT.flip(-2)
    largest = rows.gather(-1, rows.abs().argmax(dim=-1, keepdim=True))
    return (rows * largest.sign()).to(F32), values.flip(-1).clamp_min(0).to(F32)


def make(setting: Setting, site: Site) -> Method:
    """Return the method of a stream."""
    assert site.profile, "`choose` sees to it that there is one"
    raw = "raw" in setting.options
    bases, variances = spectra(site.profile, site.layers, site.heads)
    budget = min(max(setting.bits * site.dim - (0 if raw else _NORM_BITS), 0), MOST * site.dim)
    mean = site.profile.mean.to(F32).view(site.layers, 1, site.heads, site.dim)
    bits = water_fill(variances, budget)
    return Sq(site, mean, bases, variances, bits=bits, options=setting.options)


def _places(bits: Tensor, width: int) -> Tensor:
    return torch.nonzero(bits == width).flatten()
