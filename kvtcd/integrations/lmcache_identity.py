"""Whose objects an LMCache server hands over: identities, from what its keys and objects say.

LMCache tells an adapter the model's name, rank, group, shape and dtype of an object, and nothing of weights,
RoPE or the engine's release. Those come from the model's folder and from the adapter's JSON. The order within
an object is that of the engine's pages, whatever LMCache calls it, so objects are opaque.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtcd.core.identity import MAX_BLOCK_TOKENS, Identity
from kvtcd.core.layout import canonical_json
from kvtcd.integrations.opaque import opaque

ENGINE = "lmcache"
HASH_SCHEME = "lmcache-chunk-hash"
"""LMCache's hash of a chunk and of all before it, by BLAKE3 or SHA-256: 32 bytes."""
HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """What an object consists of: its tensors, one after the other.

    Attributes:
        sizes: of each tensor; the last but one dimension of the first is tokens.
        dtypes: of each tensor, by torch's names.
        nbytes: of all.
    """

    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    nbytes: int

    @classmethod
    def of(cls, sizes: Sequence[Sequence[int]], dtypes: Sequence[object], itemsizes: Sequence[int]) -> Shape:
        """Read sizes and dtypes of torch."""
        shapes = tuple(tuple(int(n) for n in size) for size in sizes)
        nbytes = sum(math.prod(size) * width for size, width in zip(shapes, itemsizes, strict=True))
        return cls(shapes, tuple(str(dtype).removeprefix("torch.") for dtype in dtypes), nbytes)

    @property
    def tokens(self) -> int:
        """Tokens of an object; one where its shape does not tell."""
        size = self.sizes[0] if self.sizes else ()
        return size[-2] if len(size) > 1 and 0 < size[-2] <= MAX_BLOCK_TOKENS else 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object belongs, as its key says."""

    model: str
    rank: int
    group: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the files of a model say of it: digests of its weights, and of all else that was set."""

    name: str
    weights: str
    settings: str


def identity_of(place: Place, shape: Shape, facts: Facts, *, version: str) -> Identity:
    """Return the identity of objects of one place and shape; `version` is LMCache's and the engine's.

    Raises:
        BadIdentity: an object is empty, or has an odd number of bytes.
    """
    what = {
        "model": place.model,
        "group": place.group,
        "sizes": [list(size) for size in shape.sizes],
        "dtypes": list(shape.dtypes),
    }
    digest = hashlib.sha256(canonical_json(what)).hexdigest()[:32]
    first = shape.sizes[0] if shape.sizes else ()
    layers = first[0] if len(first) > 2 else 1
    layout, scales = opaque(shape.nbytes, shape.tokens, shape.dtypes, layers=layers)
    return Identity(
        engine=f"{ENGINE} {facts.settings}",
        hash_scheme=HASH_SCHEME,
        model=facts.name,
        weights=facts.weights,
        layout=layout,
        rope=None,
        scales=scales,
        block_tokens=shape.tokens,
        page_format=f"lmcache-{version[:128]}-group{place.group}-{digest}",
        parallel=parallel_of(place.rank),
    )


def parallel_of(rank: int) -> str:
    """Return how the cache is split: LMCache packs world size, rank and their local likes into four bytes."""
    world, number, local_world, local = rank.to_bytes(8, "big")[-4:] if 0 <= rank < 1 << 32 else (0, 0, 0, 0)
    if (world, number, local_world, local) == (1, 0, 1, 0):
        return "canonical"
    if (local_world, local) == (world, number) and number < world:
        return f"tp{world}-rank{number}"
    return f"kv-rank{rank}"


def salt_of(own: str, request: str) -> bytes:
    """Return the salt for an adapter's salt and a request's, which no other pair has; none for neither."""
    return hashlib.sha256(canonical_json([own, request])).digest() if own or request else b""
