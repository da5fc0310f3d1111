"""A stand-in for `nvidia.nvcomp` 6 in host memory: zlib behind the same calls, strict about every argument.

What is checked: types, bounds, alignment, that outputs do not overlap and have the size they should have,
that configurations come from sizes, that a codec stays with its stream and thread. Not: that nvCOMP does so.
"""

from __future__ import annotations

import enum
import sys
import threading
import types
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest

_ALIGN = 16


class BitstreamKind(enum.Enum):
    """As in nvCOMP."""

    NVCOMP_NATIVE = 0
    RAW = 1


@dataclass
class BatchArray:
    """A buffer carved by a table."""

    buffer: torch.Tensor
    offsets: list[int]
    sizes: list[int]
    stream: int
    written: list[int] | None = None

    @property
    def buffer_sizes(self) -> list[int]:
        """Sizes, of what was written if anything was."""
        return list(self.sizes if self.written is None else self.written)

    def parts(self) -> list[torch.Tensor]:
        """The entries."""
        return [self.buffer[at : at + size] for at, size in zip(self.offsets, self.sizes, strict=True)]

    def slack(self) -> int:
        """Bytes of the buffer behind the last entry."""
        return self.buffer.numel() - max(map(sum, zip(self.offsets, self.sizes, strict=True)))

    def check_apart(self) -> None:
        """Outputs must not overlap."""
        spans = sorted(zip(self.offsets, self.sizes, strict=True))
        assert all(at + size <= following for (at, size), (following, _) in pairwise(spans))


def as_array(source: torch.Tensor, cuda_stream: int = 0) -> torch.Tensor:  # noqa: ARG001 - as in nvCOMP
    """Wrap one buffer."""
    return source


def as_arrays(buffer: torch.Tensor, offsets: list[int], sizes: list[int], cuda_stream: int = 0) -> BatchArray:
    """Carve a buffer."""
    assert buffer.dtype == torch.uint8
    assert buffer.is_contiguous()
    assert isinstance(offsets, list)
    assert isinstance(sizes, list)
    for at, size in zip(offsets, sizes, strict=True):
        assert type(at) is type(size) is int
        assert size > 0
        assert 0 <= at <= at + size <= buffer.numel()
        assert (buffer.data_ptr() + at) % _ALIGN == 0
    return BatchArray(buffer, offsets, sizes, cuda_stream)


class Codec:
    """Raw DEFLATE by zlib, whatever the algorithm."""

    made: list[Codec]
    flaw: str

    def __init__(self, *, algorithm, bitstream_kind, device_id, cuda_stream, algorithm_type=None) -> None:
        assert algorithm in {"Deflate", "GDeflate", "Zstd", "ANS"}
        assert (algorithm_type is None) == (algorithm in {"Zstd", "ANS"})
        self.device_id = device_id
        assert bitstream_kind is BitstreamKind.RAW
        self.algorithm = algorithm, algorithm_type
        self.stream, self.thread = cuda_stream, threading.get_ident()
        self.decodes, self.encodes, self.configured = 0, 0, 0
        self.slack = sys.maxsize
        """The least that was behind an input."""
        self.made.append(self)

    def _belongs(self, *batches: BatchArray) -> None:
        assert threading.get_ident() == self.thread, "a codec is not for several threads"
        current = torch.cuda.current_stream(torch.device("cpu")).cuda_stream
        assert {self.stream, current} == {self.stream}
        assert {batch.stream for batch in batches} <= {self.stream}

    def _written(self, nbytes: int, *, last: bool) -> int:
        """How much of a chunk is written."""
        match self.flaw:
            case "writes nothing":
                return 0
            case "stops halfway":
                return nbytes // 2 if last else nbytes
            case _:
                return nbytes

    def compression_config(self, sizes: list[int]) -> tuple:
        """How to encode chunks of these sizes."""
        assert isinstance(sizes, list)
        assert min(sizes) > 0
        self.configured += 1
        return (self, "encode", sizes)

    def decompression_config(self, config: tuple) -> tuple:
        """How to decode them: from sizes alone, for all else makes the host wait."""
        owner, kind, sizes = config
        assert (owner, kind) == (self, "encode")
        return (self, "decode", sizes)

    def get_max_comp_buffer_size(self, source: torch.Tensor) -> int:
        """More than the source, and no multiple of anything."""
        return source.numel() + source.numel() // 100 + 37

    def decode(self, srcs: BatchArray, *, out: BatchArray, decompression_config: tuple) -> BatchArray:
        """Inflate into `out`."""
        self._belongs(srcs, out)
        self.slack = min(self.slack, srcs.slack())
        out.check_apart()
        assert decompression_config == (self, "decode", out.sizes)
        self.decodes += 1
        if self.flaw == "says less":
            out.written = [out.sizes[0] - 1, *out.sizes[1:]]
        for number, (source, target) in enumerate(zip(srcs.parts(), out.parts(), strict=True), 1):
            reader = zlib.decompressobj(-15)
            data = reader.decompress(source.numpy().tobytes(), target.numel() + 1)
            assert reader.eof
            assert not reader.unused_data
            assert len(data) == target.numel()
            some = self._written(len(data), last=number == len(out.sizes))
            target[:some] = torch.frombuffer(bytearray(data), dtype=torch.uint8)[:some]
            if self.flaw == "reads wrong":
                target[-1] += 1
        return out

    def encode(self, srcs: BatchArray, *, out: BatchArray, compression_config: tuple) -> BatchArray:
        """Deflate into `out`, each to its own room; the size is known afterwards."""
        self._belongs(srcs, out)
        self.slack = min(self.slack, srcs.slack())
        out.check_apart()
        assert compression_config == (self, "encode", srcs.sizes)
        out.written = []
        for number, (source, target) in enumerate(zip(srcs.parts(), out.parts(), strict=True), 1):
            if target.numel() < self.get_max_comp_buffer_size(source):
                raise ValueError("the output is too small")
            writer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
            data = writer.compress(source.numpy().tobytes()) + writer.flush()
            if self.flaw == "writes wrong":
                data = b"\xff" + data[1:]
            some = self._written(len(data), last=number == len(out.sizes))
            target[:some] = torch.frombuffer(bytearray(data), dtype=torch.uint8)[:some]
            out.written.append(0 if self.flaw == "says less" else len(data))
        self.encodes += 1
        return out


@dataclass
class FakeNvcomp:
    """What was done with it."""

    codecs: list = field(default_factory=list)
    allocators: list = field(default_factory=list)

    def set_device_allocator(self, allocator: object = None) -> None:
        """Note an allocator; None gives it up."""
        self.allocators.append(allocator)


def install(monkeypatch: pytest.MonkeyPatch, version: str = "6.0.0", flaw: str = "") -> FakeNvcomp:
    """Put it in nvCOMP's place until the test ends. `fake_cuda` must be there too: it has the streams."""
    state = FakeNvcomp()
    monkeypatch.setattr(Codec, "made", state.codecs, raising=False)
    monkeypatch.setattr(Codec, "flaw", flaw, raising=False)
    api = types.ModuleType("nvidia.nvcomp")
    for name, value in {
        "__version__": version, "BitstreamKind": BitstreamKind, "Codec": Codec, "as_array": as_array,
        "as_arrays": as_arrays, "set_device_allocator": state.set_device_allocator,
    }.items():  # fmt: skip
        setattr(api, name, value)
    parent = types.ModuleType("nvidia")
    parent.nvcomp = api
    monkeypatch.setitem(sys.modules, "nvidia", parent)
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", api)
    return state
