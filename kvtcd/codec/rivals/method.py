"""What every rival offers: how the run of one stream becomes arrays, and back.

A method knows the shape of its stream, so its arrays follow from the number of tokens; `coder` makes sections
of them and checks every one before it is decoded. Methods wrap methods: `Centred` and `Split` say what is
done to vectors before any of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvtcd.codec.profile import StreamProfile
from kvtcd.core.identity import Rope

ANY = -1
"""A length that only the data knows."""
U8, I16, F16, F32 = torch.uint8, torch.int16, torch.float16, torch.float32


@dataclass(frozen=True, slots=True)
class Site:
    """The stream that a method is for.

    Attributes:
        layers, heads, dim: ``L``, ``H`` and ``D``.
        key: whether these are keys.
        number: of the stream, from 0.
        rope: how it was rotated; None for a stream that was not.
        profile: of the stream; None for methods that need none.
    """

    layers: int
    heads: int
    dim: int
    key: bool
    number: int = 0
    rope: Rope | None = None
    profile: StreamProfile | None = None

    def vectors(self, tokens: int) -> int:
        """Vectors of `dim` in a run."""
        return self.layers * self.heads * tokens

    def of(self, dim: int) -> Site:
        """Return the same for vectors of other dimensions."""
        return replace(self, dim=dim)


class Field(NamedTuple):
    """An array: one length may be `ANY`."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def item(self) -> int:
        """Bytes of what there is any number of, or of all."""
        return self.dtype.itemsize * math.prod(n for n in self.shape if n != ANY)


class Method(Protocol):
    """One stream's codec."""

    before_rope: bool
    """Whether it works on keys with RoPE undone."""

    def fields(self, tokens: int) -> list[Field]:
        """Return the arrays of a run, in their order."""
        ...

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays of float32 ``[L, T, H, D]``, finite and within float16.

        A float16 array that overflows says that these values cannot be coded.
        """
        ...

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:
        """Return float32 ``[L, T, H, D]``.

        Raises:
            BadField: the arrays contradict each other.
        """
        ...


class Centred(Method):
    """The mean of each channel over the run taken out first, and stored in float16.

    Keys of some models have up to 98 % of their energy there, and have it before RoPE.
    """

    before_rope = True

    def __init__(self, site: Site, inner: Method) -> None:
        self._site, self._inner = site, inner

    def fields(self, tokens: int) -> list[Field]:
        """Return the means, then what the inner method has."""
        site = self._site
        return [Field(F16, (site.layers, site.heads, site.dim)), *self._inner.fields(tokens)]

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays; see `Method`."""
        mean = x.mean(dim=1).to(F16)
        return [mean, *self._inner.encode(x - mean.to(F32)[:, None])]

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:
        """Return the values; see `Method`."""
        return self._inner.decode(arrays[1:], tokens) + arrays[0].to(F32)[:, None]


class Split(Method):
    """Vectors cut into parts with a method for each: rotated dimensions and others do not mix."""

    def __init__(self, parts: Sequence[tuple[int, Method]]) -> None:
        self._dims = [dim for dim, _ in parts]
        self._methods = [method for _, method in parts]
        self.before_rope = self._methods[0].before_rope

    def fields(self, tokens: int) -> list[Field]:
        """Return the arrays of one part after the other."""
        return [field for method in self._methods for field in method.fields(tokens)]

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays; see `Method`."""
        parts = zip(self._methods, torch.split(x, self._dims, dim=-1), strict=True)
        return [array for method, part in parts for array in method.encode(part.contiguous())]

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:
        """Return the values; see `Method`."""
        counts = [len(method.fields(tokens)) for method in self._methods]
        ends = list(accumulate(counts))
        return torch.cat(
            [
                method.decode(arrays[end - count : end], tokens)
                for method, count, end in zip(self._methods, counts, ends, strict=True)
            ],
            dim=-1,
        )
