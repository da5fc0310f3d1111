"""Coefficients rounded to multiples of a step, and their codes packed for the entropy stage.

A code is the zigzag of the multiple: 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4. A component of width ``b`` holds
codes below ``2^b - 1`` in `b` bits each (`pack`); that last value stands for an *escape*, and how far beyond
it the code is goes into a list of 16-bit numbers, in order of width, component and token.

`InTorch` is what everything else has to equal; on CUDA `kernels` does the same in fewer steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvtcd.codec.pack import pack, unpack
from kvtcd.codec.stages import stage
from kvtcd.codec.widths import Widths

LIMIT = 32_000
"""Largest multiple that can be coded; its zigzag fits 16 bits."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """The codes of a run of tokens of one stream. Nobody has waited for them.

    Attributes:
        codes: packed, flat uint8: by width, component, and byte.
        escapes: low bytes and high bytes, uint8 ``[2, n]``; `n` is at least their number, behind which there
            are zeros.
        found: int64 ``[2]``: the number of escapes; and 0 unless there are multiples beyond `LIMIT`, coded
            or not. Then codes and escapes mean nothing.
        lost: squared error of each token, float32 ``[T]``.
    """

    codes: Tensor
    escapes: Tensor
    found: Tensor
    lost: Tensor


class Restored(NamedTuple):
    """What codes stand for. Nobody has waited for it.

    Attributes:
        coefficients: float32 ``[rank, T]``; they mean nothing if the codes ask for other escapes than there
            are.
        asked: int64 without dimensions, how many they ask for.
    """

    coefficients: Tensor
    asked: Tensor


class Arithmetic(Protocol):
    """Who turns coefficients into codes and back; all say the same codes, bit by bit, of the same numbers.

    On a device neither way waits, and shapes do not depend on the numbers, so either can be recorded
    (`graphs`).
    """

    def quantise(self, coefficients: Tensor, steps: Tensor, order: Tensor, widths: Widths) -> Quantised:
        """Round, and pack what comes of it.

        Args:
            coefficients: float32 ``[rank, T]``, contiguous and finite.
            steps: of each token, float32 ``[T]``.
            order: in which tokens are packed, int64 ``[T]``.
            widths: of the components; they say the rank.
        """
        ...

    def restore(
        self, codes: Tensor, escapes: Tensor, steps: Tensor, order: Tensor, widths: Widths
    ) -> Restored:
        """Return the coefficients that codes stand for.

        Args:
            codes: as in `Quantised`.
            escapes: as there.
            steps: as of `quantise`.
            order: the same.
            widths: the same.
        """
        ...


class InTorch(Arithmetic):
    """By operations of torch, on any device."""

    def quantise(self, coefficients: Tensor, steps: Tensor, order: Tensor, widths: Widths) -> Quantised:
        """Round, ties to even, and pack; see `Arithmetic`."""
        with stage("quantise"):
            rounded = (coefficients / steps).round_()
            beyond = (
                rounded.abs().amax() > LIMIT if widths.rank else torch.zeros_like(order[0], dtype=torch.bool)
            )
            rounded.index_fill_(0, widths.uncoded, 0)
            lost = torch.addcmul(coefficients, rounded, steps, value=-1).square_().sum(dim=0)
        with stage("pack"):
            whole = rounded.index_select(1, order).index_select(0, widths.order).to(torch.int32)
            zigzag = (whole << 1) ^ (whole >> 31)
            narrow = torch.minimum(zigzag, widths.most).to(torch.uint8)
            escapes, count = _gathered((zigzag - widths.most).flatten(), (narrow == widths.most).flatten())
            parts = torch.split(narrow, [len(rows) for rows in widths.rows.values()])
            packed = [pack(part, bits).flatten() for bits, part in zip(widths.rows, parts, strict=True)]
            return Quantised(
                torch.cat([narrow.new_empty(0), *packed]),
                torch.stack((escapes, escapes >> 8)).to(torch.uint8),
                torch.stack((count, beyond)),
                lost,
            )

    def restore(
        self, codes: Tensor, escapes: Tensor, steps: Tensor, order: Tensor, widths: Widths
    ) -> Restored:
        """Unpack, and multiply by the steps; see `Arithmetic`."""
        tokens = len(steps)
        with stage("unpack"):
            parts = torch.split(codes, list(widths.sizes(tokens).values()))
            narrow = torch.cat(
                [
                    codes.new_empty((0, tokens)),
                    *(
                        unpack(part.view(len(rows), -1), bits, tokens)
                        for part, (bits, rows) in zip(parts, widths.rows.items(), strict=True)
                    ),
                ]
            )
            low, high = escapes.to(torch.int32)
            beyond, asked = _scattered(low | (high << 8), (narrow == widths.most).flatten())
            chosen = narrow.to(torch.int32) + beyond.view(narrow.shape)
            zigzag = chosen.new_zeros((widths.rank, tokens))
            zigzag.index_copy_(0, widths.order, chosen)
            multiples = (zigzag >> 1) ^ -(zigzag & 1)
        with stage("dequantise"):
            whole = multiples.to(torch.float32).index_select(1, torch.argsort(order)).mul_(steps)
            return Restored(whole, asked)


def _gathered(values: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values that are asked for, flat, zeros behind them, and their number without dimensions."""
    if values.device.type == "cpu":  # numpy takes a seventh of the time
        places = torch.from_numpy(np.flatnonzero(asked.numpy()))
        return values[places], torch.tensor(len(places))
    number = torch.cumsum(asked, dim=0)
    found = values.new_zeros(len(values) + 1)  # the last one is overwritten by what is not asked for
    found.scatter_(0, torch.where(asked, number - 1, len(values)), values)
    return found[:-1], asked.sum()


def _scattered(values: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `_gathered` was given, zero elsewhere, and how many were asked for."""
    if values.device.type == "cpu":
        places = torch.from_numpy(np.flatnonzero(asked.numpy()))
        there = min(len(places), len(values))
        whole = values.new_zeros(len(asked))
        whole[places[:there]] = values[:there]
        return whole, torch.tensor(len(places))
    number = torch.cumsum(asked, dim=0) - 1
    padded = torch.nn.functional.pad(values, (0, 1))
    source = torch.where(asked, number, len(values)).clamp_(max=len(values))
    return padded.index_select(0, source), asked.sum()
