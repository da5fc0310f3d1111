"""What `kvtcd eval tasks` reports: scores behind a codec against scores without, paired over items."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.evaluate import Size
from kvtcd.lab.rd_report import bounds, fraction
from kvtcd.lab.statistics import interval, mean
from kvtcd.lab.tasks.item import Item, Reply, Task


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of one task with one codec; the keys of `--json`.

    Attributes:
        task, metric: what was measured; the higher the better, see `score`.
        codec, dial: as on the command line.
        ratio: over the coded tokens of all items, as in `eval rd`; NaN where there are none.
        n: items.
        score: behind what came back; mean over items.
        score_raw: behind the cache as it was.
        delta: the former less the latter.
        lo, hi: bounds of its 95 % interval.
    """

    task: str
    metric: str
    codec: str
    dial: float | None
    ratio: float
    n: int
    score: float
    score_raw: float
    delta: float
    lo: float
    hi: float


def rows_of(
    task: Task, items: Sequence[Item], raw: Sequence[Reply],
    packed: Mapping[Spec, Sequence[tuple[Reply, Size]]],
) -> list[Row]:  # fmt: skip
    """Score the replies to the items of a task; a row for each measure and codec."""
    rows = []
    for metric, measure in task.measures.items():
        before = [measure(item, reply) for item, reply in zip(items, raw, strict=True)]
        for spec, found in packed.items():
            after = [measure(item, reply) for item, (reply, _) in zip(items, found, strict=True)]
            delta = interval(mean([b - a for a, b in zip(before, after, strict=True)]), [0] * len(items))
            ratio = reduce(add, (size for _, size in found)).ratio
            rows.append(
                Row(
                    task.name, metric, spec.name, spec.dial, ratio, len(items),
                    fmean(after), fmean(before), delta.value, delta.lo, delta.hi,
                )
            )  # fmt: skip
    return rows


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("task", lambda r: r.task),
    ("metric", lambda r: r.metric),
    ("codec", lambda r: r.codec if r.dial is None else f"{r.codec}:{r.dial:g}"),
    ("ratio", lambda r: "" if math.isnan(r.ratio) else f"{r.ratio:.1f}"),
    ("n", lambda r: str(r.n)),
    ("raw", lambda r: fraction(r.score_raw, 3)),
    ("score", lambda r: fraction(r.score, 3)),
    ("Δ", lambda r: fraction(r.delta, 3)),
    ("95 %", lambda r: bounds(r.lo, r.hi, 3)),
)


def show(console: Console, model: str, rows: Sequence[Row], left_out: Mapping[str, str]) -> None:
    """Print rows, and why tasks are not among them."""
    table = Table(title=f"{model}: the higher the better", box=SIMPLE_HEAD, padding=0, title_justify="left")
    for number, (name, _) in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if number < 3 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for _, cell in _COLUMNS))
    console.print(table)
    for name, why in left_out.items():
        console.print(f"{name} was left out: {why}.")
