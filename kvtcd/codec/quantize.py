"""Quantisation of groups of coefficients with one range per group and token.

Two and four bits: the asymmetric min-max rule of KIVI, which the paper adopts (section 3.2): shift ``z =
min``, scale ``S = (max - min) / (2^b - 1)``, code ``round((x - z) / S)``. Eight bits: floating point E4M3
with scale ``amax / 448`` and shift 0. Scale and shift are rounded to float16 before coding, so encoder and
decoder use the same ones, and the scale is at least 2^-24, so that a constant group divides by something.

Shapes: coefficients ``[N, G, T]``, N groups of G components and T tokens; ranges ``[N, T]``. Ties round to
even. A coefficient beyond float16 is coded as the nearest value the range can reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_RANGE = 65504.0
"""Largest magnitude of a float16, and so of a coefficient."""
_MIN_SCALE = 2.0**-24
_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0
_E4M3_BITS = 8


def ranges(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scale and shift, float16 ``[N, T]``, of float32 coefficients ``[N, G, T]``."""
    low, high = x.amin(dim=1), x.amax(dim=1)  # a tenth of the time that aminmax takes over a dimension
    if bits == _E4M3_BITS:
        scale, shift = torch.maximum(-low, high) / _E4M3_MAX, torch.zeros_like(low)
    else:
        scale, shift = (high - low) / (2**bits - 1), low
    return (
        scale.clamp(_MIN_SCALE, MAX_RANGE).to(torch.float16),
        shift.clamp(-MAX_RANGE, MAX_RANGE).to(torch.float16),
    )


def quantize(x: Tensor, scale: Tensor, shift: Tensor, bits: int) -> Tensor:
    """Return uint8 codes ``[N, G, T]`` of float32 coefficients, given float16 ranges ``[N, T]``."""
    step = scale.to(torch.float32)[:, None, :]
    if bits == _E4M3_BITS:
        # Whether the cast saturates or makes a NaN differs between devices and releases of torch.
        return (x / step).clamp_(-_E4M3_MAX, _E4M3_MAX).to(_E4M3).view(torch.uint8)
    codes = (x - shift.to(torch.float32)[:, None, :]).div_(step).round_()
    return codes.clamp_(0, 2**bits - 1).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, shift: Tensor, bits: int) -> Tensor:
    """Return float32 coefficients ``[N, G, T]`` of uint8 codes, given float16 ranges ``[N, T]``."""
    step = scale.to(torch.float32)[:, None, :]
    values = _from_e4m3(codes) if bits == _E4M3_BITS else codes.to(torch.float32)
    return values.mul_(step).add_(shift.to(torch.float32)[:, None, :])


def _from_e4m3(codes: Tensor) -> Tensor:
    """Widen E4M3 by its bits: read as float16 they are 2^-8 of the value, subnormals included.

    Several times faster than torch's cast on a CPU; and the code for NaN, which no encoder writes, becomes
    480.
    """
    wide = codes.to(torch.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)
