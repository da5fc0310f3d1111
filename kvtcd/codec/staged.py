"""Codecs whose products run on a GPU, for blocks that lie in host memory.

What goes over the bus is the raw block, once, and symbols or compressed chunks. Copies and kernels are
launched on the stream that is current, and what is returned may be used by whoever comes behind them on a
stream. Bases and whatever else is kept between blocks were put on the device by copies that wait, so every
stream may read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtcd.codec import nvcomp, ports
from kvtcd.codec.nvcomp import Nvcomp
from kvtcd.codec.ports import BlobDecoder, Encoded, Encoder, Symbols
from kvtcd.codec.sections import Scratch
from kvtcd.codec.stages import stage
from kvtcd.core.blob import CHUNK_BYTES, Blob


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What does the work of codecs; `nvcomp` None: a CPU does the entropy stage."""

    device: torch.device
    nvcomp: Nvcomp | None = None


class StagedEncoder(Encoder):
    """Encodes on a device what lies in host memory.

    Args:
        encoder: whose raw blocks lie on the device.
        accelerator: where that is.
    """

    def __init__(self, encoder: Encoder, accelerator: Accelerator) -> None:
        self._encoder, self._device, self._nvcomp = encoder, accelerator.device, accelerator.nvcomp

    def analyze(
        self, raw: Tensor, *, tokens: int, first_token: int | None, after: int, scratch: Scratch
    ) -> Symbols:
        """Copy a block to the device and turn it into symbols in host memory; see `Encoder`."""
        with stage("copy"):
            there = torch.empty_like(raw, device=self._device).copy_(raw, non_blocking=True)
        return self._encoder.analyze(
            there, tokens=tokens, first_token=first_token, after=after, scratch=scratch
        )

    def deflate(self, symbols: Symbols) -> Encoded:
        """Write a blob, on the device where there is enough of it; see `ports.deflate`."""
        chunks = sum(-(-section.data.numel() // CHUNK_BYTES) for section in symbols.sections)
        if self._nvcomp is None or not nvcomp.worthwhile(chunks):
            return ports.deflate(symbols)
        with stage("deflate"):
            blob = self._nvcomp.deflated(symbols.header, symbols.sections)
        return Encoded(blob, symbols.header.codec, symbols.reason)


class StagedDecoder(BlobDecoder):
    """Decodes on a device into host memory.

    Args:
        decoder: whose raw blocks lie on the device.
        accelerator: where that is.
    """

    def __init__(self, decoder: BlobDecoder, accelerator: Accelerator) -> None:
        self._decoder, self._device, self._nvcomp = decoder, accelerator.device, accelerator.nvcomp

    def check(self, blob: Blob) -> None:
        """Compare a blob with layout and profile; see `BlobDecoder`."""
        self._decoder.check(blob)

    def inflate(self, blob: Blob, scratch: Scratch) -> Symbols:
        """Check a blob and read its symbols, on the device where there are enough; see `BlobDecoder`."""
        chunks = sum(len(section.chunks) for section in blob.sections)
        if self._nvcomp is None or not nvcomp.worthwhile(chunks):
            return self._decoder.inflate(blob, scratch)
        self._decoder.check(blob)
        with stage("inflate"):
            return Symbols(blob.header, self._nvcomp.inflated(blob))

    def synthesize(self, symbols: Symbols, out: Tensor) -> None:
        """Decode a block on the device and copy it to `out`, once; see `BlobDecoder`."""
        there = torch.empty_like(out, device=self._device)
        self._decoder.synthesize(symbols, there)
        with stage("copy"):
            out.copy_(there, non_blocking=True)
