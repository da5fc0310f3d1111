"""The bare matrix products of a codec in their fastest form: no codec with these products can be faster.

Forms differ in the element type, in how each factor is stored, and in how the product is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtcd.lab.bench_codec_timing import Clock, run

DTYPES = (torch.bfloat16, torch.float32)
_SHORTLIST, _TRIES = 3, 3


@dataclass(frozen=True, slots=True)
class Form:
    """One way to have a product; factors and product are stored by rows or by columns."""

    dtype: str
    left: str
    right: str
    product: str


@dataclass(frozen=True, slots=True)
class Products:
    """The products of two streams, there and back, and the forms they have."""

    encode: Callable[[], object]
    decode: Callable[[], object]
    encode_form: Form
    decode_form: Form


def products(tokens: int, p: int, rank: int, *, device: torch.device, clock: Clock) -> Products:
    """Find the fastest forms of ``[tokens, p] [p, rank]`` and of ``[tokens, rank] [rank, p]``."""
    encode_form, encode = fastest(tokens, p, rank, device=device, clock=clock)
    decode_form, decode = fastest(tokens, rank, p, device=device, clock=clock)
    return Products(lambda: (encode(), encode()), lambda: (decode(), decode()), encode_form, decode_form)


def forms(
    rows: int, inner: int, columns: int, device: torch.device
) -> Iterator[tuple[Form, Callable[[], Tensor]]]:
    """Yield every form of ``[rows, inner]`` times ``[inner, columns]``, with what computes it."""
    draw = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        left = torch.randn((rows, inner), generator=draw).to(device, dtype)
        right = torch.randn((inner, columns), generator=draw).to(device, dtype)
        stored = ((("rows", x), ("columns", x.t().contiguous().t())) for x in (left, right))
        for (a_by, a), (b_by, b) in itertools.product(*stored):
            name = str(dtype).removeprefix("torch.")
            yield Form(name, a_by, b_by, "rows"), _product(a, b)
            yield Form(name, a_by, b_by, "columns"), _product(b.t(), a.t())


def fastest(
    rows: int, inner: int, columns: int, *, device: torch.device, clock: Clock
) -> tuple[Form, Callable[[], Tensor]]:
    """Return the form that takes the least time here and now, with what computes it."""

    def best(form: tuple[Form, Callable[[], Tensor]], tries: int) -> float:
        return min(run(form[1], clock).seconds for _ in range(tries))

    shortlist = sorted(forms(rows, inner, columns, device), key=lambda form: best(form, 1))[:_SHORTLIST]
    return min(shortlist, key=lambda form: best(form, _TRIES))


def _product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.mm(a, b)
