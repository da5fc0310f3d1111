"""What every codec offers, and what it returns.

A codec has two halves, so that a pipeline can run each on a thread of its own. The tensor half works where
raw blocks lie, the entropy half on bytes in host memory; `Symbols` are what passes between them::

    raw --analyze--> symbols --deflate--> blob --inflate--> symbols --synthesize--> raw

`Encoder.encode` and `BlobDecoder.decode` are the two halves one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.sections import Plain, Scratch, deflated, inflated
from kvtcd.codec.stages import stage
from kvtcd.core.blob import Blob, CodecId, Header


class Reason(StrEnum):
    """Why a block was stored losslessly, or finer, although the policy asked for less."""

    POSITION = "position"
    """The block came without `first_token`, so its RoPE cannot be undone."""
    WINDOW = "window"
    """Every token is a sink or in the recent window."""
    NOT_FINITE = "not-finite"
    """The tokens to code hold a NaN or an infinity."""
    RANGE = "range"
    """Coefficients are beyond what codes can say, or their codes take more room than the values."""
    FINER = "finer"
    """Not losslessly: its error was above the bound, and a finer step brought it below."""
    ERROR = "error"
    """Its error was above the bound at every step."""
    UNUSUAL = "unusual"
    """A layer or head is not spread as calibration saw it: perhaps a fault in the model."""
    DRIFT = "drift"
    """Blocks of late are unlike those of calibration, and the policy has such stored losslessly."""


@dataclass(frozen=True, slots=True)
class Symbols:
    """A block between the two halves of its codec: the sections of its blob without their entropy coding.

    Attributes:
        header: of the blob.
        sections: in the order of the blob; their bytes lie in the `Scratch` they were made with.
        reason: why the codec is not the one asked for, if so.
    """

    header: Header
    sections: Sequence[Plain]
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A blob, the codec it was written with, and why that is not the one asked for."""

    blob: bytearray
    codec: CodecId
    reason: Reason | None = None


def deflate(symbols: Symbols) -> Encoded:
    """Write a blob on a CPU: the entropy half of every encoder that has no other."""
    with stage("deflate"):
        blob = deflated(symbols.header, symbols.sections)
    return Encoded(blob, symbols.header.codec, symbols.reason)


def inflate(blob: Blob, scratch: Scratch) -> Symbols:
    """Read the symbols of a checked blob on a CPU: the entropy half of every decoder that has no other.

    Raises:
        Corrupt: the blob is damaged.
    """
    with stage("inflate"):
        return Symbols(blob.header, inflated(blob, scratch))


class Encoder(Protocol):
    """Raw block to blob."""

    def analyze(
        self, raw: Tensor, *, tokens: int, first_token: int | None, after: int, scratch: Scratch
    ) -> Symbols:
        """Turn a block into symbols; the tensor half.

        Args:
            raw: flat uint8, the block as `core.layout` describes it, aligned for its element type.
            tokens: of the block.
            first_token: position of the first one in its sequence, if known.
            after: tokens known to follow the block in its sequence.
            scratch: where the symbols go.

        Raises:
            BlockMismatch: `raw` has another length than `tokens` tokens of the layout.
        """
        ...

    def deflate(self, symbols: Symbols) -> Encoded:
        """Write a blob; the entropy half. The symbols are not used after it returns."""
        return deflate(symbols)

    def encode(self, raw: Tensor, *, tokens: int, first_token: int | None, after: int) -> Encoded:
        """Encode a block: `analyze`, then `deflate`."""
        return self.deflate(
            self.analyze(raw, tokens=tokens, first_token=first_token, after=after, scratch=HeapScratch())
        )


class BlobDecoder(Protocol):
    """Blob to raw block."""

    def check(self, blob: Blob) -> None:
        """Compare a blob with its layout, and with what it was made with, before a chunk is inflated.

        Raises:
            BlockMismatch: the blob is of another layout.
            Corrupt: it contradicts itself, or what it was made with.
        """
        ...

    def synthesize(self, symbols: Symbols, out: Tensor) -> None:
        """Turn the symbols of a checked blob into a block; the tensor half.

        Args:
            symbols: made by `inflate` of the same decoder.
            out: flat uint8 of the block's raw length, aligned for its element type.

        Raises:
            BlockMismatch: `out` has another length.
            Corrupt: the symbols contradict each other.
        """
        ...

    def synthesize_there(self, symbols: Symbols, out: Tensor) -> None:
        """Do what `synthesize` does for a block that is to lie where the products run.

        Args:
            symbols: as of `synthesize`.
            out: on the device; what is in it if this raises, is undefined.
        """
        self.synthesize(symbols, out)

    def parts(
        self,
        symbols: Symbols,
        out: Tensor,
        nbytes: int,  # noqa: ARG002 - for decoders that go by layers
    ) -> Iterator[Sequence[slice]]:
        """Do what `synthesize` does, a few layers at a time where the order of the bytes allows it.

        Args:
            symbols: as of `synthesize`.
            out: the same.
            nbytes: of the block that are to be done at a time, at least a layer of it.

        Yields:
            Ranges of `out` whose bytes are done, or on a device will be when the current stream has come so
            far; each byte once.
        """
        self.synthesize(symbols, out)
        yield (slice(0, out.numel()),)

    def inflate(self, blob: Blob, scratch: Scratch) -> Symbols:
        """Check a blob and read its symbols; the entropy half.

        Raises:
            BlockMismatch: the blob is of another layout.
            Corrupt: the blob contradicts itself, or what it was made with, or is damaged.
        """
        self.check(blob)
        return inflate(blob, scratch)

    def decode(self, blob: Blob, out: Tensor) -> None:
        """Decode a block: `inflate`, then `synthesize`; raises what they raise."""
        self.synthesize(self.inflate(blob, HeapScratch()), out)
