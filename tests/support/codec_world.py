"""Synthetic models for codec tests: layouts, RoPE, and blocks whose vectors have structure a basis can find.

RoPE is applied here by complex multiplication in float64, not with the code under test.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtcd.codec.basis import Moments
from kvtcd.codec.dial import Curve, Point
from kvtcd.codec.fit import fit_profile
from kvtcd.codec.origin import Origin, Text
from kvtcd.codec.rope import inverse_frequencies
from kvtcd.core.identity import Identity, Pairing, Rope, RopeKind
from kvtcd.core.layout import Dtype, Layout, Stream, kv_layout

if TYPE_CHECKING:
    from torch import Tensor

    from kvtcd.codec.profile import Profile

TORCH_DTYPE = {Dtype.F32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.F16: torch.float16}
WEIGHTS = "5e" * 32
CURVE = Curve(
    (
        Point(0.5, 8.0, 0.4, 0.01, 0.008, 0.012, 0.99),
        Point(1.0, 12.0, 1.6, 0.03, 0.02, 0.04, 0.97),
        Point(2.0, 20.0, 6.4, 0.1, 0.08, 0.12, 0.9),
    ),
    floor=0.0001,
)
"""Made up: nothing was measured."""

DEFAULT = Rope(RopeKind.DEFAULT, 10_000.0, 16)
LINEAR = Rope(RopeKind.LINEAR, 10_000.0, 16, factor=4.0)
LLAMA3 = Rope(
    RopeKind.LLAMA3, 500_000.0, 16, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position=64,
)  # fmt: skip
YARN = Rope(
    RopeKind.YARN, 10_000.0, 16, factor=4.0, original_max_position=64, beta_fast=32.0, beta_slow=1.0,
    attention_factor=0.1 * math.log(4.0) + 1.0,
)  # fmt: skip
PARTIAL = Rope(RopeKind.DEFAULT, 10_000.0, 8)
NEIGHBOURS = Rope(RopeKind.DEFAULT, 10_000.0, 16, pairing=Pairing.NEIGHBOURS)


def kv(dtype: Dtype = Dtype.BF16, layers: int = 3) -> Layout:
    """Keys and values of 2 heads of 16."""
    return kv_layout(layers=layers, kv_heads=2, head_dim=16, dtype=dtype)


def mla(dtype: Dtype = Dtype.BF16) -> Layout:
    """Latent attention: one latent without RoPE, one narrower rotated part."""
    return Layout(
        (Stream("latent", 1, 40, rope=False), Stream("k_pe", 1, 16, rope=True)), layers=3, dtype=dtype
    )


def rotated(x: Tensor, rope: Rope, frequencies: Tensor, factor: float, first_token: int) -> Tensor:
    """Rotate ``[..., T, H, D]`` by complex multiplication in float64."""
    x = x.to(torch.float64)
    half = rope.rotary_dim // 2
    positions = torch.arange(first_token, first_token + x.shape[-3], dtype=torch.float64)
    turn = torch.polar(
        torch.tensor(factor, dtype=torch.float64), torch.outer(positions, frequencies.double())
    )
    turning, rest = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    if rope.pairing is Pairing.HALVES:
        planes = torch.complex(turning[..., :half], turning[..., half:]) * turn[:, None]
        return torch.cat((planes.real, planes.imag, rest), dim=-1)
    planes = torch.view_as_complex(turning.unflatten(-1, (half, 2)).contiguous()) * turn[:, None]
    return torch.cat((torch.view_as_real(planes).flatten(-2), rest), dim=-1)


@dataclass(frozen=True)
class World:
    """A model that was never run: what its keys and values would look like."""

    layout: Layout
    rope: Rope = DEFAULT
    latent: int = 12
    noise: float = 0.05

    def rows(self, tokens: int, seed: int) -> dict[str, Tensor]:
        """Draw unrotated rows, float32 ``[tokens, p]``, of each stream: low rank, offset, noise."""
        draw = torch.Generator().manual_seed(seed)
        fixed = torch.Generator().manual_seed(7)
        out: dict[str, Tensor] = {}
        for stream in self.layout.streams:
            p = self.layout.features(stream)
            scales = torch.arange(1, self.latent + 1, dtype=torch.float32) ** -0.5
            mix = torch.randn((self.latent, p), generator=fixed) * scales[:, None]
            offset = 3.0 * torch.randn(p, generator=fixed)
            inner = torch.randn((tokens, self.latent), generator=draw)
            out[stream.name] = inner @ mix + offset + self.noise * torch.randn((tokens, p), generator=draw)
        return out

    def block(self, tokens: int, seed: int, first_token: int = 0) -> Tensor:
        """Draw a raw block, flat uint8, as an engine would hold it: after RoPE."""
        frequencies, factor = inverse_frequencies(self.rope)
        parts = []
        for stream in self.layout.streams:
            x = self.rows(tokens, seed)[stream.name]
            x = x.view(tokens, self.layout.layers, stream.heads, stream.head_dim).transpose(0, 1)
            if stream.rope:
                x = rotated(x, self.rope, frequencies, factor, first_token)
            typed = x.to(TORCH_DTYPE[self.layout.dtype]).contiguous()
            parts.append(typed.view(torch.uint8).flatten())
        return torch.cat(parts)

    def values(self, raw: Tensor, tokens: int) -> dict[str, Tensor]:
        """Read a raw block as float32 ``[L, T, H, D]`` of each stream, without the code under test."""
        out: dict[str, Tensor] = {}
        for stream, offset, nbytes in self.layout.spans(tokens):
            typed = raw[offset : offset + nbytes].clone().view(TORCH_DTYPE[self.layout.dtype])
            shape = (self.layout.layers, tokens, stream.heads, stream.head_dim)
            out[stream.name] = typed.view(shape).to(torch.float32)
        return out

    @property
    def identity(self) -> Identity:
        """The namespace of this model."""
        return Identity(
            engine="test", hash_scheme="kvtcd-chain-v1", model="synthetic", weights=WEIGHTS,
            layout=self.layout, rope=self.rope, block_tokens=32,
        )  # fmt: skip

    @property
    def origin(self) -> Origin:
        """Where its profile comes from."""
        return Origin(
            model="synthetic", weights=WEIGHTS, adapter="none", rope=self.rope, streams=self.layout.streams,
            layers=self.layout.layers, parallel="canonical", sinks=4, tokens=600,
            texts=(Text("noise", "0" * 64),), seed=0, version="0",
        )  # fmt: skip

    def profile(self, ratios: tuple[int, ...] = (4, 8)) -> tuple[Profile, bytes]:
        """Calibrate on 600 rows, with weights of heads and tokens that differ, and a curve made up."""
        rows = self.rows(600, seed=100)
        moments = {name: Moments.from_rows(x) for name, x in rows.items()}
        samples = {name: x[:200] for name, x in rows.items()}
        origin = dataclasses.replace(self.origin, sensitivity="fisher", curve=tuple(CURVE.to_json()))
        return fit_profile(
            origin, moments, samples, ratios=ratios, weights=self.weights(), tokens=self.token_rows()
        )

    def weights(self) -> dict[str, Tensor]:
        """Draw second moments of gradients ``[L, H, D, D]``, from layer to layer four times smaller."""
        draw = torch.Generator().manual_seed(11)
        found = {}
        for stream in self.layout.streams:
            dim = stream.head_dim
            g = torch.randn((self.layout.layers, stream.heads, 3 * dim, dim), generator=draw)
            found[stream.name] = (
                g.mT @ g / len(g) * 4.0 ** -torch.arange(self.layout.layers)[:, None, None, None]
            )
        return found

    def token_rows(self) -> dict[str, Tensor]:
        """Draw what features say of the sensitivity of tokens: some classes up and down."""
        draw = torch.Generator().manual_seed(12)
        features = {stream.name: self.layout.features(stream) for stream in self.layout.streams}
        return {
            name: torch.randn((len(features), p), generator=draw) / p**0.5 for name, p in features.items()
        }


def centred_error(got: Tensor, want: Tensor) -> float:
    """Relative error of ``[L, T, H, D]`` against the energy about the mean over tokens."""
    centred = want - want.mean(dim=1, keepdim=True)
    return float((got - want).norm() / centred.norm())
