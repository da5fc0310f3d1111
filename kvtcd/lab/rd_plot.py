"""Rate and quality as a picture: divergence over ratio, a curve for each codec."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtcd.lab.picture import headline, picture
from kvtcd.lab.rd_points import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvtcd.lab.rd import Figures

_COLOURS = ("#08519c", "#d94801", "#238b45", "#6a51a3", "#525252")


def draw(figures: Figures, path: Path) -> None:
    """Draw the points that lose something, with their intervals, into a PNG, SVG or PDF file, by its suffix.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    lossy = [point for point in figures.points if point.kl > 0]
    with picture(path, 6.4, 4.4) as figure:
        from matplotlib.ticker import LogLocator, NullLocator  # noqa: PLC0415 - an extra

        axes = figure.subplots()
        for colour, name in zip(_COLOURS, dict.fromkeys(point.codec for point in lossy), strict=False):
            _draw_codec(axes, name, [point for point in lossy if point.codec == name], colour)
        if figures.noise.kl > 0:
            axes.axhline(
                figures.noise.kl, color="#999999", linestyle=":", linewidth=1, label="rounding alone"
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis, base, parts in ((axes.xaxis, 2, (1, 1.5)), (axes.yaxis, 10, (1, 2, 5))):
            axis.set_major_locator(LogLocator(base, parts))
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_locator(NullLocator())
        axes.set_xlabel("ratio, coded tokens, every stored byte counted")
        axes.set_ylabel("KL divergence, nats per token")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False)
        documents = f"{figures.documents} documents of {figures.context:,} tokens of context"
        headline(figure, f"{figures.model}, {documents}")


def _draw_codec(axes: Axes, name: str, points: list[Point], colour: str) -> None:
    points = sorted(points, key=lambda point: point.ratio)
    ratios, kl = [point.ratio for point in points], [point.kl for point in points]
    bars = [[max(p.kl - p.kl_lo, 0) for p in points], [max(p.kl_hi - p.kl, 0) for p in points]]
    axes.errorbar(
        ratios, kl, bars, color=colour, marker="o", markersize=4, linewidth=1.5, capsize=2, label=name
    )
    for point in points:
        if point.dial is not None:
            axes.annotate(
                f"{point.dial:g}", (point.ratio, point.kl), xytext=(4, -9), textcoords="offset points",
                color=colour, fontsize=8,
            )  # fmt: skip
