"""Whether a run comes to what arXiv 2607.09683 found: five criteria, each with its figures.

Those of the eigenbasis are about the corrected codec (`sqw`), since what is published gives all components
the same bits. Where every interval of several has to lie on one side, none of them needs to be corrected for
the others (an intersection-union test, Berger 1982).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtcd.lab.ablate.budgets import ISOTROPIC, Found, law
from kvtcd.lab.ablate.contrasts import Contrast, Table
from kvtcd.lab.ablate.frontier import Left, frontier
from kvtcd.lab.ablate.regimes import STRUCTURED
from kvtcd.lab.ablate.schemes import NAMED, REFERENCE

_WORSE = 5.0
_SLOPE = 0.1
_OFF = 0.1
_MANY_BITS = 4
TITLES = {
    "i": "the eigenbasis loses on fat tails, from four bits on",
    "ii": "it wins where there is structure, if keys and values are calibrated apart",
    "iii": "naive dimensions follow the calibration budget, corrected ones the data",
    "iv": "a sketch of what is left hurts keys",
    "v": "no scheme with a sketch of values is in the non-dominated set",
}


@dataclass(frozen=True, slots=True)
class Criterion:
    """One of the five: whether it holds, and by which figures."""

    holds: bool
    evidence: tuple[str, ...]


def criteria(
    tables: Sequence[Table], found: Sequence[Contrast], dimensions: list[Found]
) -> dict[str, Criterion]:
    """Judge a run."""
    return {
        "i": _sided(found, {"fattail"}, ("sqw-kv", "sqw-kv-raw"), above=True, from_bits=_MANY_BITS),
        "ii": _structured(tables, found),
        "iii": _dimensions(dimensions),
        "iv": _sided(found, {"unit_sphere", "lowrank", "lowrank_misalign"}, ("tq-qkv",), above=True),
        "v": _frontiers(tables),
    }


def spelled(one: Contrast) -> str:
    """Write a contrast as a line of evidence."""
    own = one.found
    return (
        f"{one.cell}, {one.budget} bits: {one.of} against {one.over}, {one.figure} times {own.times:.3g}, "
        f"log {own.delta:+.2f} ({own.lo:+.2f} to {own.hi:+.2f}), p {one.p_holm:.1g} after Holm, "
        f"rank-biserial {own.signed:+.2f}"
    )


def regime_of(cell: str) -> str:
    """Return the regime that the name of a cell begins with."""
    return cell.partition(" ")[0]


def _sided(
    found: Sequence[Contrast],
    regimes: Iterable[str],
    schemes: Iterable[str],
    *,
    above: bool,
    from_bits: int = 0,
) -> Criterion:
    """Ask whether the intervals of divergence lie all above zero, or all below."""
    own = [
        one
        for one in found
        if regime_of(one.cell) in set(regimes)
        and one.of in set(schemes)
        and one.over == REFERENCE
        and one.figure == "kl"
        and one.budget >= from_bits
    ]
    holds = bool(own) and all(one.found.lo > 0 if above else one.found.hi < 0 for one in own)
    return Criterion(holds, tuple(map(spelled, own)))


def _structured(tables: Sequence[Table], found: Sequence[Contrast]) -> Criterion:
    wins = _sided(found, STRUCTURED, ("sqw-kv",), above=False)
    lines, holds = list(wins.evidence), wins.holds
    for table in tables:
        if regime_of(table.name) not in {"lowrank", "lowrank_misalign"}:
            continue
        for budget in table.budgets:
            own, foreign = (
                float(np.median(table.row(name, budget).measured["output"]))
                for name in ("sqw-kv", "sqw-kv-shared")
            )
            holds = holds and foreign > _WORSE * own
            lines.append(
                f"{table.name}, {budget} bits: error of the output {foreign:.3f} with the basis of keys for "
                f"values, {own:.3f} with their own ({foreign / own:.0f} times)"
            )
    return Criterion(holds, tuple(lines))


def _dimensions(dimensions: list[Found]) -> Criterion:
    """Ask whether whole intervals lie within a tenth: of the slope, and of every corrected estimate."""
    laws = [law(dimensions, regime) for regime in ISOTROPIC]
    holds = all(one.slope.lo >= 1 - _SLOPE and one.slope.hi <= 1 + _SLOPE and one.off <= _OFF for one in laws)
    lines = [
        f"{one.regime}: slope {one.slope.value:.3f} ({one.slope.lo:.3f} to {one.slope.hi:.3f}) of 1/PR over "
        f"1/n; from 64 rows on the interval of the corrected estimate is within {one.off:.1%} of d"
        for one in laws
    ]
    return Criterion(holds, tuple(lines))


def _frontiers(tables: Sequence[Table]) -> Criterion:
    """Ask whether all schemes with a sketch of values are surpassed beyond noise."""
    lines, holds = [], bool(tables)
    for table in tables:
        best = frontier(table.only(tuple(NAMED)))
        sketched = [one for one in best if NAMED[one.scheme].sketches_values]
        holds = holds and not sketched
        lines.append(
            f"{table.name}: {listed(best)}" + (f"; with a sketch: {listed(sketched)}" if sketched else "")
        )
    return Criterion(holds, tuple(lines))


def listed(left: Sequence[Left]) -> str:
    """Write what is left of a cell, with a mark where it is surpassed within noise."""
    return ", ".join(f"{one.scheme} at {one.budget}{'' if one.clear else ' ?'}" for one in left)
