"""Every scheme against the reference, and the pairs that the criteria ask for, at equal storage.

Schemes at one budget do not all take the same bytes: a sketch has a norm more. The other scheme is therefore
moved along its own curve, trial by trial, to the bits of the first: log divergence is near linear in bits,
and 0.06 to 0.15 bits are little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvtcd.lab.ablate.cells import Row
from kvtcd.lab.ablate.paired import Paired, holm, paired
from kvtcd.lab.ablate.schemes import REFERENCE
from kvtcd.lab.statistics import Floats

FIGURES = ("kl", "output")
_SAME_BITS = 1e-9


@dataclass(frozen=True, slots=True)
class Contrast:
    """One scheme against another.

    Attributes:
        cell: name.
        figure: ``kl`` or ``output``.
        of, over: schemes.
        budget: nominal bits.
        bits: of `of`, where `over` is compared.
        moved: bits that `over` had to be moved by.
        found: what the trials say.
        p_holm, p_alike: p-values of a difference, and of there being none that matters, each corrected for
            every contrast of the run.
        q: rate of false discoveries (Benjamini and Hochberg 1995), for exploration.
    """

    cell: str
    figure: str
    of: str
    over: str
    budget: int
    bits: float
    moved: float
    found: Paired
    p_holm: float = 1.0
    p_alike: float = 1.0
    q: float = 1.0


class Table:
    """What was measured in one cell, by scheme and budget."""

    def __init__(self, name: str, rows: Sequence[Row]) -> None:
        self.name = name
        self._rows: Mapping[tuple[str, int], Row] = {(row.scheme, row.budget): row for row in rows}
        self.schemes = tuple(dict.fromkeys(row.scheme for row in rows))
        self.budgets = tuple(sorted({row.budget for row in rows}))

    def only(self, schemes: Sequence[str]) -> Table:
        """Return some schemes alone."""
        return Table(self.name, [row for (name, _), row in self._rows.items() if name in schemes])

    def row(self, scheme: str, budget: int) -> Row:
        """Return a row."""
        return self._rows[scheme, budget]

    def logs(self, scheme: str, budget: int, figure: str) -> Floats:
        """Return the logarithms of a figure, one of each trial."""
        return np.log(np.asarray(self.row(scheme, budget).measured[figure], np.float64))

    def logs_at(self, scheme: str, budget: int, figure: str, bits: float) -> Floats:
        """Return the same on the straight line, of each trial, to the nearest other budget."""
        here = self.row(scheme, budget)
        if abs(bits - here.bits) < _SAME_BITS or len(self.budgets) == 1:
            return self.logs(scheme, budget, figure)
        place = self.budgets.index(budget)
        up = bits > here.bits
        other = self.budgets[place + 1 if (up and place + 1 < len(self.budgets)) or place == 0 else place - 1]
        there = self.row(scheme, other)
        share = (bits - here.bits) / (there.bits - here.bits)
        start, end = self.logs(scheme, budget, figure), self.logs(scheme, other, figure)
        line: Floats = start + share * (end - start)
        return line

    def contrasts(self, pairs: Sequence[tuple[str, str]]) -> list[Contrast]:
        """Compare pairs of schemes, by divergence and by the error of the output, at every budget."""
        asked = [(*pair, budget, figure) for pair in pairs for budget in self.budgets for figure in FIGURES]
        bits = [self.row(of, budget).bits for of, _, budget, _ in asked]
        first = [self.logs(of, budget, figure) for of, _, budget, figure in asked]
        second = [
            self.logs_at(over, budget, figure, at)
            for (_, over, budget, figure), at in zip(asked, bits, strict=True)
        ]
        found = paired(np.stack(first, axis=1), np.stack(second, axis=1))
        return [
            Contrast(self.name, figure, of, over, budget, at, at - self.row(over, budget).bits, own)
            for (of, over, budget, figure), at, own in zip(asked, bits, found, strict=True)
        ]


PAIRS = (
    ("squ-kv-shared", "squ-kv"), ("sqw-kv-shared", "sqw-kv"), ("squ-kv", "sqb-kv"), ("tq-kqv", "tq-qkqv"),
    ("squ-qkv", "squ-kv"),
)  # fmt: skip
"""Further ones than those against the reference."""


def contrasts(tables: Sequence[Table]) -> list[Contrast]:
    """Return all contrasts of a run, corrected for their number."""
    found = []
    for table in tables:
        pairs = [(scheme, REFERENCE) for scheme in table.schemes if scheme != REFERENCE]
        pairs += [pair for pair in PAIRS if set(pair) <= set(table.schemes)]
        found += table.contrasts(pairs)
    return corrected(found)


def corrected(found: Sequence[Contrast]) -> list[Contrast]:
    """Return contrasts with their p-values corrected."""
    from scipy.stats import false_discovery_control  # noqa: PLC0415 - an extra

    p = [one.found.p for one in found]
    each = zip(
        found, holm(p), holm([one.found.p_alike for one in found]), false_discovery_control(p), strict=True
    )
    return [replace(one, p_holm=p_holm, p_alike=p_alike, q=float(q)) for one, p_holm, p_alike, q in each]
