"""What each rank of a model holds of its cache: some layers, and some KV heads of every stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtcd.codec.transform import views
from kvtcd.core.errors import ConfigError
from kvtcd.core.identity import Identity
from kvtcd.core.layout import Layout, Stream
from kvtcd.core.split import Split, all_ranks, splits


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one rank.

    Attributes:
        identity: of its caches.
        layers: of the model.
        heads: of each stream, by name.
    """

    identity: Identity
    layers: slice
    heads: Mapping[str, slice]

    @classmethod
    def whole(cls, identity: Identity) -> Part:
        """Return the part that is all of a model."""
        return cls(identity, slice(None), {stream.name: slice(None) for stream in identity.layout.streams})

    def of(self, stream: str, whole: Tensor) -> Tensor:
        """Return this part of ``[L, T, H, D]`` of a stream of the model: a view."""
        return whole[self.layers, :, self.heads[stream]]

    def take(self, raw: Tensor, layout: Layout, tokens: int) -> Tensor:
        """Return a raw block of this rank.

        Args:
            raw: block of the whole model, flat uint8.
            layout: of that.
            tokens: of the block.
        """
        streams = zip(layout.streams, views(raw, layout, tokens), strict=True)
        parts = [self.of(stream.name, view).contiguous() for stream, view in streams]
        return torch.cat([part.view(torch.uint8).flatten() for part in parts])

    def put(self, raw: Tensor, whole: Tensor, layout: Layout, tokens: int) -> None:
        """Write a raw block of this rank into its place in one of the whole model; see `take`."""
        own, every = views(raw, self.identity.layout, tokens), views(whole, layout, tokens)
        for stream, part, view in zip(layout.streams, own, every, strict=True):
            self.of(stream.name, view).copy_(part)


def parts_of(identity: Identity, split: str, stages: Sequence[int] = ()) -> list[Part]:
    """Return the parts of all ranks of a model.

    Layers go to the stages of a pipeline in order, heads to tensor-parallel ranks; where there are fewer
    heads than ranks, neighbours have the same one, as engines do it.

    Args:
        identity: of the whole model.
        split: ``tp4``, ``pp2`` or ``pp2-tp4``.
        stages: layers of each stage; equally many without.

    Raises:
        ConfigError: it names no split, or layers or heads cannot be dealt out so.
    """
    words = split.split("-")
    first = "-".join(f"{word}-rank0" for word in words)
    try:
        found = [one.kind for one in splits(first)]
    except ValueError:
        found = []
    if len(found) < len(words) or set(found) - {"pp", "tp"}:
        raise ConfigError("command line", "--split", f"{split!r} is not for instance tp4, pp2 or pp2-tp4")
    return [_part(identity, name, stages) for name in all_ranks(first)]


def _part(identity: Identity, parallel: str, stages: Sequence[int]) -> Part:
    alone = Split("", 1, 0)
    found = {split.kind: split for split in splits(parallel)}
    layers = _layers(identity.layout.layers, found.get("pp", alone), stages)
    heads = {stream.name: _heads(stream, found.get("tp", alone)) for stream in identity.layout.streams}
    streams = tuple(
        replace(stream, heads=heads[stream.name].stop - heads[stream.name].start)
        for stream in identity.layout.streams
    )
    layout = replace(identity.layout, streams=streams, layers=layers.stop - layers.start)
    return Part(replace(identity, layout=layout, parallel=parallel), layers, heads)


def _layers(layers: int, stage: Split, stages: Sequence[int]) -> slice:
    dealt = stages or [layers // stage.size] * stage.size
    if len(dealt) != stage.size or sum(dealt) != layers or min(dealt) < 1:
        why = f"{layers} layers for {stage.size} stages: say those of each, {layers} together"
        raise ConfigError("command line", "--stage-layers", why)
    start = sum(dealt[: stage.rank])
    return slice(start, start + dealt[stage.rank])


def _heads(stream: Stream, rank: Split) -> slice:
    shared, left = divmod(max(rank.size, stream.heads), min(rank.size, stream.heads))
    if left:
        why = f"{stream.heads} heads of {stream.name} cannot be dealt out to {rank.size} ranks"
        raise ConfigError("command line", "--split", why)
    if rank.size > stream.heads:
        return slice(rank.rank // shared, rank.rank // shared + 1)
    return slice(rank.rank * shared, (rank.rank + 1) * shared)
