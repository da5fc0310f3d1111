"""Rounding and packing, unpacking and scaling, as kernels of our own: two each way and a sum between them.

Written in Triton's language, which CUDA builds of torch bring along; nothing else imports this module, and
only where Triton is there (`load`). What is to come out, bit by bit, is what `uniform.InTorch` says; tests
hold one against the other in Triton's interpreter on a CPU.

A program works on `ROWS` components, all their tokens, `BLOCK` at a time. The rows of a kernel are the
components in order of their width, then those that are not coded: `_row` tells the width of a row and where
its codes lie from nothing but how many rows have which width. How many escapes come before those of a row is
known once all rows have counted theirs, so counting and writing are two kernels, and the host is not asked.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtcd.codec.stages import stage
from kvtcd.codec.uniform import LIMIT, Arithmetic, Quantised, Restored
from kvtcd.codec.widths import WIDTHS, Widths

ROWS, BLOCK = 4, 256
"""Components of a program, and tokens or bytes it handles at a time."""
OPTIONS = {"enable_fp_fusion": False}
"""Of the compiler: a product is rounded before anything is added to it, as torch does it."""
BUILT_IN = {"ROWS": ROWS, "BLOCK": BLOCK, **OPTIONS}
_TIE = tl.constexpr(12_582_912.0)
"""1.5 * 2^23: what is added to it is rounded to a whole number, ties to even. True below 2^22, and what is
beyond stays beyond `LIMIT`."""
_LIMIT = tl.constexpr(float(LIMIT))
# Compiled once for all blocks: Triton would else build in which numbers and addresses divide by sixteen.
_NUMBERS = ("rank", "tokens", "ones", "twos", "fours", "eights", "capacity")
_ADDRESSES = (
    "coefficients", "steps", "order", "components", "codes", "lost", "counts", "before", "escapes", "out",
)  # fmt: skip
_kernel = triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ADDRESSES)


@triton.jit
def _row(row, tokens, ones, twos, fours):
    """Bits, bytes, and first byte of the codes of rows."""
    bits = tl.where(row < ones, 1, tl.where(row < twos, 2, tl.where(row < fours, 4, 8)))
    first = tl.where(row < ones, 0, tl.where(row < twos, ones, tl.where(row < fours, twos, fours)))
    by_one, by_two, by_four = (tokens + 7) // 8, (tokens + 3) // 4, (tokens + 1) // 2
    start = tl.where(row < ones, 0, ones * by_one)
    start += tl.where(row < twos, 0, (twos - ones) * by_two)
    start += tl.where(row < fours, 0, (fours - twos) * by_four)
    width = (tokens * bits + 7) // 8
    return bits, width, start + (row - first) * width


@triton.jit
def _multiple(coefficients, steps, order, component, place, tokens, there):
    """The coefficient at a place in the order of tokens, its token, its step, and its multiple."""
    token = tl.load(order + place, mask=place < tokens, other=0)
    step = tl.load(steps + token, mask=place < tokens, other=1.0)
    value = tl.load(coefficients + component * tokens + token, mask=there, other=0.0)
    # The division of IEEE 754; the operator may be off by two units of the last place on a device.
    return value, token, step, (tl.div_rn(value, step + tl.zeros_like(value)) + _TIE) - _TIE


@triton.jit
def _zigzag(multiple):
    """Of what is beyond the limit 0: the cast of a number that has no place in an integer may be anything."""
    whole = tl.where(tl.abs(multiple) <= _LIMIT, multiple, 0.0).to(tl.int32)
    return (whole << 1) ^ (whole >> 31)


@_kernel
def _pack(
    coefficients, steps, order, components, codes, lost, counts,
    rank, tokens, ones, twos, fours, eights, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes, squared errors, and by row the escapes and whether a multiple is beyond the limit."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    bits, width, start = _row(row, tokens, ones, twos, fours)
    component = tl.load(components + row, mask=row < rank, other=0)
    most = (1 << bits) - 1
    coded = row < eights
    escapes = tl.zeros((ROWS,), dtype=tl.int64)
    beyond = tl.zeros((ROWS,), dtype=tl.int64)
    for begin in range(0, tokens, BLOCK):
        byte = begin + tl.arange(0, BLOCK)[None, :]
        packed = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
        for number in range(8):
            shift = number * bits
            place = byte + number * width
            there = (row < rank) & (shift < 8) & (byte < width) & (place < tokens)
            value, token, step, multiple = _multiple(
                coefficients, steps, order, component, place, tokens, there
            )
            kept = tl.where(coded, multiple, 0.0)
            off = value - kept * step
            tl.store(lost + component * tokens + token, off * off, mask=there)
            zigzag = _zigzag(kept)
            packed |= tl.where(there, tl.minimum(zigzag, most) << shift, 0)
            escapes += tl.sum((there & coded & (zigzag >= most)).to(tl.int64), axis=1)
            beyond += tl.sum((there & ~(tl.abs(multiple) <= _LIMIT)).to(tl.int64), axis=1)
        tl.store(codes + start + byte, packed.to(tl.uint8), mask=coded & (byte < width))
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(counts + 2 * (number + 1), escapes, mask=number < rank)
    tl.store(counts + 2 * (number + 1) + 1, beyond, mask=number < rank)


@_kernel
def _escape(
    coefficients, steps, order, components, before, escapes,
    tokens, ones, twos, fours, eights, capacity, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Escapes, behind those of the rows before; of coded rows alone."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    bits, _width, _start = _row(row, tokens, ones, twos, fours)
    coded = row < eights
    component = tl.load(components + row, mask=coded, other=0)
    most = (1 << bits) - 1
    at = tl.load(before + 2 * row, mask=coded, other=0)
    for begin in range(0, tokens, BLOCK):
        place = begin + tl.arange(0, BLOCK)[None, :]
        there = coded & (place < tokens)
        _value, _token, _step, multiple = _multiple(
            coefficients, steps, order, component, place, tokens, there
        )
        zigzag = _zigzag(multiple)
        asks = there & (zigzag >= most)
        among = tl.cumsum(asks.to(tl.int64), axis=1)
        target = escapes + at + among - 1
        tl.store(target, (zigzag - most).to(tl.uint8), mask=asks)
        tl.store(target + capacity, ((zigzag - most) >> 8).to(tl.uint8), mask=asks)
        at += tl.sum(asks.to(tl.int64), axis=1)[:, None]


@triton.jit
def _code(codes, start, bits, width, place, there):
    """The code at a place in the order of tokens."""
    number = place // width
    byte = tl.load(codes + start + place - number * width, mask=there, other=0).to(tl.int32)
    return (byte >> (number * bits)) & ((1 << bits) - 1)


@_kernel
def _count(codes, counts, tokens, ones, twos, fours, eights, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """How many escapes the codes of each coded row ask for."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    bits, width, start = _row(row, tokens, ones, twos, fours)
    escapes = tl.zeros((ROWS,), dtype=tl.int64)
    for begin in range(0, tokens, BLOCK):
        place = begin + tl.arange(0, BLOCK)[None, :]
        there = (row < eights) & (place < tokens)
        code = _code(codes, start, bits, width, place, there)
        escapes += tl.sum((there & (code == (1 << bits) - 1)).to(tl.int64), axis=1)
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(counts + number + 1, escapes, mask=number < eights)


@_kernel
def _unpack(
    codes, escapes, before, steps, order, components, out,
    rank, tokens, ones, twos, fours, eights, capacity, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Coefficients; escapes that are not there count as none."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    bits, width, start = _row(row, tokens, ones, twos, fours)
    component = tl.load(components + row, mask=row < rank, other=0)
    at = tl.load(before + row, mask=row < eights, other=0)
    for begin in range(0, tokens, BLOCK):
        place = begin + tl.arange(0, BLOCK)[None, :]
        there = (row < eights) & (place < tokens)
        code = _code(codes, start, bits, width, place, there)
        asks = there & (code == (1 << bits) - 1)
        number = at + tl.cumsum(asks.to(tl.int64), axis=1) - 1
        found = asks & (number < capacity)
        low = tl.load(escapes + number, mask=found, other=0).to(tl.int32)
        high = tl.load(escapes + capacity + number, mask=found, other=0).to(tl.int32)
        zigzag = tl.where(there, code, 0) + low + (high << 8)
        multiple = (zigzag >> 1) ^ -(zigzag & 1)
        token = tl.load(order + place, mask=place < tokens, other=0)
        step = tl.load(steps + token, mask=place < tokens, other=0.0)
        real = (row < rank) & (place < tokens)
        tl.store(out + component * tokens + token, multiple.to(tl.float32) * step, mask=real)
        at += tl.sum(asks.to(tl.int64), axis=1)[:, None]


class InTriton(Arithmetic):
    """By these kernels, on the device that is current."""

    def quantise(self, coefficients: Tensor, steps: Tensor, order: Tensor, widths: Widths) -> Quantised:
        """Round, ties to even, and pack; see `Arithmetic`."""
        (rank, tokens), device = coefficients.shape, coefficients.device
        ends, coded = _ends(widths), len(widths.order)
        nbytes, capacity = sum(widths.sizes(tokens).values()), coded * tokens
        codes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        nothing = torch.zeros(16 * (rank + 1) + 2 * capacity, dtype=torch.uint8, device=device)
        counts = nothing[: 16 * (rank + 1)].view(torch.int64).view(-1, 2)  # before and of each row
        escapes = nothing[16 * (rank + 1) :].view(2, -1)
        given = (coefficients, steps, order, widths.every)
        with stage("quantise"):
            lost = torch.empty_like(coefficients)
            if rank:
                _pack[_grid(rank)](*given, codes, lost, counts, rank, tokens, *ends, **BUILT_IN)
            off = lost.sum(dim=0)
        with stage("pack"):
            so_far = torch.cumsum(counts, dim=0)
            if coded:
                _escape[_grid(coded)](*given, so_far, escapes, tokens, *ends, capacity, **BUILT_IN)
        return Quantised(codes, escapes, so_far[-1], off)

    def restore(
        self, codes: Tensor, escapes: Tensor, steps: Tensor, order: Tensor, widths: Widths
    ) -> Restored:
        """Unpack, and multiply by the steps; see `Arithmetic`."""
        tokens, rank, there = len(steps), widths.rank, escapes.shape[1]
        ends, coded = _ends(widths), len(widths.order)
        out = torch.empty((rank, tokens), device=codes.device)
        counts = torch.zeros(coded + 1, dtype=torch.int64, device=codes.device)  # before and of each row
        with stage("unpack"):
            if coded:
                _count[_grid(coded)](codes, counts, tokens, *ends, **BUILT_IN)
            so_far = torch.cumsum(counts, dim=0)
        with stage("dequantise"):
            given = (codes, escapes, so_far, steps, order, widths.every, out)
            if rank:
                _unpack[_grid(rank)](*given, rank, tokens, *ends, there, **BUILT_IN)
        return Restored(out, so_far[-1])


def _grid(rows: int) -> tuple[int]:
    return (triton.cdiv(rows, ROWS),)


def _ends(widths: Widths) -> list[int]:
    """Return how many rows there are up to and with each width."""
    return list(accumulate(len(widths.rows.get(bits, ())) for bits in WIDTHS))
