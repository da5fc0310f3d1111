"""Blocks made of exact and coded runs of tokens: what codecs that lose something decode alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from kvtcd.codec.exact import exact_sizes, from_planes
from kvtcd.codec.lossless import check_blob, check_raw
from kvtcd.codec.ports import BlobDecoder, Symbols
from kvtcd.codec.profile import Profile
from kvtcd.codec.rope import Rotation
from kvtcd.codec.sections import Part, by_run, check_runs, require
from kvtcd.codec.transform import Transform, views
from kvtcd.core.blob import Blob, CodecId, Header, Kind, Section
from kvtcd.core.errors import BadField, ProfileMismatch
from kvtcd.core.identity import Rope
from kvtcd.core.layout import Layout


class BlockDecoder(BlobDecoder):
    """Decodes blocks of one layout.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        profile: whose digest blobs must name; None for a codec that needs none.
        device: where raw blocks lie.
    """

    codec: CodecId
    version: int

    def __init__(
        self, layout: Layout, rope: Rope | None, profile: Profile | None, device: torch.device
    ) -> None:
        self.layout = layout
        self._rope, self._digest, self._device = rope, profile.digest if profile else bytes(32), device

    @abstractmethod
    def _check_header(self, header: Header) -> None:
        """Raise BadField if there is nothing to decode such a blob with."""

    @abstractmethod
    def _sizes(self, found: Mapping[Part, Section], header: Header, count: int) -> dict[Part, int]:
        """Return the sections of a coded run of so many tokens, with their uncompressed sizes."""

    @abstractmethod
    def _restore(
        self, found: Mapping[Part, Tensor], index: int, header: Header, *, position: int, out: Tensor,
        at_once: int,
    ) -> Iterator[slice]:  # fmt: skip
        """Write one stream's coded run into `out`, ``[L, T, H, D]``, whose first token is at `position`.

        Yields:
            Layers that are written, so many `at_once`, in order.
        """

    def check(self, blob: Blob) -> None:
        """Compare a blob with layout and profile; see `BlobDecoder`.

        Raises:
            ProfileMismatch: the blob was written with another profile.
        """
        header = blob.header
        check_blob(blob, self.layout, self.codec, self.version)
        if header.profile != self._digest:
            raise ProfileMismatch("digest", header.profile.hex(), self._digest.hex())
        self._check_header(header)
        if header.first_token is None:
            raise BadField("blob", "a coded block must know the position of its first token")
        for (_, count), found in check_runs(blob).items():
            exact = exact_sizes(self.layout, count)
            require(found, exact if exact.keys() & found else self._sizes(found, header, count))

    def synthesize(self, symbols: Symbols, out: Tensor) -> None:
        """Decode a block; see `BlobDecoder`.

        Raises:
            BadField: the sections of a run do not fit each other.
        """
        for _ in self.parts(symbols, out, out.numel()):
            pass

    def parts(self, symbols: Symbols, out: Tensor, nbytes: int) -> Iterator[Sequence[slice]]:
        """Decode a block, a few layers of all streams at a time; see `BlobDecoder`.

        Raises:
            BadField: the sections of a run do not fit each other.
        """
        header = symbols.header
        assert header.first_token is not None, "`check` has seen to it"
        check_raw(out, self.layout, header.tokens)
        layers = self.layout.layers
        at_once = max(1, nbytes * layers // max(1, out.numel()))
        block = views(out, self.layout, header.tokens)
        # Layers are done with the last run, so that is the longest.
        *runs, last = sorted(by_run(symbols.sections).items(), key=lambda run: run[0][1])
        for run, found in runs:
            for _ in self._run(run, found, header, block, layers):
                pass
        for part in self._run(*last, header, block, at_once):
            yield [
                slice(offset + size * part.start // layers, offset + size * part.stop // layers)
                for _, offset, size in self.layout.spans(header.tokens)
            ]

    def _run(
        self, run: tuple[int, int], found: Mapping[Part, Tensor], header: Header, block: Sequence[Tensor],
        at_once: int,
    ) -> Iterator[slice]:  # fmt: skip
        """Write a run, given by its first token and their number; yield layers of which all is written."""
        (start, count), position = run, header.first_token or 0
        if any(part.kind is Kind.PLANE for part in found):
            from_planes(found, block, start, count)
            yield slice(0, self.layout.layers)
            return
        streams = [
            self._restore(
                found, index, header, position=position + start, out=view[:, start : start + count],
                at_once=at_once,
            )
            for index, view in enumerate(block)
        ]  # fmt: skip
        for parts in zip(*streams, strict=True):
            yield parts[0]

    def _rotation(self, index: int, position: int, tokens: int, *, inverse: bool) -> Rotation | None:
        if not self.layout.streams[index].rope or self._rope is None:
            return None
        return Rotation(self._rope, position, tokens, inverse=inverse, device=self._device)


class RunDecoder(BlockDecoder):
    """Decodes blocks of one layout under one profile, as coefficients of its bases.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        profile: whose digest blobs must name.
        transforms: enters the use of those of each stream (`residency.Residency.hold`).
        device: where the products run, and where raw blocks lie.
    """

    def __init__(
        self,
        layout: Layout,
        rope: Rope | None,
        profile: Profile,
        transforms: Callable[[], AbstractContextManager[Sequence[Transform]]],
        device: torch.device,
    ) -> None:
        super().__init__(layout, rope, profile, device)
        self.profile, self._transforms = profile, transforms
        if device.type == "cpu":  # no budget there, and the first block after a start shall not wait for them
            with transforms():
                pass

    @abstractmethod
    def _coefficients(self, found: Mapping[Part, Tensor], index: int, header: Header, count: int) -> Tensor:
        """Return the coefficients of one stream's coded run, float32 ``[rank, T]``."""

    def _restore(
        self, found: Mapping[Part, Tensor], index: int, header: Header, *, position: int, out: Tensor,
        at_once: int,
    ) -> Iterator[slice]:  # fmt: skip
        count = out.shape[1]
        coefficients = self._coefficients(found, index, header, count)
        rotation = self._rotation(index, position, count, inverse=False)
        with self._transforms() as transforms:
            yield from transforms[index].inverse(coefficients, rotation, out, at_once)
