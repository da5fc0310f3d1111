"""The tables that `kvtcd eval rd` prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console

from kvtcd.codec.ports import Reason
from kvtcd.lab.codec_spec import spelled
from kvtcd.lab.rd_points import EqualKl, Point
from kvtcd.lab.rd_ranking import Surpassed
from kvtcd.lab.simultaneous import ALPHA, reachable
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


def _gain(gain: EqualKl) -> str:
    """Write a gain, or how far it was measured."""
    if math.isnan(gain.ratio_gain):
        more = not math.isnan(gain.more_than)
        return f"more than {gain.more_than:.2f}" if more else f"less than {gain.less_than:.2f}"
    return f"{gain.ratio_gain:.2f}"


_GAINS: tuple[tuple[str, Callable[[EqualKl], str]], ...] = (
    ("codec", lambda g: g.of),
    ("over", lambda g: g.over),
    ("at KL", lambda g: fraction(g.at_kl, 4)),
    ("times the ratio", _gain),
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


_WHY = {
    Reason.FINER: "its guard: their error was above the bound",
    Reason.ERROR: "its guard: their error was above the bound at every step",
    Reason.UNUSUAL: "its guard: a layer or head is not spread as calibration saw it",
    Reason.RANGE: "values are beyond its codes, or the codes take more room than the values",
    Reason.NOT_FINITE: "they hold a NaN or an infinity",
}


def fraction(value: float, digits: int) -> str:
    """Write a number without the zero in front of its point; nothing where there is none."""
    return "" if math.isnan(value) else f"{value:.{digits}f}".replace("-0.", "-.").removeprefix("0")


def bounds(lo: float, hi: float, digits: int) -> str:
    """Write an interval; a dash where documents are too few for one."""
    return "—" if math.isnan(lo) else f"{fraction(lo, digits)} to {fraction(hi, digits)}"


def show(console: Console, figures: Figures) -> None:
    """Print points and gains, and why blocks were not stored as asked."""
    title = (
        f"{figures.model}: {figures.documents} documents of {figures.context:,} + "
        f"{figures.continuation:,} tokens"
    )
    console.print(_table(title).fill(_POINTS, figures.points, left={"codec"}))
    noise = figures.noise
    console.print(
        f"Rounding alone (the context read again in other steps): KL {fraction(noise.kl, 5)} "
        f"({bounds(noise.kl_lo, noise.kl_hi, 5)}), top-1 {fraction(noise.top1, 3)}."
    )
    for point in figures.points:
        if point.finer or point.refused:
            console.print(_otherwise(point))
    if figures.equal_kl:
        console.print(_table("Ratio at equal KL").fill(_GAINS, figures.equal_kl, left={"codec", "over"}))
    if figures.surpassed:
        console.print(
            _table("Surpassed: less divergence in no more bytes").fill(
                _SURPASSED, figures.surpassed, left={"codec", "surpassed by"}
            )
        )
        console.print(_left(figures))


def _left(figures: Figures) -> str:
    """Say what is left: which points nothing surpasses, or nothing surely."""
    doubtful = {one.of for one in figures.surpassed if not one.surely}
    sure = {one.of for one in figures.surpassed} - doubtful
    names = [spelled(point.codec, point.dial) for point in figures.points]
    left = [name + (" ?" if name in doubtful else "") for name in names if name not in sure]
    text = f"Not surpassed beyond noise: {', '.join(left) or 'none'}."
    least = reachable(figures.documents)
    if least >= ALPHA:
        text += f" ({figures.documents} documents can show nothing: no p is below {least:.2g}.)"
    return text


def _table(title: str) -> Table:
    return Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _otherwise(point: Point) -> str:
    """Say how many blocks a codec stored otherwise than asked, and why."""
    parts = []
    if point.finer:
        parts.append(f"{point.finer} blocks finer than asked ({_WHY[Reason.FINER]})")
    parts += losslessly(point.reasons)
    return f"{spelled(point.codec, point.dial)} stored {', '.join(parts)}."


def losslessly(reasons: Mapping[Reason, int]) -> list[str]:
    """Say how many blocks were stored losslessly, reason by reason."""
    return [f"{count} blocks losslessly ({_WHY.get(reason, reason)})" for reason, count in reasons.items()]
