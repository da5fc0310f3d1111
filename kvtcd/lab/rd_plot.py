"""Rate and quality as a picture: divergence over ratio, a curve for each codec."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from kvtcd.lab.picture import headline, picture
from kvtcd.lab.rd_points import Point
from kvtcd.lab.statistics import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvtcd.lab.rd import Figures

_COLOURS = (
    "#08519c", "#d94801", "#238b45", "#6a51a3", "#525252", "#c51b8a", "#8c510a", "#1f9e9e", "#b8860b",
)  # fmt: skip
_MARKS = "osD^v"
"""Where there are more codecs than colours, the next mark begins with the first colour again."""
_BITS = 16
_FEW = 5
"""Codecs up to which their names find room among the curves."""


def draw(figures: Figures, path: Path) -> None:
    """Draw the points that lose something, with their intervals, into a PNG, SVG or PDF file, by its suffix.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    lossy = [point for point in figures.points if point.kl > 0]
    names = dict.fromkeys(point.codec for point in lossy)
    many = len(names) > _FEW
    with picture(path, 9 if many else 6.4, 6 if many else 4.4) as figure:
        from matplotlib.ticker import LogLocator, NullLocator  # noqa: PLC0415 - an extra

        axes = figure.subplots()
        looks = [(colour, mark) for mark in _MARKS for colour in _COLOURS]
        for (colour, mark), name in zip(looks, names, strict=False):
            _draw_codec(axes, name, [point for point in lossy if point.codec == name], colour, mark)
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
        bits = axes.secondary_xaxis("top", functions=(_inverted, _inverted))
        bits.set_xlabel("bits per value")
        bits.xaxis.set_major_locator(LogLocator(2, (1, 1.5)))
        bits.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        bits.xaxis.set_minor_locator(NullLocator())
        axes.set_ylabel("KL divergence, nats per token")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        legend = axes.legend(frameon=False, loc="upper left" if many else "best")
        if many:
            legend.set_bbox_to_anchor((1, 1))
        documents = f"{figures.documents} documents of {figures.context:,} tokens of context"
        headline(figure, f"{figures.model}, {documents}")


def _inverted(values: ArrayLike) -> Floats:
    """Turn ratios into bits per value, and back; matplotlib asks for that of zero too."""
    found: Floats = _BITS / np.maximum(np.asarray(values, np.float64), 1e-9)
    return found


def _draw_codec(axes: Axes, name: str, points: list[Point], colour: str, mark: str) -> None:
    points = sorted(points, key=lambda point: point.ratio)
    ratios, kl = [point.ratio for point in points], [point.kl for point in points]
    bars = [[max(p.kl - p.kl_lo, 0) for p in points], [max(p.kl_hi - p.kl, 0) for p in points]]
    axes.errorbar(
        ratios, kl, bars, color=colour, marker=mark, markersize=4, linewidth=1.5, capsize=2, label=name
    )
    for point in points:
        if point.dial is not None:
            axes.annotate(
                f"{point.dial:g}", (point.ratio, point.kl), xytext=(4, -9), textcoords="offset points",
                color=colour, fontsize=8,
            )  # fmt: skip
