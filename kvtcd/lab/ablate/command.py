"""`kvtcd ablate`: the factors of published codecs, one by one, and what the statistics say of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from kvtcd import outputs, terminal
from kvtcd.lab import dump as dumps
from kvtcd.lab.ablate import budgets, real
from kvtcd.lab.ablate.cells import Cell, Row, chunks, drawn, joined, preset, run
from kvtcd.lab.ablate.claims import Claim, claims
from kvtcd.lab.ablate.contrasts import Contrast, Table, contrasts
from kvtcd.lab.ablate.criteria import Criterion, criteria
from kvtcd.lab.ablate.frontier import Left, frontier
from kvtcd.lab.ablate.journal import Journal, run_of
from kvtcd.lab.ablate.regimes import Problem, Shape
from kvtcd.lab.ablate.report import markdown, show
from kvtcd.lab.ablate.schemes import REFERENCE, SEEDS, grid
from kvtcd.lab.ablate.spread import Split, split
from kvtcd.lab.ablate.twins import divergences
from kvtcd.lab.figures import write_json
from kvtcd.lab.phases import Phases

PresetName = Literal["ci", "paper"]
_AT_ONCE = 8
_TOKENS_AT_ONCE = 2048
_SITES = 12
_REAL = {"ci": (256, 512, (2, 4, 6)), "paper": (1024, 4096, (2, 3, 4, 5, 6, 7))}
"""Of caches: tokens, rows to calibrate on, budgets."""
_TWIN_BITS = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """What the command finds out.

    Attributes:
        preset, seed, trials: of the run; `run` is the digest of all that determines it.
        source: name of the model whose caches these are; None for problems that were drawn.
        measured: what of the caches is measured, in words; None for problems that were drawn.
        cells: with the rows of each, trials one by one.
        contrasts, frontiers: see there; frontiers by cell.
        implementations, seeds: variance of `tq-kv` by either, and `schemes`, between schemes, by cell and
            budget.
        dimensions, criteria, claims: of problems that were drawn.
    """

    preset: str
    seed: int
    trials: int
    run: str
    source: str | None
    cells: tuple[tuple[Cell, tuple[Row, ...]], ...]
    contrasts: tuple[Contrast, ...]
    frontiers: dict[str, list[Left]]
    implementations: Split | None
    seeds: dict[str, Split]
    schemes: dict[str, float]
    measured: str | None = None
    dimensions: tuple[budgets.Found, ...] = ()
    criteria: dict[str, Criterion] | None = None
    claims: tuple[Claim, ...] = ()


def command(
    *,
    preset_name: PresetName,
    dump: Path | None,
    trials: int | None,
    seed: int,
    threads: int,
    json: Path | None,
    report: Path | None,
    plot: Path | None,
) -> bool:
    """Run the grid, print criteria or contrasts, and write figures, report and plot if asked.

    Returns:
        Whether all criteria hold; true where none apply.

    Raises:
        ConfigError: the caches are too few, or of values that nothing can be told of; or a file cannot be
            written.
        Unavailable: scipy is not installed, or matplotlib for a plot.
    """
    torch.set_num_threads(threads)
    console = terminal.console()
    with terminal.progress(console) as progress:
        phases = Phases(progress)
        if dump:
            figures, journal = _of_caches(preset_name, dump, seed, json, phases)
        else:
            figures, journal = _of_regimes(preset_name, trials, seed, json, phases)
    show(console, figures)
    if json:
        write_json(json, "ablate", _written(figures))
    if plot:
        from kvtcd.lab.ablate.plot import draw  # noqa: PLC0415 - loads matplotlib, which not all have

        draw(figures, plot)
    if report:
        outputs.write(report, markdown(figures, plot))
    journal.close()
    return all(one.holds for one in (figures.criteria or {}).values())


def _of_regimes(
    name: PresetName, trials: int | None, seed: int, json: Path | None, phases: Phases
) -> tuple[Figures, Journal]:
    wanted = preset(name)
    count = trials or wanted.trials
    key = run_of(wanted.cells, count, seed, grid(), "")
    journal = _journal(json, key, phases)
    rows = {
        cell: _measure(cell, count, partial(drawn, cell, seed=seed), journal, phases) for cell in wanted.cells
    }
    tables = [Table(cell.name, own) for cell, own in rows.items()]
    with phases("tests"):
        found = contrasts(tables)
    with phases("dimensions"):
        dimensions = budgets.dimensions(seed)
    with phases("implementations"):
        first = Cell(wanted.cells[0].regime, Shape(), (_TWIN_BITS,))
        problem = drawn(first, seed=seed, trials=range(count))
        twins = split(divergences(problem, _TWIN_BITS))
    return Figures(
        preset=name,
        seed=seed,
        trials=count,
        run=key,
        source=None,
        cells=tuple((cell, tuple(own)) for cell, own in rows.items()),
        contrasts=tuple(found),
        frontiers={table.name: frontier(table) for table in tables},
        implementations=twins,
        seeds=_seeds(tables),
        schemes=_schemes(tables),
        dimensions=tuple(dimensions),
        criteria=criteria(tables, found, dimensions),
        claims=tuple(claims(tables, found, dimensions)),
    ), journal


def _of_caches(
    name: PresetName, path: Path, seed: int, json: Path | None, phases: Phases
) -> tuple[Figures, Journal]:
    dump = dumps.load(path)
    real.check(dump, path)
    cell, wanted = real.cell(dump, *_REAL[name]), real.sites(dump, _SITES)
    count = len(dump.documents) // 2
    with path.open("rb") as file:
        key = run_of(
            [cell], count, seed, grid(cell.shape.dim), hashlib.file_digest(file, "sha256").hexdigest()
        )
    journal = _journal(json, key, phases)
    told = real.told(dump, cell)
    phases.note(f"measured: {told}")
    parts = []
    with phases.bar(f"{count} documents of {dump.model}, {len(wanted)} heads", count) as advance:
        for trial in range(count):
            done = journal.get(cell, trial)
            if done is None:
                done = run(cell, real.problem(dump, wanted, cell, seed=seed, trial=trial))
                real.check_figures(done, path, trial)
                done = real.folded(done)
                journal.put(cell, trial, done)
            parts.append(done)
            advance(trial + 1)
    rows = joined(parts)
    table = Table(cell.name, rows)
    with phases("tests"):
        found = contrasts([table])
    return Figures(
        preset=name,
        seed=seed,
        trials=count,
        run=key,
        source=dump.model,
        cells=((cell, tuple(rows)),),
        contrasts=tuple(found),
        frontiers={table.name: frontier(table)},
        implementations=None,
        seeds=_seeds([table]),
        schemes=_schemes([table]),
        measured=told,
    ), journal


def _measure(
    cell: Cell, trials: int, problem: Callable[..., Problem], journal: Journal, phases: Phases
) -> list[Row]:
    at_once = max(1, min(_AT_ONCE, _TOKENS_AT_ONCE // cell.shape.tokens))
    parts = []
    with phases.bar(cell.name, trials) as advance:
        for some in chunks(trials, at_once):
            done = journal.get(cell, some.start)
            if done is None:
                done = run(cell, problem(trials=some))
                journal.put(cell, some.start, done)
            parts.append(done)
            advance(some.stop)
    return joined(parts)


def _seeds(tables: Sequence[Table]) -> dict[str, Split]:
    """Split the variance of the reference by seed, in every cell at every budget."""
    names = [REFERENCE, *(f"seed={seed}" for seed in range(1, SEEDS))]
    return {
        f"{table.name}, {budget} bits": split({name: table.logs(name, budget, "kl") for name in names})
        for table in tables
        for budget in table.budgets
    }


def _schemes(tables: Sequence[Table]) -> dict[str, float]:
    """Return the spread of log divergence between schemes: the standard deviation of their means."""
    return {
        f"{table.name}, {budget} bits": float(
            torch.tensor([table.logs(name, budget, "kl").mean() for name in table.schemes]).std()
        )
        for table in tables
        for budget in table.budgets
    }


def _journal(json: Path | None, run: str, phases: Phases) -> Journal:
    """Return what is done already of a run whose figures go to a file, beside that."""
    kept = json.with_name(json.name + ".part") if json and (json.is_file() or not json.exists()) else None
    journal = Journal(kept, run)
    if journal.chunks:
        phases.note(f"going on from {kept}: {journal.chunks} parts are done")
    return journal


def _written(figures: Figures) -> dict[str, object]:
    """Return figures as JSON has them; criteria under the names that others read."""
    whole = asdict(figures)
    whole["cells"] = [
        {"cell": asdict(cell), "rows": [asdict(row) for row in rows]} for cell, rows in figures.cells
    ]
    whole["criteria"] = {
        name: {"pass": one.holds, "evidence": list(one.evidence)}
        for name, one in (figures.criteria or {}).items()
    }
    return whole
