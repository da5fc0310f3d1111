"""Calibration budgets as a picture: divergence at fixed bytes, and directions found, over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtcd.lab.budget_points import Row
from kvtcd.lab.codec_spec import spelled
from kvtcd.lab.picture import headline, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvtcd.lab.budget import Figures

_COLOURS = ("#08519c", "#d94801", "#238b45", "#6a51a3", "#525252")
_LINES = ("-", "--", ":")
"""Of streams."""


def draw(figures: Figures, path: Path) -> None:
    """Draw a budget study into a PNG, SVG or PDF file, by its suffix.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    codecs = {spelled(row.codec, row.dial): row for row in figures.rows}
    with picture(path, 9.2, 4.0) as figure:
        from matplotlib.ticker import LogLocator, NullLocator  # noqa: PLC0415 - an extra

        left, right = figure.subplots(1, 2)
        for colour, (name, one) in zip(_COLOURS, codecs.items(), strict=False):
            own = [row for row in figures.rows if (row.codec, row.dial) == (one.codec, one.dial)]
            _draw_codec(left, right, f"{name} at ratio {one.ratio:.1f}", own, colour)
        left.set_ylabel("KL divergence at equal bytes, nats per token")
        right.set_ylabel("components coded")
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("tokens of the calibration")
            axes.xaxis.set_major_locator(LogLocator(2))
            axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(lambda value, _: f"{value:,g}")
                axis.set_minor_locator(NullLocator())
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.legend(frameon=False, fontsize=8)
        headline(
            figure, f"{figures.model}, {figures.documents} documents of {figures.context:,} tokens of context"
        )


def _draw_codec(left: Axes, right: Axes, name: str, own: list[Row], colour: str) -> None:
    shown = [row for row in own if row.kl > 0]  # no logarithm of others: all was stored losslessly
    tokens, kl = [row.tokens for row in shown], [row.kl for row in shown]
    bars = [[max(row.kl - row.kl_lo, 0) for row in shown], [max(row.kl_hi - row.kl, 0) for row in shown]]
    left.errorbar(
        tokens, kl, bars, color=colour, marker="o", markersize=4, linewidth=1.5, capsize=2, label=name
    )
    budgets = [row.tokens for row in own]
    for line, stream in zip(_LINES, own[0].dimension, strict=False):
        coded = [row.dimension[stream].coded for row in own]
        right.plot(budgets, coded, line, color=colour, marker="o", markersize=3, label=f"{name}, {stream}")
