"""The tables that `kvtcd eval rd` prints."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console

from kvtcd.lab.codec_spec import spelled
from kvtcd.lab.rd_points import EqualKl, Point
from kvtcd.lab.rd_ranking import Surpassed
from kvtcd.terminal import Table

if TYPE_CHECKING:
    from kvtcd.lab.rd import Figures

_POINTS: tuple[tuple[str, Callable[[Point], str]], ...] = (
    ("codec", lambda p: spelled(p.codec, p.dial)),
    ("ratio", lambda p: f"{p.ratio:.1f}"),
    ("all", lambda p: f"{p.ratio_all:.1f}"),
    ("KL", lambda p: fraction(p.kl, 4)),
    ("95 %", lambda p: bounds(p.kl_lo, p.kl_hi, 4)),
    ("ΔNLL", lambda p: f"{p.dnll:+.4f}"),
    ("top-1", lambda p: fraction(p.top1, 3)),
    ("err K", lambda p: fraction(p.err_k, 3)),
    ("err V", lambda p: fraction(p.err_v, 3)),
)
_GAINS: tuple[tuple[str, Callable[[EqualKl], str]], ...] = (
    ("codec", lambda g: g.of),
    ("over", lambda g: g.over),
    ("at KL", lambda g: fraction(g.at_kl, 4)),
    ("times the ratio", lambda g: "not reached" if math.isnan(g.ratio_gain) else f"{g.ratio_gain:.2f}"),
    ("95 %", lambda g: bounds(g.lo, g.hi, 2)),
)


_SURPASSED: tuple[tuple[str, Callable[[Surpassed], str]], ...] = (
    ("codec", lambda s: s.of),
    ("surpassed by", lambda s: s.by),
    ("in so many fewer bytes", lambda s: f"{s.smaller:.2f}"),
    ("times the KL", lambda s: f"{s.times:.2f}" + ("" if s.surely else " ?")),
    ("95 %", lambda s: bounds(s.lo, s.hi, 2)),
    ("p", lambda s: f"{s.p:.3f}"),
)


def fraction(value: float, digits: int) -> str:
    """Write a number without the zero in front of its point; nothing where there is none."""
    return "" if math.isnan(value) else f"{value:.{digits}f}".replace("-0.", "-.").removeprefix("0")


def bounds(lo: float, hi: float, digits: int) -> str:
    """Write an interval; nothing where there is none."""
    return "" if math.isnan(lo) else f"{fraction(lo, digits)} to {fraction(hi, digits)}"


def show(console: Console, figures: Figures) -> None:
    """Print points and gains."""
    title = (
        f"{figures.model}: {figures.documents} documents of {figures.context:,} + "
        f"{figures.continuation:,} tokens"
    )
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, _ in _POINTS:
        table.add_column(name, justify="left" if name == "codec" else "right")
    for point in figures.points:
        table.add_row(*(cell(point) for _, cell in _POINTS))
    console.print(table)
    noise = figures.noise
    console.print(
        f"Rounding alone (the context read again in other steps): KL {fraction(noise.kl, 5)} "
        f"({bounds(noise.kl_lo, noise.kl_hi, 5)}), top-1 {fraction(noise.top1, 3)}."
    )
    for point in figures.points:
        if point.finer or point.refused:
            console.print(
                f"{spelled(point.codec, point.dial)} stored {point.finer} blocks finer than asked and "
                f"{point.refused} losslessly."
            )
    if figures.equal_kl:
        table = Table(title="Ratio at equal KL", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name, _ in _GAINS:
            table.add_column(name, justify="left" if name in {"codec", "over"} else "right")
        for gain in figures.equal_kl:
            table.add_row(*(cell(gain) for _, cell in _GAINS))
        console.print(table)
    if figures.surpassed:
        title = "Surpassed: less divergence in no more bytes"
        table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name, _ in _SURPASSED:
            table.add_column(name, justify="left" if name in {"codec", "surpassed by"} else "right")
        for one in figures.surpassed:
            table.add_row(*(cell(one) for _, cell in _SURPASSED))
        console.print(table)
