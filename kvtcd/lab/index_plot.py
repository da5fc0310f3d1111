"""What blocks cost, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtcd.lab.bench_index import ASKED, Law, Row, memory_growth, memory_more, restart_growth, restart_more
from kvtcd.lab.picture import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw each figure over the number of blocks; what grows with it beyond the smallest, with its law.

    Times are of the processor: those of the clock tell of whatever else a machine does.

    Args:
        rows: of `bench_index`.
        path: PNG, SVG or PDF, by its suffix.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    blocks = [row.blocks for row in rows]
    flat = (
        (f"match of {ASKED} keys, ms", [row.match_ms for row in rows]),
        ("the same over HTTP, CPU ms", [row.match_http_cpu_ms for row in rows]),
    )
    with picture(path, 9, 2.6) as figure:
        first, *middle, last = figure.subplots(1, 4)
        _grown(first, "memory above the first, B", blocks, memory_more(rows), memory_growth(rows))
        _grown(last, "start above the first, CPU s", blocks, restart_more(rows), restart_growth(rows))
        for axes, (name, values) in zip(middle, flat, strict=True):
            axes.plot(blocks, values, "o-", color="#08519c")
            axes.set_ylim(bottom=0)
            axes.set_title(name, fontsize=9)
        for axes in (first, *middle, last):
            axes.set_xscale("log")
            axes.set_xlabel("blocks", fontsize=8)
            axes.grid(color="#dddddd", linewidth=0.6)


def _grown(axes: Axes, name: str, blocks: Sequence[int], values: Sequence[float], law: Law | None) -> None:
    """Draw points on two logarithmic axes, and through them the law that was fitted."""
    above = [(x, y) for x, y in zip(blocks, values, strict=True) if y > 0]
    if above:
        axes.plot(*zip(*above, strict=True), "o", color="#08519c")
    if law is not None:
        axes.plot(
            blocks, [law.at(n) for n in blocks], "--", color="#bd0026", label=f"blocks^{law.exponent:.2f}"
        )
        axes.set_yscale("log")
        axes.legend(fontsize=8, frameon=False)
    axes.set_title(name, fontsize=9)
