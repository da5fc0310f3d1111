"""What arXiv 2607.09683 says, held against a run: a finding holds, holds partly, or does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvtcd.lab.ablate.budgets import ISOTROPIC, ROWS, Found
from kvtcd.lab.ablate.contrasts import Contrast, Table
from kvtcd.lab.ablate.criteria import regime_of
from kvtcd.lab.ablate.frontier import frontier
from kvtcd.lab.ablate.regimes import REGIMES, Shape, draw
from kvtcd.lab.ablate.schemes import EIGHT, REFERENCE
from kvtcd.lab.ablate.sides import KEYS, Side, allocated, prepared

Verdict = Literal["holds", "partly", "does not hold"]
_TRIALS = 6
_SURVIVORS = {"plain-kv", "tq-kv", "tq-qkv"}


@dataclass(frozen=True, slots=True)
class Claim:
    """A finding, whether it holds here, and why."""

    finding: str
    verdict: Verdict
    because: str


def claims(
    tables: Sequence[Table], found: Sequence[Contrast], dimensions: Sequence[Found], seed: int
) -> list[Claim]:
    """Judge every finding that a run of synthetic regimes can tell of."""
    return [
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
            "at four bits and more tq-kv is best but on lowrank_aligned",
            found,
            lambda one: one.of in {"squ-kv", "sqw-kv"} and one.over == REFERENCE and one.figure == "kl"
            and regime_of(one.cell) != "lowrank_aligned" and one.budget >= 4,
            worse=True,
        ),
        _uniform(seed),
        _self_calibrating(dimensions),
    ]  # fmt: skip


def uniform_share(regime: str, seed: int, bits: int) -> float:
    """Return the share of trials in which filling the first components gives all of them the same bits."""
    problem = draw(regime, Shape(tokens=2, queries=2), seed=seed, trials=range(_TRIALS))
    side = Side(rotation="eigen", levels="gauss", allocation="band")
    variances = prepared(side, KEYS, problem.key_rows, problem.seeds).variances
    widths = allocated(variances, "band", bits, 0)
    return float((widths == bits).all(dim=1).float().mean())


def _survivors(tables: Sequence[Table]) -> Claim:
    kept: dict[str, set[str]] = {}
    for table in tables:
        eight = table.only(EIGHT)
        kept[regime_of(table.name)] = {one.scheme for one in frontier(eight)}
    agreed = sum(names <= _SURVIVORS for names in kept.values())
    verdict: Verdict = "holds" if agreed == len(kept) else "partly" if agreed else "does not hold"
    lists = "; ".join(f"{regime}: {', '.join(sorted(names))}" for regime, names in kept.items())
    return Claim("of the eight schemes plain-kv, tq-kv and tq-qkv are not dominated", verdict, lists)


def _counted(
    finding: str, found: Sequence[Contrast], mine: Callable[[Contrast], bool], *, worse: bool
) -> Claim:
    """Judge by how many intervals lie on the side that a finding says."""
    own = [one for one in found if mine(one)]
    agreeing = [one for one in own if (one.found.lo > 0 if worse else one.found.hi < 0)]
    against = [one for one in own if (one.found.hi < 0 if worse else one.found.lo > 0)]
    verdict: Verdict = (
        "holds" if own and len(agreeing) == len(own) else "partly" if agreeing else "does not hold"
    )
    because = f"in {len(agreeing)} of {len(own)} comparisons"
    if against:
        because += "; the other way round: " + ", ".join(
            f"{one.of} on {regime_of(one.cell)} at {one.budget} bits (times {one.found.times:.2g})"
            for one in against
        )
    return Claim(finding, verdict, because)


def _uniform(seed: int) -> Claim:
    shares = {regime: uniform_share(regime, seed, 4) for regime in REGIMES}
    always = [regime for regime, share in shares.items() if share == 1]
    verdict: Verdict = "holds" if len(always) == len(shares) else "partly" if always else "does not hold"
    because = "share of trials with equal bits: " + ", ".join(
        f"{r} {share:.0%}" for r, share in shares.items()
    )
    return Claim(
        "filling by water comes to equal bits everywhere",
        verdict,
        f"among the first components, at four bits: {because}. Among all it never does: that is `sqw`",
    )


def _self_calibrating(dimensions: Sequence[Found]) -> Claim:
    last = {one.regime: one for one in dimensions if one.rows == ROWS[-1]}
    first = {one.regime: one for one in dimensions if one.rows == ROWS[0]}
    found = ", ".join(
        f"{regime} {first[regime].naive:.1f} with {ROWS[0]} rows and {one.naive:.1f} with {ROWS[-1]}"
        for regime, one in last.items()
    )
    names = " and ".join(ISOTROPIC)
    return Claim(
        "the dimensions found follow the calibration budget, not the data",
        "partly",
        f"on {names} they do; where rows have few dimensions they stop there: {found}",
    )
