"""A second decoder of `kvtc2` blobs, written from the format's description alone: loops, zlib, float64.

It shares with the codec the container (`core.blob`) and the profile file's tensors, nothing else.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from support.codec_reference import content
from support.codec_world import rotated

from kvtcd.core.blob import Blob, Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from support.codec_world import World

BOUNDS = ((8, 1.3), (4, 0.26), (2, 0.158), (1, 0.11))


def runs(blob: Blob) -> list[tuple[int, int]]:
    """First token and length of every coded run."""
    return sorted({(s.token_start, s.token_count) for s in blob.sections if s.kind is Kind.CODES})


def step_of(step: float, step_class: int) -> np.float32:
    """Half octaves down from class 16, in float32."""
    return np.float32(step) * np.float32(math.sqrt(2.0) ** (16 - step_class))


def width_of(spread: float, step: np.float32) -> int:
    """Bits of a component."""
    return next((bits for bits, bound in BOUNDS if float(spread) / float(step) >= bound), 0)


def codes(blob: Blob, stream: int, spread: list[float], start: int, tokens: int) -> NDArray[np.float64]:
    """Decode one stream's coefficients ``[r, T]``, code by code."""
    own = next(
        s.part for s in blob.sections if (s.kind, s.stream, s.token_start) == (Kind.CLASSES, stream, start)
    )
    classes = list(content(blob, Kind.CLASSES, stream, own, start))
    order = sorted(range(tokens), key=lambda t: (classes[t], t))
    widths = [width_of(value, step_of(blob.header.step, own)) for value in spread]
    kinds = {(s.kind, s.part) for s in blob.sections if (s.stream, s.token_start) == (stream, start)}
    escapes: list[int] = []
    if (Kind.ESCAPES, 0) in kinds:
        data = content(blob, Kind.ESCAPES, stream, 0, start)
        half = len(data) // 2
        escapes = [low | high << 8 for low, high in zip(data[:half], data[half:], strict=True)]
    out = np.zeros((len(spread), tokens))
    for bits in (1, 2, 4, 8):
        components = [c for c, width in enumerate(widths) if width == bits]
        if not components:
            continue
        packed, width = content(blob, Kind.CODES, stream, bits, start), -(-tokens * bits // 8)
        for row, component in enumerate(components):
            for place, t in enumerate(order):
                code = (packed[row * width + place % width] >> (bits * (place // width))) & ((1 << bits) - 1)
                if code == (1 << bits) - 1:
                    code += escapes.pop(0)
                multiple = -(code + 1) // 2 if code % 2 else code // 2
                out[component, t] = multiple * float(step_of(blob.header.step, classes[t]))
    assert not escapes
    return out


def decoded(
    blob: Blob, world: World, tensors: dict[str, torch.Tensor], frequencies: torch.Tensor, factor: float = 1.0
) -> list[tuple[int, int, dict[str, torch.Tensor]]]:
    """Decode every coded run: start, length and float64 ``[L, T, H, D]`` of each stream."""
    found = []
    for start, tokens in runs(blob):
        out: dict[str, torch.Tensor] = {}
        for index, stream in enumerate(world.layout.streams):
            own = {part: tensors[f"weighted.{stream.name}.{part}"] for part in ("basis", "root", "spread")}
            c = torch.from_numpy(codes(blob, index, own["spread"].tolist(), start, tokens))
            y = (c.t() @ own["basis"].double()).view(tokens, world.layout.layers, stream.heads, -1)
            x = torch.einsum("tlhd,lhde->tlhe", y, torch.linalg.inv(own["root"].double()))
            mean = tensors[f"weighted.{stream.name}.mean"].double()
            x = (x + mean.view(world.layout.layers, stream.heads, -1)).transpose(0, 1)
            if stream.rope:
                x = rotated(x, world.rope, frequencies, factor, (blob.header.first_token or 0) + start)
            out[stream.name] = x
        found.append((start, tokens, out))
    return found
