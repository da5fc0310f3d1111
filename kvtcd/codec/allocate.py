"""Bit allocation by dynamic programming (paper, section 3.2 and appendix B.17).

``best[i][b]`` is the least squared error with the first ``i`` components coded in at most ``b`` bits per
token and all later ones zero. A step from ``i - g`` to ``i`` codes one group of ``g`` components with some
width and changes the error by its *gain* (at most the group's energy, negative), which depends neither on the
budget nor on the rest of the plan and is therefore computed once, with the codec's own quantiser. Every cost
is a multiple of two bits, so that is the exact grid of the budget axis. ``best`` is monotone in ``b``, hence
**one table at the largest budget holds the plan of every smaller one**: trace back from its column.

Groups of more than one component start at multiples of `stride`: with 1 this is the paper's programme.
Memory is one byte of back-pointer per component and column (33 MB for 5,760 components at 2 bits each) plus
rolling rows; time is dominated by the gains, ``O(rows * components * sum(sizes) / stride)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtcd.codec.plan import RANGE_BITS, SIZES, WIDTHS, Group, Plan
from kvtcd.codec.quantize import dequantize, quantize, ranges

QUANTUM = 2
"""Bits between neighbouring columns of the table: the greatest common divisor of all costs."""
_TILE = 1 << 18
"""Coefficients simulated at a time: a working set of a few MB."""
_SKIP = 0
"""Back-pointer: the component is not stored. Others count (size, width) pairs from 1."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One way to code a group: its pointer in the table, and the gain by start ``k * stride``."""

    pointer: int
    size: int
    bits: int
    stride: int
    gain: NDArray[np.float64]

    @property
    def columns(self) -> int:
        return (self.size * self.bits + RANGE_BITS) // QUANTUM

    def gain_at(self, end: int) -> float | None:
        """Gain of the group that ends before component `end`; None where no group may."""
        start = end - self.size
        if start < 0 or start % self.stride:
            return None
        return float(self.gain[start // self.stride])


def budget_of(features: int, ratio: int) -> int:
    """Bits per token that `ratio` leaves of `features` 16-bit values."""
    return 16 * features // ratio


def allocate(
    projected: Tensor, budgets: Sequence[int], *, sizes: Sequence[int] = SIZES, stride: int = 16
) -> tuple[Plan, ...]:
    """Return the best plan for each budget.

    Args:
        projected: calibration rows in the basis of principal components, float32 ``[n, r]``.
        budgets: bits per token, ranges included.
        sizes: group sizes allowed.
        stride: grid of the starts of groups larger than one; 1 searches all.
    """
    steps = _steps(projected, tuple(sorted(sizes)), stride)
    pointers = _table(projected.shape[1], max(budgets) // QUANTUM, steps, stride)
    return tuple(_trace(pointers, budget // QUANTUM, steps) for budget in budgets)


def squared_error(projected: Tensor, plan: Plan) -> float:
    """Return ``||P - P_q||^2``, the objective itself, of rows ``[n, r]`` under a plan."""
    rows = projected.t().contiguous()
    energy = rows.square().sum(dim=1, dtype=torch.float64)
    total = float(energy.sum())
    for band in plan.bands:
        x = rows[band.start : band.stop].view(band.count, band.size, -1)
        error = _error(x, band.bits).sum()
        total += float(error - energy[band.start : band.stop].sum())
    return total


def _error(x: Tensor, bits: int) -> Tensor:
    """Squared error of coding groups ``[N, G, T]``: float64 ``[N]``."""
    scale, shift = ranges(x, bits)
    coded = dequantize(quantize(x, scale, shift, bits), scale, shift, bits)
    return coded.sub_(x).square_().sum(dim=(1, 2), dtype=torch.float64)


def _steps(projected: Tensor, sizes: tuple[int, ...], stride: int) -> list[_Step]:
    """Simulate every group that may be chosen, a tile of groups and rows at a time."""
    rows = projected.to(torch.float32).t().contiguous()
    components, tokens = rows.shape
    energy = rows.square().sum(dim=1, dtype=torch.float64)
    steps: list[_Step] = []
    for size in sizes:
        if size > components:
            continue
        grid = 1 if size == 1 else stride
        windows = rows.unfold(0, size, grid).transpose(1, 2)  # [starts, size, tokens], a view
        energies = energy.unfold(0, size, grid).sum(dim=1)
        at_once = max(1, min(tokens, _TILE // size))
        groups = max(1, _TILE // (size * at_once))
        for bits in WIDTHS:
            errors = torch.zeros(len(windows), dtype=torch.float64, device=rows.device)
            for first in range(0, len(windows), groups):
                for token in range(0, tokens, at_once):
                    tile = windows[first : first + groups, :, token : token + at_once]
                    errors[first : first + groups] += _error(tile, bits)
            gain = (errors - energies).cpu().numpy()
            steps.append(_Step(len(steps) + 1, size, bits, grid, gain))
    return steps


def _table(components: int, columns: int, steps: Sequence[_Step], stride: int) -> NDArray[np.uint8]:
    """Run the programme forward; return the back-pointers ``[components + 1, columns + 1]``.

    Errors are kept relative to the energy of all rows, so the first row is zero in every column.
    """
    pointers = np.zeros((components + 1, columns + 1), np.uint8)
    best = {0: np.zeros(columns + 1)}
    reach = max((step.size for step in steps), default=1)
    trial, better = np.empty(columns + 1), np.empty(columns + 1, np.bool_)
    for end in range(1, components + 1):
        row = best[end - 1].copy()
        for step in steps:
            gain, cost = step.gain_at(end), step.columns
            if gain is None or cost > columns:
                continue
            to = slice(0, columns + 1 - cost)
            np.add(best[end - step.size][to], gain, out=trial[to])
            np.less(trial[to], row[cost:], out=better[to])
            np.copyto(row[cost:], trial[to], where=better[to])
            np.copyto(pointers[end, cost:], step.pointer, where=better[to])
        best[end] = row
        if (end - 1) % stride:
            del best[end - 1]
        best.pop(end - reach, None)
    return pointers


def _trace(pointers: NDArray[np.uint8], column: int, steps: Sequence[_Step]) -> Plan:
    """Walk back from the last component at `column`."""
    groups: list[Group] = []
    end = len(pointers) - 1
    while end:
        pointer = int(pointers[end, column])
        if pointer == _SKIP:
            end -= 1
            continue
        step = steps[pointer - 1]
        end -= step.size
        column -= step.columns
        groups.append(Group(end, step.size, step.bits))
    return Plan(tuple(reversed(groups)))
