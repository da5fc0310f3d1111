"""What the raw bytes of a block mean.

Axes, named once for the whole program:

====== =================================================
``S``  stream: one tensor family of a layer (``k``, ``v``; for MLA ``latent``, ``k_pe``)
``L``  layer
``T``  token
``H``  KV head
``D``  head dimension
``p``  features of one token and stream, ``L*H*D`` in this order
====== =================================================

A raw block is, for each stream in order, a C-contiguous little-endian array ``[L, T, H, D]``; keys are as
the engine holds them, after RoPE.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from kvtcd.core.errors import BadIdentity
from kvtcd.core.forms import BIT, Pattern, Range
from kvtcd.core.message import Request

MAX_DIM = 1 << 20
"""Bound on each of layers, heads and head_dim: far above any model, far below overflow."""
MAX_STREAMS = 8
_Dim = Annotated[int, Range(1, MAX_DIM)]


class Dtype(StrEnum):
    """Element type of a raw block; the name is torch's and numpy's."""

    F32 = "float32"
    BF16 = "bfloat16"
    F16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is Dtype.F32 else 2


@dataclass(frozen=True, slots=True)
class Stream(Request):
    """One tensor family of a layer; `rope` says whether its vectors are rotated by position."""

    name: Annotated[str, Pattern("[A-Za-z_][A-Za-z0-9_]{0,15}", "a short identifier")]
    heads: _Dim
    head_dim: _Dim
    rope: Annotated[bool, BIT]

    def __post_init__(self) -> None:
        if not (self.name.isascii() and self.name.isidentifier() and len(self.name) <= 16):
            raise BadIdentity("streams.name", f"{self.name!r} is not a short identifier")
        for field in ("heads", "head_dim"):
            if not 1 <= getattr(self, field) <= MAX_DIM:
                raise BadIdentity(f"streams.{field}", f"{getattr(self, field)} is not within 1..{MAX_DIM}")

    @property
    def width(self) -> int:
        """Elements of one token in one layer, ``H*D``."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Layout(Request):
    """Streams, layers and element type of every block of a namespace.

    Raises:
        BadIdentity: no stream, a name twice, or a dimension out of range.
    """

    streams: Annotated[tuple[Stream, ...], Range(1, MAX_STREAMS)]
    layers: _Dim
    dtype: Dtype

    def __post_init__(self) -> None:
        if not 1 <= len(self.streams) <= MAX_STREAMS:
            raise BadIdentity("streams", f"{len(self.streams)} streams; 1 to {MAX_STREAMS} are supported")
        if len({s.name for s in self.streams}) != len(self.streams):
            raise BadIdentity("streams", "a stream name occurs twice")
        if not 1 <= self.layers <= MAX_DIM:
            raise BadIdentity("layers", f"{self.layers} is not within 1..{MAX_DIM}")

    def features(self, stream: Stream) -> int:
        """``p`` of one stream: elements of one token over all layers."""
        return self.layers * stream.width

    @property
    def token_elements(self) -> int:
        """Elements of one token over all streams and layers."""
        return sum(self.features(s) for s in self.streams)

    @property
    def token_bytes(self) -> int:
        """Raw bytes of one token."""
        return self.token_elements * self.dtype.itemsize

    def nbytes(self, tokens: int) -> int:
        """Raw bytes of a block of `tokens` tokens."""
        return self.token_bytes * tokens

    def spans(self, tokens: int) -> Iterator[tuple[Stream, int, int]]:
        """Yield (stream, offset, nbytes) of each stream in a raw block of `tokens` tokens."""
        offset = 0
        for stream in self.streams:
            nbytes = self.features(stream) * tokens * self.dtype.itemsize
            yield stream, offset, nbytes
            offset += nbytes

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON: 32 bytes that name this layout in blobs and profiles."""
        return hashlib.sha256(canonical_json(self.to_json())).digest()


def canonical_json(value: object) -> bytes:
    """Serialise to the one spelling whose hash is an identity: sorted keys, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def kv_layout(*, layers: int, kv_heads: int, head_dim: int, dtype: Dtype) -> Layout:
    """Return the layout of a model with ordinary keys and values."""
    return Layout(
        (Stream("k", kv_heads, head_dim, rope=True), Stream("v", kv_heads, head_dim, rope=False)),
        layers,
        dtype,
    )
