"""Which cells an ablation has, and what is measured in one: all schemes and budgets on the same trials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvtcd.lab.ablate import measures
from kvtcd.lab.ablate.regimes import REGIMES, Problem, Shape, draw
from kvtcd.lab.ablate.schemes import Scheme, grid
from kvtcd.lab.ablate.sides import KEYS, VALUES, Coded, Side, code

_WORD = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """A regime at one shape, at some budgets.

    Attributes:
        regime: of `regimes`, or the name of a dump.
        shape: of its problems.
        budgets: bits of a coordinate.
    """

    regime: str
    shape: Shape
    budgets: tuple[int, ...]

    @property
    def name(self) -> str:
        """For people."""
        shape = self.shape
        return f"{self.regime} d={shape.dim} S={shape.tokens} Q={shape.queries} n={shape.rows}"


@dataclass(frozen=True, slots=True)
class Preset:
    """A grid: its cells, and trials of each."""

    cells: tuple[Cell, ...]
    trials: int


@dataclass(frozen=True, slots=True)
class Row:
    """A scheme at a budget in one cell.

    Attributes:
        scheme: name.
        budget: bits of a coordinate, nominal.
        bits: stored for a value, keys and values together, all side data counted.
        measured: by measure, one figure of each trial.
    """

    scheme: str
    budget: int
    bits: float
    measured: Mapping[str, tuple[float, ...]]

    def joined(self, other: Row) -> Row:
        """Return the same with further trials behind."""
        return replace(
            self, measured={name: self.measured[name] + other.measured[name] for name in self.measured}
        )


def preset(name: str) -> Preset:
    """Return the grid `ci` or `paper`; the latter is that of arXiv 2607.09683, as far as it is known."""
    if name == "ci":
        return Preset(tuple(Cell(regime, Shape(), (2, 4, 6)) for regime in REGIMES), trials=40)
    cells = [Cell(regime, Shape(), tuple(range(2, 8))) for regime in REGIMES]
    cells += [Cell(regime, Shape(dim=dim), (2, 4, 6)) for regime in REGIMES for dim in (64, 256)]
    aligned = "lowrank_aligned"
    lengths = (64, 128, 512, 1024, 2048, 4096)
    cells += [Cell(aligned, Shape(tokens=tokens), tuple(range(2, 8))) for tokens in lengths]
    cells += [Cell(regime, Shape(queries=count), (2, 4, 6)) for regime in REGIMES for count in (1, 64, 512)]
    return Preset(tuple(cells), trials=200)


def run(cell: Cell, problem: Problem, schemes: Mapping[str, Scheme] | None = None) -> list[Row]:
    """Take the problems of some trials through every scheme at every budget."""
    found = []
    for budget in cell.budgets:
        sides = _Sides(problem, budget)
        for name, scheme in (schemes or grid(cell.shape.dim)).items():
            keys, values = sides.keys(scheme.keys), sides.values(scheme.values)
            measured = sides.measured(scheme)
            bits = (keys.bits + values.bits) / (2 * problem.keys.shape[2])
            found.append(Row(name, budget, bits, {m: tuple(map(float, v)) for m, v in measured.items()}))
    return found


def drawn(cell: Cell, *, seed: int, trials: range) -> Problem:
    """Return the problems of some trials."""
    return draw(cell.regime, cell.shape, seed=seed, trials=trials)


def chunks(trials: int, at_once: int) -> Iterator[range]:
    """Cut trials into runs."""
    for first in range(0, trials, at_once):
        yield range(first, min(first + at_once, trials))


def joined(parts: Sequence[list[Row]]) -> list[Row]:
    """Put trials of one cell behind each other."""
    whole = parts[0]
    for part in parts[1:]:
        whole = [first.joined(second) for first, second in zip(whole, part, strict=True)]
    return whole


def to_json(cell: Cell) -> dict[str, Any]:
    """Return a cell as JSON."""
    return asdict(cell)


class _Sides:
    """Both sides of one budget, each coded and measured once however many schemes share it."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self._problem, self._budget = problem, budget
        self._coded: dict[tuple[int, Side], Coded] = {}
        self._measured: dict[tuple[int, Side], Mapping[str, Tensor]] = {}

    def keys(self, side: Side) -> Coded:
        """Return the keys of a side."""
        own, other = self._problem.key_rows, self._problem.value_rows
        return self._code(KEYS, side, self._problem.keys, other if side.foreign else own)

    def values(self, side: Side) -> Coded:
        """Return the values of a side."""
        own, other = self._problem.value_rows, self._problem.key_rows
        return self._code(VALUES, side, self._problem.values, other if side.foreign else own)

    def measured(self, scheme: Scheme) -> Mapping[str, Tensor]:
        """Return every measure, ``[N]``."""
        keys, values = self.keys(scheme.keys).decoded, self.values(scheme.values).decoded
        for which, side, measure, decoded in (
            (KEYS, scheme.keys, measures.of_keys, keys),
            (VALUES, scheme.values, measures.of_values, values),
        ):
            if (which, side) not in self._measured:
                self._measured[which, side] = measure(self._problem, decoded)
        both = self._measured[KEYS, scheme.keys] | self._measured[VALUES, scheme.values]  # type: ignore[operator]  # both are dicts
        return {**both, **measures.of_output(self._problem, keys, values)}

    def _code(self, which: int, side: Side, x: Tensor, rows: Tensor) -> Coded:
        if (which, side) not in self._coded:
            with torch.no_grad():
                self._coded[which, side] = code(
                    side, which, x, rows, bits=self._budget, seeds=self._problem.seeds
                )
        return self._coded[which, side]
