"""Blocks made of exact and coded runs of tokens: what codecs that lose something decode alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from kvtcd.codec.exact import exact_sizes, from_planes
from kvtcd.codec.graphs import Graphs, Work
from kvtcd.codec.lossless import check_blob, check_raw
from kvtcd.codec.ports import BlobDecoder, Symbols
from kvtcd.codec.profile import Profile
from kvtcd.codec.rope import Rotation, inverse_frequencies
from kvtcd.codec.sections import Part, by_run, check_runs, require
from kvtcd.codec.stages import stage
from kvtcd.codec.transform import Transform, layer_blocks, views
from kvtcd.core.blob import Blob, CodecId, Header, Kind, Section
from kvtcd.core.errors import BadField, ProfileMismatch
from kvtcd.core.identity import Rope
from kvtcd.core.layout import Layout


def _unchecked(*_: Tensor) -> None:
    """Check nothing."""


@dataclass(frozen=True, slots=True)
class Packed:
    """What one stream's coded run is restored from.

    Attributes:
        key: all that `coefficients` of the same key have in common, but for the shapes of inputs.
        inputs: in host memory or on the device.
        coefficients: of these inputs, the coefficients, float32 ``[rank, T]``, and what `check` takes; as
            `graphs.Work`, but for bases.
        check: waits for that, and raises BadField if the run contradicts itself.
    """

    key: Hashable
    inputs: Sequence[Tensor]
    coefficients: Callable[..., Sequence[Tensor]]
    check: Callable[..., None] = _unchecked


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
        self._planes = lru_cache(maxsize=1)(self._make_planes)

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

    def _rotation(self, index: int, position: int | Tensor, tokens: int, *, inverse: bool) -> Rotation | None:
        if not self.layout.streams[index].rope or self._rope is None:
            return None
        return Rotation(
            self._rope,
            position,
            tokens,
            inverse=inverse,
            device=self._device,
            planes=self._planes(self._rope),
        )

    def _make_planes(self, rope: Rope) -> tuple[Tensor, float]:
        frequencies, factor = inverse_frequencies(rope)
        return frequencies.to(self._device), factor


class RunDecoder(BlockDecoder):
    """Decodes blocks of one layout under one profile, as coefficients of its bases.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        profile: whose digest blobs must name.
        transforms: enters the use of those of each stream (`residency.Residency.hold`).
        device: where the products run, and where raw blocks lie.
        graphs: replay there what recurs; None: nothing is replayed.
    """

    def __init__(
        self,
        layout: Layout,
        rope: Rope | None,
        profile: Profile,
        transforms: Callable[[], AbstractContextManager[Sequence[Transform]]],
        device: torch.device,
        *,
        graphs: Graphs | None,
    ) -> None:
        super().__init__(layout, rope, profile, device)
        self.profile, self._transforms, self._graphs = profile, transforms, graphs
        if device.type == "cpu":  # no budget there, and the first block after a start shall not wait for them
            with transforms():
                pass

    @abstractmethod
    def _packed(self, found: Mapping[Part, Tensor], index: int, header: Header, count: int) -> Packed:
        """Return what one stream's coded run is restored from."""

    def _launched(
        self, transforms: Sequence[Transform], key: Hashable, work: Work, inputs: Sequence[Tensor]
    ) -> Iterator[Sequence[Tensor]]:
        """Do work that may be replayed; see `Graphs.run`. All who have such a key do the same."""
        if self._graphs is None:
            return work(transforms, *inputs)
        own = (self.codec, self.layout.digest, self._rope, self.profile.digest)
        return self._graphs.run(transforms, (own, key), work, inputs)

    def _restore(
        self, found: Mapping[Part, Tensor], index: int, header: Header, *, position: int, out: Tensor,
        at_once: int,
    ) -> Iterator[slice]:  # fmt: skip
        packed = self._packed(found, index, header, out.shape[1])
        groups = [
            [
                slice(first + part.start, first + part.stop)
                for part in layer_blocks(out[first : first + at_once])
            ]
            for first in range(0, len(out), at_once)
        ]
        parts = [part for group in groups for part in group]
        key = ("decode", index, packed.key, tuple((part.start, part.stop) for part in parts))
        work = partial(
            self._features,
            index=index, coefficients=packed.coefficients, shape=out.shape, dtype=out.dtype, parts=parts,
        )  # fmt: skip
        checked: Sequence[Tensor] = ()
        with self._transforms() as transforms:
            told = self._launched(transforms, key, work, [position_tensor(position), *packed.inputs])
            for group in groups:
                for part in group:
                    values, *checked = next(told)
                    with stage("rotate"):
                        out[part] = values
                yield slice(group[0].start, group[-1].stop)
        # The host waits only now that the device has everything to do.
        packed.check(*checked)

    def _features(
        self, transforms: Sequence[Transform], position: Tensor, *inputs: Tensor,
        index: int, coefficients: Callable[..., Sequence[Tensor]], shape: Sequence[int],
        dtype: torch.dtype, parts: Sequence[slice],
    ) -> Iterator[Sequence[Tensor]]:  # fmt: skip
        """Yield the features of parts of layers, and what is to be checked."""
        found, *checked = coefficients(*inputs)
        rotation = self._rotation(index, position, shape[1], inverse=False)
        for values in transforms[index].features(found, rotation, shape, dtype, parts):
            yield (values, *checked)


def position_tensor(position: int) -> Tensor:
    """Return a position as `Rotation` takes it from a tensor."""
    return torch.tensor(float(position), dtype=torch.float64)
