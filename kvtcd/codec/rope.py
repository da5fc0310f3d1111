"""Rotary position embedding: the angles a model used, applied and undone.

Keys lie in the cache after RoPE, which hides their low-rank structure: the same content is another vector at
every position. Undoing it needs the very angles of the model. `inverse_frequencies` follows the formulas of
transformers (`modeling_rope_utils`), angles are float32 products of position and frequency as there, and all
arithmetic is float32, so that undoing and applying cancel whatever rounding the model itself has done.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtcd.core.identity import Pairing, Rope, RopeKind


def inverse_frequencies(rope: Rope) -> tuple[Tensor, float]:
    """Return the angle per token of each plane, and the factor on cosine and sine.

    Returns:
        Frequencies in radians per token, ``[rotary_dim/2]`` float32 on the CPU, and the attention factor
        (1 except for YaRN).
    """
    dim = rope.rotary_dim
    powers = rope.theta ** (torch.arange(0, dim, 2).to(torch.float32) / dim)
    base = 1.0 / powers
    match rope.kind:
        case RopeKind.DEFAULT:
            return base, 1.0
        case RopeKind.LINEAR:
            return base / _given(rope.factor), 1.0
        case RopeKind.LLAMA3:
            return _llama3(rope, base), 1.0
        case RopeKind.YARN:
            return _yarn(rope, powers), _given(rope.attention_factor)


class Rotation:
    """The rotation of a run of tokens to their positions, or back to position zero.

    Args:
        rope: the model's RoPE.
        first_token: position of the run's first token; or that as float64 without dimensions, there.
        tokens: length of the run, ``T``.
        inverse: undo instead of apply.
        every: positions from one of these tokens to the next.
        device: where the vectors lie.
        planes: what `inverse_frequencies` returns, there, if it is at hand.
    """

    def __init__(
        self, rope: Rope, first_token: int | Tensor, tokens: int, *,
        inverse: bool, every: int = 1, device: torch.device | str = "cpu",
        planes: tuple[Tensor, float] | None = None,
    ) -> None:  # fmt: skip
        frequencies, factor = planes or inverse_frequencies(rope)
        # Summed in float64, which holds every position there is; an int64 would not hold every u64.
        first = first_token if isinstance(first_token, Tensor) else float(first_token)
        positions = every * torch.arange(tokens, dtype=torch.float64, device=device) + first
        angles = torch.outer(positions.to(torch.float32), frequencies.to(device))[:, None, :]
        scale = 1.0 / factor if inverse else factor
        self._dim, self._pairing = rope.rotary_dim, rope.pairing
        cos, self._sin = angles.cos() * scale, angles.sin() * (-scale if inverse else scale)
        self._cos = (
            cos.repeat(1, 1, 2) if rope.pairing is Pairing.HALVES else cos.repeat_interleave(2, dim=-1)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate vectors.

        Args:
            x: ``[..., T, H, D]`` of any float dtype; dimensions from `rotary_dim` on are kept.

        Returns:
            A new float32 tensor of the same shape.
        """
        x = x.to(torch.float32)
        turning = x[..., : self._dim]
        turned = turning * self._cos
        (first, second), (turned_first, turned_second) = self._planes(turning), self._planes(turned)
        turned_first.addcmul_(second, self._sin, value=-1)
        turned_second.addcmul_(first, self._sin)
        return turned if x.shape[-1] == self._dim else torch.cat((turned, x[..., self._dim :]), dim=-1)

    def _planes(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the first and the second coordinate of every plane: views ``[..., rotary_dim/2]``."""
        if self._pairing is Pairing.HALVES:
            return x.chunk(2, dim=-1)
        return x[..., 0::2], x[..., 1::2]


def _llama3(rope: Rope, base: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a smooth step between."""
    factor, low, high = _given(rope.factor), _given(rope.low_freq_factor), _given(rope.high_freq_factor)
    context = _given(rope.original_max_position)
    wavelength = 2 * math.pi / base
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * base / factor + smooth * base
    long, short = wavelength > context / low, wavelength < context / high
    return torch.where(long, base / factor, torch.where(short, base, between))


def _yarn(rope: Rope, powers: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023): a linear ramp over planes from extrapolation to interpolation."""
    dim, context = rope.rotary_dim, _given(rope.original_max_position)

    def plane_of(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = plane_of(_given(rope.beta_fast)), plane_of(_given(rope.beta_slow))
    if rope.truncate != 0:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (_given(rope.factor) * powers) * (1 - keep) + 1.0 / powers * keep


def _given(value: float | None) -> float:
    """A parameter that `Rope` has made sure is there."""
    if value is None:
        raise AssertionError("Rope lets no parameter of its kind be missing")
    return value
