"""What every codec offers, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from kvtcd.core.blob import Blob, CodecId


class Reason(StrEnum):
    """Why a block was stored losslessly although the policy asked for a lossy codec."""

    POSITION = "position"
    """The block came without `first_token`, so its RoPE cannot be undone."""
    WINDOW = "window"
    """Every token is a sink or in the recent window."""
    NOT_FINITE = "not-finite"
    """The tokens to code hold a NaN or an infinity."""
    RANGE = "range"
    """A coefficient is beyond float16."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A blob, the codec it was written with, and why that is not the one asked for."""

    blob: bytearray
    codec: CodecId
    reason: Reason | None = None


class Encoder(Protocol):
    """Raw block to blob."""

    def encode(self, raw: Tensor, *, tokens: int, first_token: int | None, after: int) -> Encoded:
        """Encode a block.

        Args:
            raw: flat uint8, the block as `core.layout` describes it, aligned for its element type.
            tokens: of the block.
            first_token: position of the first one in its sequence, if known.
            after: tokens known to follow the block in its sequence.

        Raises:
            BlockMismatch: `raw` has another length than `tokens` tokens of the layout.
        """
        ...


class BlobDecoder(Protocol):
    """Blob to raw block."""

    def decode(self, blob: Blob, out: Tensor) -> None:
        """Decode a blob into `out`, flat uint8 of the block's raw length, aligned for its element type.

        Raises:
            BlockMismatch: `out` has another length, or the blob is of another layout.
            Corrupt: the blob contradicts itself, or what it was made with.
        """
        ...
