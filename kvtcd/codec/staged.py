"""Codecs whose products run on a GPU, for blocks that lie in host memory.

What goes over the bus is the raw block, once, and symbols or compressed chunks. Copies and kernels are
launched on the stream that is current, and what is returned may be used by whoever comes behind them on a
stream. Bases and whatever else is kept between blocks were put on the device by copies that wait, so every
stream may read them.

Where the device has no memory for a block, what is not in use there is given up and the block tried once
more; then a CPU does it. So it does where nvCOMP fails. Errors from which CUDA does not recover end the
process (`engine.cuda`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kvtcd.codec import fused, nvcomp, ports
from kvtcd.codec.bus import Bus
from kvtcd.codec.nvcomp import Nvcomp
from kvtcd.codec.ports import BlobDecoder, Encoded, Encoder, Symbols
from kvtcd.codec.residency import Residency
from kvtcd.codec.sections import Scratch
from kvtcd.codec.stages import stage
from kvtcd.codec.uniform import Arithmetic, InTorch
from kvtcd.core.blob import CHUNK_BYTES, Blob
from kvtcd.core.devices import DeviceName

PART_BYTES = 16 << 20
"""Of a block that is decoded at a time: while they go over the bus, in a third of a millisecond, the next
ones are decoded. To tell the device of smaller ones would take the host longer than that."""


_log = logging.getLogger(__name__)
T = TypeVar("T")
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What does the work of codecs.

    Attributes:
        device: where.
        name: of it in policies.
        nvcomp: None: a CPU does the entropy stage.
        arithmetic: who turns coefficients into codes, and back.
        bus: None: copies to host memory are launched behind all else.
        residency: what lies on the device between blocks.
        spared: told of each block that a CPU has worked on in its place, by ``memory`` or ``nvcomp``.
        told: by which of these the log has told of it.
    """

    device: torch.device
    nvcomp: Nvcomp | None = None
    arithmetic: Arithmetic = field(default_factory=InTorch)
    bus: Bus | None = None
    residency: Residency = field(default_factory=Residency)
    spared: Callable[[str], None] = lambda _: None
    told: set[str] = field(default_factory=set)
    name: DeviceName = "cuda"

    @classmethod
    def on(
        cls, device: torch.device, residency: Residency, spared: Callable[[str], None] = lambda _: None,
        name: DeviceName = "cuda",
    ) -> Accelerator:  # fmt: skip
        """Return all that a CUDA device has to offer. Sums of products are float32, in this whole process."""
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        return cls(
            device,
            nvcomp.load(device, residency),
            fused.load(device),
            Bus(device),
            residency,
            spared,
            name=name,
        )

    def relieve(self) -> None:
        """Give up what is not in use on the device, once it has done what the current stream was told."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.residency.drop_unused(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def spare(self, why: str, error: RuntimeError) -> None:
        """Tell that a CPU does in its place what failed."""
        self.spared(why)
        log = _log.debug if why in self.told else _log.warning
        self.told.add(why)
        log("a CPU does for %s what failed there, as all that fails so from now on: %s", self.device, error)


class StagedEncoder(Encoder):
    """Encodes on a device what lies in host memory.

    Args:
        encoder: whose raw blocks lie on the device.
        accelerator: where that is.
        spare: makes the same encoder for a CPU.
    """

    def __init__(self, encoder: Encoder, accelerator: Accelerator, spare: Callable[[], Encoder]) -> None:
        self._encoder, self._accelerator, self._spare = encoder, accelerator, spare

    def analyze(
        self, raw: Tensor, *, tokens: int, first_token: int | None, after: int, scratch: Scratch
    ) -> Symbols:
        """Copy a block to the device and turn it into symbols in host memory; see `Encoder`."""

        def by(encoder: Encoder, block: Tensor) -> Symbols:
            return encoder.analyze(
                block, tokens=tokens, first_token=first_token, after=after, scratch=scratch
            )

        def launch() -> Symbols:
            with stage("copy"):
                there = torch.empty_like(raw, device=self._accelerator.device)
                there.copy_(raw, non_blocking=True)
            return by(self._encoder, there)

        return _attempted(self._accelerator, [launch] * _ATTEMPTS, lambda: by(self._spare(), raw))

    def deflate(self, symbols: Symbols) -> Encoded:
        """Write a blob, on the device where there is enough of it; see `ports.deflate`."""
        chunks = sum(-(-section.data.numel() // CHUNK_BYTES) for section in symbols.sections)
        found = self._accelerator.nvcomp
        if found is None or not nvcomp.worthwhile(chunks):
            return ports.deflate(symbols)

        def launch() -> Encoded:
            with stage("deflate"):
                blob = found.deflated(symbols.header, symbols.sections)
            return Encoded(blob, symbols.header.codec, symbols.reason)

        return _by_nvcomp(self._accelerator, launch, lambda: ports.deflate(symbols))


class StagedDecoder(BlobDecoder):
    """Decodes on a device into host memory.

    Args:
        decoder: whose raw blocks lie on the device.
        accelerator: where that is.
        spare: makes the same decoder for a CPU.
    """

    def __init__(
        self, decoder: BlobDecoder, accelerator: Accelerator, spare: Callable[[], BlobDecoder]
    ) -> None:
        self._decoder, self._accelerator, self._spare = decoder, accelerator, spare

    def check(self, blob: Blob) -> None:
        """Compare a blob with layout and profile; see `BlobDecoder`."""
        self._decoder.check(blob)

    def inflate(self, blob: Blob, scratch: Scratch) -> Symbols:
        """Check a blob and read its symbols, on the device where there are enough; see `BlobDecoder`."""
        chunks = sum(len(section.chunks) for section in blob.sections)
        found = self._accelerator.nvcomp
        if found is None or not nvcomp.worthwhile(chunks):
            return self._decoder.inflate(blob, scratch)
        self._decoder.check(blob)

        def launch() -> Symbols:
            with stage("inflate"):
                return Symbols(blob.header, found.inflated(blob))

        return _by_nvcomp(self._accelerator, launch, lambda: self._decoder.inflate(blob, scratch))

    def synthesize(self, symbols: Symbols, out: Tensor) -> None:
        """Decode a block on the device, and copy each part to `out` while the next is decoded.

        Where memory is short, parts are single layers the second time.
        """

        def on_cpu() -> None:
            here = [replace(section, data=section.data.cpu()) for section in symbols.sections]
            self._spare().synthesize(replace(symbols, sections=here), out)

        attempts = [partial(self._launch, symbols, out, nbytes) for nbytes in (PART_BYTES, 0)]
        _attempted(self._accelerator, attempts, on_cpu)

    def _launch(self, symbols: Symbols, out: Tensor, nbytes: int) -> None:
        bus = self._accelerator.bus
        there = torch.empty_like(out, device=self._accelerator.device)
        try:
            for ranges in self._decoder.parts(symbols, there, nbytes):
                with stage("copy"), bus.beside() if bus else nullcontext():
                    for each in ranges:
                        out[each].copy_(there[each], non_blocking=True)
        finally:
            if bus:
                with stage("copy"):  # what is left of it
                    bus.join()


def _attempted(accelerator: Accelerator, attempts: Sequence[Callable[[], T]], on_cpu: Callable[[], T]) -> T:
    """Return what the first attempt returns that finds memory on the device, or what a CPU does."""
    failed: torch.OutOfMemoryError | None = None
    for attempt in attempts:
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            failed = error.with_traceback(None)  # which holds what the attempt had
        accelerator.relieve()
    assert failed is not None, "there is an attempt"
    accelerator.spare("memory", failed)
    return on_cpu()


def _by_nvcomp(accelerator: Accelerator, launch: Callable[[], T], on_cpu: Callable[[], T]) -> T:
    """Return what nvCOMP does, or a CPU where it cannot."""
    try:
        return launch()
    except RuntimeError as error:
        accelerator.spare("memory" if isinstance(error, torch.OutOfMemoryError) else "nvcomp", error)
    return on_cpu()
