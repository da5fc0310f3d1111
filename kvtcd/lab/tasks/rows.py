"""What `kvtcd eval tasks` reports: scores behind a codec against scores without, paired over items."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from statistics import fmean
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console

from kvtcd.lab.codec_spec import Spec, spelled
from kvtcd.lab.evaluate import SINKS, WINDOW, Size
from kvtcd.lab.rd_report import bounds, fraction
from kvtcd.lab.statistics import Interval, interval, mean
from kvtcd.lab.tasks.item import Item, Measure, Reply, Task
from kvtcd.terminal import Table

T = TypeVar("T")
_NOTHING = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of one task with one codec; the keys of `--json`.

    Attributes:
        task, metric: what was measured; the higher the better, see `score`.
        codec, dial: as on the command line.
        ratio: over the coded tokens of all items, as in `eval rd`; NaN where there are none.
        n: items.
        uncoded: of them, those so short that no token is coded at the dial.
        uncoded_tokens: of the longest of these.
        score: behind what came back; mean over items.
        score_raw: behind the cache as it was.
        delta: the former less the latter.
        lo, hi: bounds of its 95 % interval.

    Where no item has a coded token, `score`, `delta` and its bounds are NaN: they would be of no codec.
    """

    task: str
    metric: str
    codec: str
    dial: float | None
    ratio: float
    n: int
    uncoded: int
    uncoded_tokens: int
    score: float
    score_raw: float
    delta: float
    lo: float
    hi: float


@dataclass(frozen=True, slots=True)
class Pair:
    """The score of a codec less that of the codec named first, with its 95 % interval."""

    task: str
    metric: str
    of: str
    over: str
    delta: float
    lo: float
    hi: float


@dataclass(frozen=True, slots=True)
class Scores:
    """What one task comes to: a row for each measure and codec, and how codecs compare."""

    rows: list[Row]
    pairs: list[Pair]

    @classmethod
    def of(
        cls, task: Task, items: Sequence[Item], raw: Sequence[Reply],
        packed: Mapping[Spec, Sequence[tuple[Reply, Size]]], token_bits: int,
    ) -> Scores:  # fmt: skip
        """Score the replies to the items of a task: without a codec, and behind each with what it stored.

        Args:
            task: the task.
            items: of it.
            raw: replies without a codec.
            packed: by codec, replies and what was stored.
            token_bits: of a token at 16 bits per value.
        """
        rows, pairs = [], []
        for metric, measure in task.measures.items():
            before = _scores(measure, items, raw)
            after = {spec: _scores(measure, items, [one for one, _ in packed[spec]]) for spec in packed}
            for spec, scores in after.items():
                sizes = [size for _, size in packed[spec]]
                short = [round(size.all_raw / token_bits) for size in sizes if not size.coded_raw]
                said = len(short) < len(items)
                delta = _difference(scores, before) if said else _NOTHING
                rows.append(
                    Row(
                        task.name, metric, spec.codec, spec.dial, reduce(add, sizes).ratio,
                        len(items), len(short), max(short, default=0), fmean(scores) if said else math.nan,
                        fmean(before), delta.value, delta.lo, delta.hi,
                    )
                )  # fmt: skip
            first, *others = after
            for spec in others:
                if not any(size.coded_raw for _, size in packed[spec]):
                    continue
                delta = _difference(after[spec], after[first])
                pairs.append(Pair(task.name, metric, str(spec), str(first), delta.value, delta.lo, delta.hi))
        return cls(rows, pairs)


def _scores(measure: Measure, items: Sequence[Item], replies: Sequence[Reply]) -> list[float]:
    return [measure(item, reply) for item, reply in zip(items, replies, strict=True)]


def _difference(scores: Sequence[float], others: Sequence[float]) -> Interval:
    """The mean difference, paired over items."""
    return interval(mean([a - b for a, b in zip(scores, others, strict=True)]), [0] * len(scores))


_ROWS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("task", lambda r: r.task),
    ("metric", lambda r: r.metric),
    ("codec", lambda r: spelled(r.codec, r.dial)),
    ("ratio", lambda r: "—" if math.isnan(r.ratio) else f"{r.ratio:.1f}"),
    ("n", lambda r: str(r.n)),
    ("raw", lambda r: fraction(r.score_raw, 3)),
    ("score", lambda r: fraction(r.score, 3) or "—"),
    ("Δ", lambda r: fraction(r.delta, 3) or "—"),
    ("95 %", lambda r: bounds(r.lo, r.hi, 3)),
)
_PAIRS: tuple[tuple[str, Callable[[Pair], str]], ...] = (
    ("task", lambda p: p.task),
    ("metric", lambda p: p.metric),
    ("codec", lambda p: p.of),
    ("over", lambda p: p.over),
    ("Δ", lambda p: fraction(p.delta, 3)),
    ("95 %", lambda p: bounds(p.lo, p.hi, 3)),
)
_NAMES = {"task", "metric", "codec", "over"}


def show(
    console: Console, model: str, rows: Sequence[Row], pairs: Sequence[Pair], left_out: Mapping[str, str]
) -> None:
    """Print scores and comparisons, and why tasks are not among them."""
    console.print(_table(f"{model}: the higher the better").fill(_ROWS, rows, left=_NAMES))
    if pairs:
        console.print(_table("Scores of codecs over the one named first").fill(_PAIRS, pairs, left=_NAMES))
    for said in dict.fromkeys(_uncoded(row) for row in rows if row.uncoded):
        console.print(said)
    for name, why in left_out.items():
        console.print(f"{name} was left out: {why}.")


def _uncoded(row: Row) -> str:
    which = "nothing" if row.uncoded == row.n else f"nothing of {row.uncoded} of {row.n} items"
    return (
        f"{row.task}: {which} was packed at the dial: contexts of {row.uncoded_tokens} tokens at most; "
        f"codecs code what lies beyond the first {SINKS} and the last {WINDOW}."
    )


def _table(title: str) -> Table:
    return Table(title=title, box=SIMPLE_HEAD, padding=0, title_justify="left")
