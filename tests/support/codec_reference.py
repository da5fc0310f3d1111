"""A second decoder of `kvtc` blobs, written from the format's description alone: loops, zlib, float64.

It shares with the codec the container (`core.blob`) and the profile file's tensors, nothing else.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from support.codec_blobs import chunks_of
from support.codec_world import rotated

from kvtcd.core.blob import Blob, Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from support.codec_world import World


def content(blob: Blob, kind: Kind, stream: int, part: int, start: int) -> bytes:
    """Uncompressed bytes of one section."""
    section = next(
        s for s in blob.sections if (s.kind, s.stream, s.part, s.token_start) == (kind, stream, part, start)
    )
    return b"".join(
        bytes(c.data) if c.stored else zlib.decompress(c.data, -15) for c in chunks_of(blob, section)
    )


def coded_tokens(blob: Blob) -> tuple[int, int]:
    """First token and length of the coded run."""
    section = next(s for s in blob.sections if s.kind is Kind.CODES)
    return section.token_start, section.token_count


def coefficients(blob: Blob, stream: int, groups: list[list[int]]) -> NDArray[np.float64]:
    """Decode one stream's coefficients ``[rank, T]``, code by code."""
    start, tokens = coded_tokens(blob)
    planes = [
        np.frombuffer(content(blob, Kind.RANGES, stream, i, start), np.uint8).astype(np.uint16)
        for i in range(4)
    ]
    scales, shifts = (
        (low | (high << 8)).view(np.float16).astype(np.float64).reshape(len(groups), tokens)
        for low, high in (planes[:2], planes[2:])
    )
    packed = {bits: content(blob, Kind.CODES, stream, bits, start) for bits in {g[2] for g in groups}}
    row = dict.fromkeys(packed, 0)
    out = np.zeros((groups[-1][0] + groups[-1][1], tokens))
    for index, (first, size, bits) in enumerate(groups):
        width = -(-tokens * bits // 8)
        for component in range(first, first + size):
            for t in range(tokens):
                byte = packed[bits][row[bits] * width + t % width]
                code = (byte >> (bits * (t // width))) & ((1 << bits) - 1)
                value = e4m3(code) if bits == 8 else float(code)
                out[component, t] = value * scales[index, t] + shifts[index, t]
            row[bits] += 1
    return out


def e4m3(code: int) -> float:
    """Value of an E4M3 code."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def decoded(
    blob: Blob, world: World, tensors: dict[str, torch.Tensor], frequencies: torch.Tensor, factor: float = 1.0
) -> dict[str, torch.Tensor]:
    """Decode the coded run: float64 ``[L, T, H, D]`` of each stream."""
    start, tokens = coded_tokens(blob)
    out: dict[str, torch.Tensor] = {}
    for index, stream in enumerate(world.layout.streams):
        groups = tensors[f"plain.{stream.name}.plan.{blob.header.plan}"].tolist()
        c = torch.from_numpy(coefficients(blob, index, groups))
        basis = tensors[f"plain.{stream.name}.basis"].double()[: len(c)]
        rows = c.t() @ basis + tensors[f"plain.{stream.name}.mean"].double()
        x = rows.view(tokens, world.layout.layers, stream.heads, stream.head_dim).transpose(0, 1)
        if stream.rope:
            x = rotated(x, world.rope, frequencies, factor, (blob.header.first_token or 0) + start)
        out[stream.name] = x
    return out
