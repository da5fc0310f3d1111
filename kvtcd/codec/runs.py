"""Blocks made of exact and coded runs of tokens: what `kvtc` and `kvtc2` decode alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

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


class RunDecoder(BlobDecoder):
    """Decodes blocks of one layout under one profile.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        profile: whose digest blobs must name.
        transforms: of each stream.
        device: where the products run, and where raw blocks lie.
    """

    codec: CodecId
    version: int

    def __init__(
        self,
        layout: Layout,
        rope: Rope | None,
        profile: Profile,
        transforms: Sequence[Transform],
        device: torch.device,
    ) -> None:
        self.layout, self.profile = layout, profile
        self._rope, self._transforms, self._device = rope, transforms, device

    @abstractmethod
    def _check_header(self, header: Header) -> None:
        """Raise BadField if the profile has nothing to decode such a blob with."""

    @abstractmethod
    def _sizes(self, found: Mapping[Part, Section], header: Header, count: int) -> dict[Part, int]:
        """Return the sections of a coded run of so many tokens, with their uncompressed sizes."""

    @abstractmethod
    def _coefficients(self, found: Mapping[Part, Tensor], index: int, header: Header, count: int) -> Tensor:
        """Return the coefficients of one stream's coded run, float32 ``[rank, T]``."""

    def check(self, blob: Blob) -> None:
        """Compare a blob with layout and profile; see `BlobDecoder`.

        Raises:
            ProfileMismatch: the blob was written with another profile.
        """
        header = blob.header
        check_blob(blob, self.layout, self.codec, self.version)
        if header.profile != self.profile.digest:
            raise ProfileMismatch("digest", header.profile.hex(), self.profile.digest.hex())
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
        header = symbols.header
        assert header.first_token is not None, "`check` has seen to it"
        check_raw(out, self.layout, header.tokens)
        block = views(out, self.layout, header.tokens)
        for (start, count), found in sorted(by_run(symbols.sections).items()):
            if any(part.kind is Kind.PLANE for part in found):
                from_planes(found, block, start, count)
                continue
            for index, view in enumerate(block):
                coefficients = self._coefficients(found, index, header, count)
                rotation = self._rotation(index, header.first_token + start, count, inverse=False)
                self._transforms[index].inverse(coefficients, rotation, view[:, start : start + count])

    def _rotation(self, index: int, position: int, tokens: int, *, inverse: bool) -> Rotation | None:
        if not self.layout.streams[index].rope or self._rope is None:
            return None
        return Rotation(self._rope, position, tokens, inverse=inverse, device=self._device)
