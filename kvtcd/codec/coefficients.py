"""A matrix of coefficients coded by a plan: codes by width, scales and shifts by group.

Everything is component-major ``[components, T]``: the coefficients of one component over a run of tokens
share a distribution, which is what the entropy stage lives on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtcd.codec.pack import pack, unpack
from kvtcd.codec.plan import Plan
from kvtcd.codec.quantize import dequantize, quantize, ranges
from kvtcd.codec.stages import stage


@dataclass(frozen=True, slots=True)
class Coded:
    """A coded run of tokens of one stream.

    Attributes:
        codes: width in bits -> packed codes, uint8 ``[components of the width, W]``, in order of component.
        scales: float16 ``[groups, T]``.
        shifts: float16 ``[groups, T]``.
    """

    codes: dict[int, Tensor]
    scales: Tensor
    shifts: Tensor

    def to(self, device: torch.device) -> Coded:
        """Return the same on another device; memory that is not pinned has been read when this returns."""
        codes = {bits: packed.to(device, non_blocking=True) for bits, packed in self.codes.items()}
        ranges = (part.to(device, non_blocking=True) for part in (self.scales, self.shifts))
        return Coded(codes, *ranges)


def code(coefficients: Tensor, plan: Plan) -> Coded:
    """Quantise and pack float32 coefficients ``[rank, T]``."""
    tokens = coefficients.shape[1]
    codes: dict[int, list[Tensor]] = {}
    none = torch.empty((0, tokens), dtype=torch.float16, device=coefficients.device)
    scales, shifts = [none], [none]
    for band in plan.bands:
        x = coefficients[band.start : band.stop].view(band.count, band.size, tokens)
        with stage("quantise"):
            scale, shift = ranges(x, band.bits)
            quantized = quantize(x, scale, shift, band.bits).view(-1, tokens)
        with stage("pack"):
            codes.setdefault(band.bits, []).append(pack(quantized, band.bits))
        scales.append(scale)
        shifts.append(shift)
    return Coded(
        {bits: torch.cat(parts) for bits, parts in codes.items()}, torch.cat(scales), torch.cat(shifts)
    )


def restore(coded: Coded, plan: Plan) -> Tensor:
    """Return float32 coefficients ``[rank, T]``, zero where the plan stores none."""
    tokens = coded.scales.shape[1]
    out = torch.zeros((plan.rank, tokens), device=coded.scales.device)
    used = dict.fromkeys(coded.codes, 0)
    group = 0
    for band in plan.bands:
        count = band.stop - band.start
        packed = coded.codes[band.bits][used[band.bits] : used[band.bits] + count]
        with stage("unpack"):
            codes = unpack(packed, band.bits, tokens).reshape(band.count, band.size, tokens)
        with stage("dequantise"):
            scale, shift = (part[group : group + band.count] for part in (coded.scales, coded.shifts))
            out[band.start : band.stop] = dequantize(codes, scale, shift, band.bits).view(count, tokens)
        used[band.bits] += count
        group += band.count
    return out
