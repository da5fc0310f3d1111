"""What a shared store saves, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtcd.lab.picture import picture
from kvtcd.lab.scale.command import LINKS, Least, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {"none": ":", "own": "--", "shared": "-"}
_CALLED = {"none": "no cache", "own": "own caches", "shared": "and a store"}
_COLOURS = ("#fd8d3c", "#08519c", "#41ab5d", "#7a0177", "#525252")
_TICKS = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 1.5, 2, 3, 5, 7)]


def draw(rows: Sequence[Row], least: Sequence[Least], path: Path) -> None:
    """Draw the time to the first token by hosts, and the length from which on fetching pays by link.

    Args:
        rows: of `scale`.
        least: of `least_tokens`.
        path: PNG, SVG or PDF, by its suffix.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    ratios = list(dict.fromkeys(one.ratio for one in least))
    colours = dict(zip(ratios, _COLOURS * len(ratios), strict=False))
    with picture(path, 11, 4) as figure:
        seconds, lengths = figure.subplots(1, 2)
        for caches, ratio in dict.fromkeys((row.caches, row.ratio) for row in rows):
            line = [row for row in rows if (row.caches, row.ratio) == (caches, ratio)]
            name = _CALLED[caches] + (f", ratio {ratio:g}" if ratio else "")
            seconds.plot(
                [row.hosts for row in line], [row.first_token_p95_s for row in line], _STYLES[caches],
                marker="o", markersize=3, label=name, color=colours[ratio] if ratio else "#333333",
            )  # fmt: skip
        _label(seconds, "hosts", "first token, 95 % of requests (s)")
        seconds.set_xticks(sorted({row.hosts for row in rows}))
        seconds.legend(frameon=False, fontsize=7, handlelength=4)
        for ratio in ratios:
            line_of = [one for one in least if one.ratio == ratio and one.tokens is not None]
            lengths.plot(
                [one.link_gbit_s for one in line_of], [one.tokens or 0 for one in line_of], marker="o",
                markersize=3, label=f"ratio {ratio:g}", color=colours[ratio],
            )  # fmt: skip
        _label(lengths, "link (Gbit/s)", "tokens from which on fetching pays")
        lengths.set_xticks(LINKS)
        lengths.legend(frameon=False)


def _label(axes: Axes, across: str, up: str) -> None:
    """Make both axes logarithmic, with plain numbers."""
    axes.set(xscale="log", yscale="log", xlabel=across, ylabel=up)
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in _TICKS if low <= tick <= high])
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(color="#dddddd", linewidth=0.6)
