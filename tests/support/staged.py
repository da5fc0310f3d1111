"""A block through both halves of a codec, as a daemon's stages call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtcd.codec.scratch import HeapScratch
from kvtcd.core.blob import parse

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

TOKENS, FIRST = 160, 64
"""Of the block, and where it stands."""


def encode(codec, raw: Tensor):
    """Return what the codec makes of a block."""
    analyzed = codec.analyze(raw.numpy(), tokens=TOKENS, first_token=FIRST, after=0, scratch=HeapScratch())
    return analyzed.deflate()


def decode(codec, blob: bytearray, nbytes: int) -> NDArray[np.uint8]:
    """Return the block that a blob stands for."""
    out = np.full(nbytes, 0xEE, np.uint8)
    codec.inflate(parse(memoryview(blob)), HeapScratch()).synthesize(out)
    return out
