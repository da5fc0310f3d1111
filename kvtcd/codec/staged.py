"""Codecs whose products run on a GPU, for blocks that lie in host memory.

What goes over the bus is the raw block, once, and symbols or compressed chunks. Copies and kernels are
launched on the stream that is current, and what is returned may be used by whoever comes behind them on a
stream. Bases and whatever else is kept between blocks were put on the device by copies that wait, so every
stream may read them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtcd.codec import nvcomp, ports
from kvtcd.codec.bus import Bus
from kvtcd.codec.nvcomp import Nvcomp
from kvtcd.codec.ports import BlobDecoder, Encoded, Encoder, Symbols
from kvtcd.codec.sections import Scratch
from kvtcd.codec.stages import stage
from kvtcd.core.blob import CHUNK_BYTES, Blob

PART_BYTES = 16 << 20
"""Of a block that is decoded at a time: while they go over the bus, in a third of a millisecond, the next
ones are decoded. To tell the device of smaller ones would take the host longer than that."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What does the work of codecs.

    Attributes:
        device: where.
        nvcomp: None: a CPU does the entropy stage.
        bus: None: copies to host memory are launched behind all else.
    """

    device: torch.device
    nvcomp: Nvcomp | None = None
    bus: Bus | None = None

    @classmethod
    def on(cls, device: torch.device) -> Accelerator:
        """Return all that a CUDA device has to offer."""
        return cls(device, nvcomp.load(device), Bus(device))


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
        self._decoder, self._device = decoder, accelerator.device
        self._nvcomp, self._bus = accelerator.nvcomp, accelerator.bus

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
        """Decode a block on the device, and copy each part to `out` while the next is decoded."""
        there = torch.empty_like(out, device=self._device)
        for ranges in self._decoder.parts(symbols, there, PART_BYTES):
            with stage("copy"), self._bus.beside() if self._bus else nullcontext():
                for each in ranges:
                    out[each].copy_(there[each], non_blocking=True)
        if self._bus:
            with stage("copy"):  # what is left of it
                self._bus.join()
