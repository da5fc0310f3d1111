"""Codecs whose products run on a GPU, for blocks that lie in host memory.

What goes over the bus is the raw block, once, and symbols or compressed chunks; of a block that is decoded to
where it is wanted on the device, these alone. Copies and kernels are
launched on the stream that is current, and what is returned may be used by whoever comes behind them on a
stream. Bases and whatever else is kept between blocks were put on the device by copies that wait, so every
stream may read them.

Where the device has no memory for a block, or for the codec itself, what is not in use there is given up and
it is tried once more; then a CPU does it. So it does where nvCOMP fails, or has not done what it was told to.
Errors from which CUDA does not recover end the process (`engine.cuda`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kvtcd.codec import fused, nvcomp, ports
from kvtcd.codec.bus import Bus
from kvtcd.codec.foreign import Foreign
from kvtcd.codec.graphs import Graphs
from kvtcd.codec.nvcomp import Inflating, Nvcomp
from kvtcd.codec.ports import BlobDecoder, Encoded, Encoder, Symbols
from kvtcd.codec.recording import ALONE, CudaTapes
from kvtcd.codec.residency import Residency
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.sections import Scratch
from kvtcd.codec.stages import stage
from kvtcd.codec.uniform import Arithmetic, InTorch
from kvtcd.core.blob import CHUNK_BYTES, Blob
from kvtcd.core.devices import DeviceName
from kvtcd.core.errors import KvtcdError
from kvtcd.core.exhaustion import exhausted

PART_BYTES = 16 << 20
"""Of a block that is decoded at a time: while they go over the bus, in a third of a millisecond, the next
ones are decoded. To tell the device of smaller ones would take the host longer than that."""


_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What does the work of codecs.

    Attributes:
        device: where.
        name: of it in policies.
        nvcomp: None: a CPU does the entropy stage.
        arithmetic: who turns coefficients into codes, and back.
        graphs: replay what recurs; None: nothing is replayed.
        bus: None: copies to host memory are launched behind all else.
        foreign: lets blocks be decoded into memory of other processes there; None: they are not.
        residency: what lies on the device between blocks.
        spared: told of each block that a CPU has worked on in its place, by ``memory`` or ``nvcomp``.
        told: by which of these the log has told of it.
    """

    device: torch.device
    nvcomp: Nvcomp | None = None
    arithmetic: Arithmetic = field(default_factory=InTorch)
    graphs: Graphs | None = None
    bus: Bus | None = None
    foreign: Foreign | None = field(default=None, kw_only=True)
    residency: Residency = field(default_factory=Residency)
    spared: Callable[[str], None] = lambda _: None
    told: set[str] = field(default_factory=set)
    name: DeviceName = "cuda"

    @classmethod
    def on(
        cls, device: torch.device, residency: Residency, spared: Callable[[str], None] = lambda _: None,
        unreplayed: Callable[[str], None] = lambda _: None, name: DeviceName = "cuda",
    ) -> Accelerator:  # fmt: skip
        """Return all that a CUDA device has to offer. Sums of products are float32, in this whole process.

        `unreplayed`: as ``failed`` of `Graphs`.
        """
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        return cls(
            device,
            nvcomp.load(device, residency),
            fused.load(device),
            Graphs(device, CudaTapes(device), residency, unreplayed),
            Bus(device),
            residency,
            spared,
            name=name,
            foreign=Foreign(device),
        )

    def relieve(self) -> None:
        """Give up what is not in use on the device, once it has done what the current stream was told."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.residency.drop_unused(self.device)
        if self.device.type == "cuda":
            with ALONE:
                torch.cuda.empty_cache()

    def spare(self, why: str, error: Exception) -> None:
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

        return attempted(self._accelerator, launch, lambda: by(self._spare(), raw))

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
    """Decodes on a device, into host memory or to where a block is wanted there.

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
        decoder = self._decoder  # which keeps some of them on the device
        attempted(self._accelerator, lambda: decoder.check(blob), lambda: self._spare().check(blob))

    def inflate(self, blob: Blob, scratch: Scratch) -> Symbols:
        """Check a blob and read its symbols, on the device where there are enough; see `BlobDecoder`."""
        self.check(blob)
        chunks = sum(len(section.chunks) for section in blob.sections)
        found = self._accelerator.nvcomp
        if found is None or not nvcomp.worthwhile(chunks):
            return ports.inflate(blob, scratch)

        def launch() -> Symbols:
            with stage("inflate"):
                inflating = found.inflate(blob)
            return _Inflating(blob.header, inflating.sections, inflating=inflating, blob=blob)

        return _by_nvcomp(self._accelerator, launch, lambda: ports.inflate(blob, scratch))

    def synthesize(self, symbols: Symbols, out: Tensor) -> None:
        """Decode a block on the device, and copy each part to `out` while the next is decoded.

        Where memory is short, parts are single layers the second time.
        """
        proved = self._proved(symbols)
        first, second = (partial(self._launch, proved, out, nbytes) for nbytes in (PART_BYTES, 0))
        attempted(self._accelerator, first, partial(self._on_cpu, proved, out), second)

    def synthesize_there(self, symbols: Symbols, out: Tensor) -> None:
        """Decode a block on the device, to where it is wanted there; see `BlobDecoder`.

        Where memory is short, layers are decoded one by one the second time; what a CPU decodes is copied.
        """
        proved = self._proved(symbols)

        def launch(nbytes: int) -> None:
            for _ in self._decoder.parts(proved, out, nbytes):
                pass

        def on_cpu() -> None:
            here = torch.empty(out.numel(), dtype=out.dtype)
            self._on_cpu(proved, here)
            with stage("copy"):
                out.copy_(here)

        # By the same parts as for host memory: so they share recordings.
        first, second = (partial(launch, nbytes) for nbytes in (PART_BYTES, 0))
        attempted(self._accelerator, first, on_cpu, second)

    def _on_cpu(self, symbols: Symbols, out: Tensor) -> None:
        here = [replace(section, data=section.data.cpu()) for section in symbols.sections]
        self._spare().synthesize(replace(symbols, sections=here), out)

    def _proved(self, symbols: Symbols) -> Symbols:
        """Wait until nvCOMP has inflated them, before anything is made of them; or have a CPU do it."""
        if not isinstance(symbols, _Inflating):
            return symbols
        header, blob, inflating = symbols.header, symbols.blob, symbols.inflating
        return _by_nvcomp(
            self._accelerator,
            lambda: Symbols(header, inflating.proved()),
            lambda: ports.inflate(blob, HeapScratch()),
        )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inflating(Symbols):
    """Symbols that nvCOMP was told to inflate, and the blob, for a CPU if it has not."""

    inflating: Inflating
    blob: Blob


def attempted(
    accelerator: Accelerator, attempt: Callable[[], T], on_cpu: Callable[[], T],
    again: Callable[[], T] | None = None,
) -> T:  # fmt: skip
    """Return what an attempt returns that finds memory on the device, or what a CPU does.

    Args:
        accelerator: whose device that is.
        attempt: the first.
        on_cpu: does the same there.
        again: the second; None: as the first.
    """
    failed: RuntimeError | None = None
    for each in (attempt, again or attempt):
        try:
            return each()
        except RuntimeError as error:
            if not exhausted(error):
                raise
            failed = error.with_traceback(None)  # which holds what the attempt had
        accelerator.relieve()
    assert failed is not None, "there is an attempt"
    accelerator.spare("memory", failed)
    return on_cpu()


def _by_nvcomp(accelerator: Accelerator, launch: Callable[[], T], on_cpu: Callable[[], T]) -> T:
    """Return what nvCOMP does, or a CPU where it cannot, whatever it raises."""
    try:
        return launch()
    except KvtcdError:
        raise
    except Exception as error:  # noqa: BLE001 - it has no class of its own, and raises several of Python's
        accelerator.spare("memory" if exhausted(error) else "nvcomp", error)
    return on_cpu()
