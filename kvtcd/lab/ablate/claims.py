"""What arXiv 2607.09683 says, held against a run: a finding holds, holds partly, or does not.

Every verdict follows from the run's figures. A finding that a run has no figures of is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvtcd.lab.ablate.budgets import Found
from kvtcd.lab.ablate.contrasts import FIGURES, Contrast, Table
from kvtcd.lab.ablate.criteria import regime_of
from kvtcd.lab.ablate.frontier import frontier
from kvtcd.lab.ablate.schemes import EIGHT, REFERENCE

Verdict = Literal["holds", "partly", "does not hold"]
_EQUAL = "squ-kv"
_NEAR = 0.1
"""Of what isotropic rows would come to: within that, dimensions are those of the budget."""
_SURVIVORS = {"plain-kv", "tq-kv", "tq-qkv"}


@dataclass(frozen=True, slots=True)
class Claim:
    """A finding, whether it holds here, and why."""

    finding: str
    verdict: Verdict
    because: str


def claims(tables: Sequence[Table], found: Sequence[Contrast], dimensions: Sequence[Found]) -> list[Claim]:
    """Judge every finding that a run of synthetic regimes can tell of."""
    judged = [
        _survivors(tables),
        _counted(
            "a sketch of the remainder hurts keys",
            found,
            lambda one: one.of == "tq-qkv" and one.over == REFERENCE and one.figure == "kl",
            worse=True,
        ),
        _counted(
            "a sketch of the remainder hurts values",
            found,
            lambda one: one.of == "tq-kqv" and one.over == REFERENCE and one.figure == "output",
            worse=True,
        ),
        _counted(
            "on fat tails the eigenbasis as published (equal bits, no norms) loses",
            found,
            lambda one: one.of == "squ-kv-raw" and one.over == REFERENCE and one.figure == "kl"
            and regime_of(one.cell) == "fattail",
            worse=True,
        ),
        _counted(
            "with equal bits the eigenbasis wins where there is structure",
            found,
            lambda one: one.of == "squ-kv" and one.over == REFERENCE and one.figure == "kl"
            and regime_of(one.cell).startswith("lowrank"),
            worse=False,
        ),
        _counted(
            "at four bits and more tq-kv is better than an eigenbasis but on lowrank_aligned",
            found,
            lambda one: one.of in {"squ-kv", "sqw-kv"} and one.over == REFERENCE and one.figure == "kl"
            and regime_of(one.cell) != "lowrank_aligned" and one.budget >= 4,
            worse=True,
        ),
        _alike(tables, "sqb-kv", "filling by water among the first components comes to equal bits"),
        _alike(tables, "sqw-kv", "filling by water among all components comes to equal bits"),
        _self_calibrating(dimensions),
    ]  # fmt: skip
    return [claim for claim in judged if claim]


def _survivors(tables: Sequence[Table]) -> Claim | None:
    if not tables:
        return None
    kept = {table.name: {one.scheme for one in frontier(table.only(EIGHT))} for table in tables}
    regimes = [regime_of(name) for name in kept]
    agreed = sum(names <= _SURVIVORS for names in kept.values())
    lists = "; ".join(
        f"{regime if regimes.count(regime) == 1 else name}: {', '.join(sorted(names))}"
        for regime, (name, names) in zip(regimes, kept.items(), strict=True)
    )
    finding = "of the eight schemes plain-kv, tq-kv and tq-qkv are not dominated"
    return Claim(finding, _verdict(agreed, len(kept)), lists)


def _counted(
    finding: str, found: Sequence[Contrast], mine: Callable[[Contrast], bool], *, worse: bool
) -> Claim | None:
    """Judge by how many intervals lie on the side that a finding says."""
    own = [one for one in found if mine(one)]
    if not own:
        return None
    agreeing = [one for one in own if (one.found.lo > 0 if worse else one.found.hi < 0)]
    against = [one for one in own if (one.found.hi < 0 if worse else one.found.lo > 0)]
    because = f"in {len(agreeing)} of {len(own)} comparisons"
    if against:
        because += "; the other way round: " + ", ".join(
            f"{one.of} on {regime_of(one.cell)} at {one.budget} bits (times {one.found.times:.2g})"
            for one in against
        )
    return Claim(finding, _verdict(len(agreeing), len(own)), because)


def _alike(tables: Sequence[Table], scheme: str, finding: str) -> Claim | None:
    """Judge by the trials in which bits by variance and equal bits come to the very same figures."""
    shares: dict[str, list[float]] = {}
    for table in tables:
        if {scheme, _EQUAL} <= set(table.schemes):
            for budget in table.budgets:
                same = [table.logs(scheme, budget, f) == table.logs(_EQUAL, budget, f) for f in FIGURES]
                shares.setdefault(regime_of(table.name), []).append(float(np.logical_and(*same).mean()))
    if not shares:
        return None
    every = [share for own in shares.values() for share in own]
    lists = ", ".join(f"{regime} {np.mean(own):.0%}" for regime, own in shares.items())
    return Claim(
        finding,
        _verdict(sum(share == 1 for share in every), len(every)),
        f"share of trials in which `{scheme}` and `{_EQUAL}` are the same to the last digit: {lists}",
    )


def _self_calibrating(dimensions: Sequence[Found]) -> Claim | None:
    """Judge by the regimes whose naive dimensions are, at every budget, what isotropic rows come to."""
    regimes = list(dict.fromkeys(one.regime for one in dimensions))
    if not regimes:
        return None
    following, lists = [], []
    for regime in regimes:
        own = sorted((one for one in dimensions if one.regime == regime), key=lambda one: one.rows)
        if all(abs(one.naive / one.limit - 1) <= _NEAR for one in own):
            following.append(regime)
        lists.append(
            f"{regime} {own[0].naive:.1f} with {own[0].rows} rows and {own[-1].naive:.1f} with {own[-1].rows}"
        )
    where = f"they do on {' and '.join(following)}" if following else "they do nowhere"
    return Claim(
        "the dimensions found follow the calibration budget, not the data",
        _verdict(len(following), len(regimes)),
        f"{where} (within {_NEAR:.0%} of n d / (n + d) at every budget): {', '.join(lists)}",
    )


def _verdict(agreeing: int, of: int) -> Verdict:
    return "holds" if agreeing == of else "partly" if agreeing else "does not hold"
