"""What `kvtcd ablate` prints, and the report it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from kvtcd import __version__
from kvtcd.lab.ablate.cells import Row
from kvtcd.lab.ablate.contrasts import Contrast, Table
from kvtcd.lab.ablate.criteria import TITLES, listed
from kvtcd.lab.ablate.paired import least_p
from kvtcd.lab.ablate.schemes import NAMED, REFERENCE
from kvtcd.lab.ablate.spread import Split, systematic

if TYPE_CHECKING:
    from kvtcd.lab.ablate.command import Figures

_ALPHA = 0.05


def show(console: Console, figures: Figures) -> None:
    """Print criteria, or where there are none, the contrasts of the named schemes."""
    if figures.criteria is None:
        console.print(f"Times the divergence of {REFERENCE}:")
        console.print(_matrix(figures, "kl", [name for name in NAMED if name != REFERENCE]), markup=False)
        return
    for name, one in figures.criteria.items():
        colour = "green" if one.holds else "red"
        console.print(f"[{colour}]{'pass' if one.holds else 'FAIL'}[/] {name:>3}  {TITLES[name]}")
        for line in one.evidence:
            console.print(f"          {line}", markup=False, highlight=False)
    for claim in figures.claims:
        console.print(f"{claim.verdict}: {claim.finding}", markup=False, highlight=False)


def markdown(figures: Figures, plot: Path | None) -> str:
    """Return the report."""
    parts = [_head(figures, plot)]
    if figures.criteria is not None:
        parts += [_criteria(figures), _claims(figures), _dimensions(figures)]
    named = [name for name in NAMED if name != REFERENCE]
    factors = [
        one
        for one in dict.fromkeys(one.of for one in figures.contrasts)
        if one not in NAMED and "seed" not in one
    ]
    parts += [
        "## Schemes of the papers: times the divergence of `tq-kv`\n\n" + _matrix(figures, "kl", named),
        "## The same: times the error of the output\n\n" + _matrix(figures, "output", named),
        "## One factor at a time: times the divergence\n\n" + _matrix(figures, "kl", factors),
        "## The same: times the error of the output\n\n" + _matrix(figures, "output", factors),
        "## Other pairs: times the divergence, or the error of the output\n\n" + "\n".join(_pairs(figures)),
        "## What no other scheme surpasses beyond noise\n\nIn bits, divergence and error of the output "
        "together; after Holm over all pairs of a cell. `?`: surpassed by means, but within noise.\n\n"
        + "\n".join(_frontiers(figures)),
        "## Codec, implementation, seed\n\n" + "\n".join(_spread(figures)),
        "## Medians: bits, divergence, error of the output\n\n" + "\n".join(_figures(figures)),
    ]
    return "\n\n".join(parts) + "\n"


def _head(figures: Figures, plot: Path | None) -> str:
    what = f"caches of {figures.source}" if figures.source else "problems of known law"
    run = f"preset `{figures.preset}`, {figures.trials} trials a cell, seed {figures.seed}"
    text = (
        f"kvtcd {__version__}, {run}; run `{figures.run[:16]}`. All schemes of a trial see the same keys, "
        "values, queries and rows to calibrate on. *Times* is the ratio of geometric means, its interval "
        "95 % BCa over trials; p is of Wilcoxon's signed ranks, after Holm over all "
        f"{len(figures.contrasts)} comparisons; "
        "r is the rank-biserial correlation; `=`: two one-sided tests, after Holm too, show less than "
        "25 % of difference; `?`: neither is shown. "
        "A difference that is not significant is no equality. The other scheme is moved along its own curve "
        "to the bits of the first."
    )
    lines = [f"# Ablation: {what}", "", text]
    if figures.measured:
        lines += ["", f"Measured: {figures.measured}."]
    least = least_p(figures.trials)
    if len(figures.contrasts) * least >= _ALPHA:
        corrected = min(1, len(figures.contrasts) * least)
        warning = (
            f"**{figures.trials} trials cannot show a difference here**: no p of signed ranks is below "
            f"{least:.2g}, and after Holm none below {corrected:.2g}. Intervals are of each comparison alone."
        )
        lines += ["", warning]
    if plot:
        lines += ["", f"![Ratios to tq-kv, and rate and error]({plot.name})"]
    return "\n".join(lines)


def _criteria(figures: Figures) -> str:
    lines = ["## The five criteria", ""]
    for name, one in (figures.criteria or {}).items():
        lines.append(f"- **{name}: {'pass' if one.holds else 'fail'}** - {TITLES[name]}")
        lines += [f"  - {line}" for line in one.evidence]
    return "\n".join(lines)


def _claims(figures: Figures) -> str:
    rows = [f"| {one.finding} | {one.verdict} | {one.because} |" for one in figures.claims]
    head = ["## What arXiv 2607.09683 says", "", "| finding | here | because |", "|---|---|---|"]
    return "\n".join(head + rows)


def _dimensions(figures: Figures) -> str:
    rows = [
        f"| {one.regime} | {one.rows} | {one.naive:.1f} | {one.limit:.1f} | {one.corrected:.1f} |"
        for one in figures.dimensions
    ]
    head = [
        "## Dimensions by calibration rows", "",
        "Participation ratio of rows of length one, medians of six.", "",
        "| regime | rows n | naive | n d / (n + d) | corrected |", "|---|---|---|---|---|",
    ]  # fmt: skip
    return "\n".join(head + rows)


def _matrix(figures: Figures, figure: str, schemes: Sequence[str]) -> str:
    """Return a table: a row for each scheme, a column for each cell and budget."""
    found = {
        (one.of, one.cell, one.budget): one
        for one in figures.contrasts
        if one.figure == figure and one.over == REFERENCE
    }
    places = list(dict.fromkeys((cell, budget) for _, cell, budget in found))
    lines = [
        "| scheme | " + " | ".join(f"{_short(figures, cell)} {budget}" for cell, budget in places) + " |",
        "|---|" + "---|" * len(places),
    ]
    lines += [
        f"| {name} | " + " | ".join(_cell(figures, found[name, *place]) for place in places) + " |"
        for name in schemes
    ]
    return "\n".join(lines)


def _cell(figures: Figures, one: Contrast) -> str:
    mark = {"undecided": " ?", "alike": " ="}.get(_word(figures, one), "")
    return f"{one.found.times:.2g} ({np.exp(one.found.lo):.2g} to {np.exp(one.found.hi):.2g}){mark}"


def _short(figures: Figures, cell: str) -> str:
    """Return the regime, and what else tells cells apart."""
    regime = cell.partition(" ")[0]
    alike = sum(other.name.partition(" ")[0] == regime for other, _ in figures.cells)
    return cell if alike > 1 else regime


def _pairs(figures: Figures) -> Iterator[str]:
    yield "| cell | bits | scheme | over | figure | times | 95 % | p | r | |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for one in figures.contrasts:
        if one.over == REFERENCE or not one.found.delta:
            continue
        yield (
            f"| {_short(figures, one.cell)} | {one.bits:.3f} | {one.of} | {one.over} | {one.figure} | "
            f"{one.found.times:.3g} | {np.exp(one.found.lo):.3g} to {np.exp(one.found.hi):.3g} | "
            f"{one.p_holm:.1g} | {one.found.signed:+.2f} | {_word(figures, one)} |"
        )


def _word(figures: Figures, one: Contrast) -> str:
    """Say in a word what a comparison comes to."""
    found = one.found
    if one.p_alike < _ALPHA:
        return "alike"
    if one.p_holm >= _ALPHA:
        return "undecided"
    side = "worse" if found.delta > 0 else "better"
    floors = [figures.seeds[key].delta for key in [f"{one.cell}, {one.budget} bits"] if key in figures.seeds]
    floors += [figures.implementations.delta] if figures.implementations else []
    return side if not floors or systematic(found.lo, found.hi, floors) else f"{side}, within a seed's noise"


def _frontiers(figures: Figures) -> Iterator[str]:
    for cell, best in figures.frontiers.items():
        yield f"- {cell}: {listed(best)}"


def _spread(figures: Figures) -> Iterator[str]:
    yield "Standard deviations of log divergence; *Δ* is that of the difference of two: one trial's floor."
    yield ""
    yield "| what | where | between | Δ | shown to differ by less than 5 % |"
    yield "|---|---|---|---|---|"
    if figures.implementations:
        own = figures.implementations
        yield _split_row("implementations: " + ", ".join(own.columns), "first cell, 4 bits", own)
    for where, found in figures.seeds.items():
        yield _split_row("seeds", where, found)
    for where, sigma in figures.schemes.items():
        yield f"| schemes | {where} | {sigma:.3f} | | |"


def _split_row(what: str, where: str, found: Split) -> str:
    shown = "yes" if found.p_same < _ALPHA else "no"
    return f"| {what} | {where} | {found.sigma:.2g} | {found.delta:.2g} | {shown}, p {found.p_same:.1g} |"


def _figures(figures: Figures) -> Iterator[str]:
    places = [(Table(cell.name, rows), budget) for cell, rows in figures.cells for budget in cell.budgets]
    yield (
        "| scheme | "
        + " | ".join(f"{_short(figures, table.name)} {budget}" for table, budget in places)
        + " |"
    )
    yield "|---|" + "---|" * len(places)
    for name in dict.fromkeys(row.scheme for _, rows in figures.cells for row in rows):
        own = [table.row(name, budget) for table, budget in places]
        yield (
            f"| {name} | "
            + " | ".join(
                f"{row.bits:.2f} {_median(row, 'kl'):.2g} {_median(row, 'output'):.2g}" for row in own
            )
            + " |"
        )


def _median(row: Row, name: str) -> float:
    return float(np.median(row.measured[name]))
