"""Which held-out rows are looked at: always as many, so that no figure depends on how many there are.

The largest of many rows is larger than that of few, the best basis *of* few rows is better on them than that
of many, and a kurtosis that the law does not have grows with what is drawn. Bounds are therefore for `ROWS`
rows, spread evenly over all documents. Fewer are not judged, nor is one document: rows of one are alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtcd.codec.profile import Profile
from kvtcd.core.errors import ConfigError, ProfileMismatch
from kvtcd.lab import held_out
from kvtcd.lab.dump import SINKS, Dump

ROWS = 2048
DOCUMENTS = 2
_NAMES = ("k", "v")


def evenly(rows: Tensor, count: int = ROWS) -> Tensor:
    """Return `count` of at least as many rows, spread evenly."""
    return rows[_places(len(rows), count)]


def missing(held: Dump) -> str:
    """Say what is missing for a verdict; empty where nothing is."""
    usable = [rows for document in held.documents if (rows := len(document.keys) - SINKS) > 0]
    if len(usable) >= DOCUMENTS and sum(usable) >= ROWS:
        return ""
    return (
        f"{sum(usable):,} held-out tokens of {len(usable)} documents, without the first {SINKS} of each; it "
        f"takes {ROWS:,} of {DOCUMENTS} documents, so that figures and bounds are of as many rows"
    )


def check(profile: Profile, held: Dump) -> None:
    """Make sure that caches are of the profile's model, and of texts that it was not made from.

    Raises:
        ConfigError: they do not say which model, or are of texts that the profile was made from.
        ProfileMismatch: they are of another model, shape or RoPE.
    """
    origin = profile.origin
    if held.weights is None:
        raise ConfigError(
            "--dump",
            "weights",
            f"is not said, so that caches of {held.model!r} cannot be told from those of another model; "
            "write them with `kvtcd eval dump`, or name the digest of the weight files in the metadata",
        )
    ours, theirs = (origin.weights, origin.adapter), (held.weights, held.adapter)
    if ours != theirs:
        raise ProfileMismatch("model", _named(held.model, *theirs), _named(origin.model, *ours))
    shape = tuple(held.documents[0].keys.shape[1:])
    wanted = [(origin.layers, stream.heads, stream.head_dim) for stream in origin.streams]
    if tuple(stream.name for stream in origin.streams) != _NAMES or any(own != shape for own in wanted):
        raise ProfileMismatch("streams", [shape, shape], wanted)
    if held.rope != origin.rope:
        raise ProfileMismatch("rope", held.rope, origin.rope)
    held_out.check(held.texts, origin.texts)


def looked_at(held: Dump) -> dict[str, Tensor]:
    """Return `ROWS` rows of both streams, float32 ``[n, L, H, D]``, RoPE undone, without the first tokens."""
    lengths = [max(len(document.keys) - SINKS, 0) for document in held.documents]
    places = _places(sum(lengths), ROWS)
    parts: dict[str, list[Tensor]] = {name: [] for name in _NAMES}
    first = 0
    for document, length in zip(held.documents, lengths, strict=True):
        at = places[(places >= first) & (places < first + length)] - first + SINKS
        first += length
        if len(at):
            parts["k"].append(held.unrotated(document)[at])
            parts["v"].append(document.values[at].to(torch.float32))
    return {name: torch.cat(own) for name, own in parts.items()}


def _places(count: int, wanted: int) -> Tensor:
    return torch.linspace(0, count - 1, wanted, dtype=torch.float64).round().long()


def _named(model: str, weights: str, adapter: str) -> str:
    """Name a model for people, and what tells it apart."""
    return f"{model} (weights {weights[:12]}, adapter {adapter[:12]})"
