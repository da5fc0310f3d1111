"""Stages of codecs beside the bare products, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtcd.lab.bench_codec_figures import STAGES, Figures, Row
from kvtcd.lab.picture import headline, picture

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

_COLOURS = (
    "#2171b5", "#c6dbef", "#6baed6", "#fdae6b", "#e6550d", "#e6550d", "#31a354", "#31a354", "#756bb1",
    "#756bb1", "#fa9fb5", "#bdbdbd",
)  # fmt: skip
"""By stage; what undoes something has the colour of what does it."""


def draw(figures: Figures, path: Path) -> None:
    """Draw a bar for each codec and case: its stages, by the time of the bare products.

    Args:
        figures: of `bench_codec`.
        path: PNG, SVG or PDF, by its suffix.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    rows = [row for row in figures.rows if row.rank is not None][::-1]
    with picture(path, 9, 1.6 + 0.22 * len(rows)) as figure:
        encode, decode = figure.subplots(1, 2, sharey=True)
        _bars(encode, "encode", rows, [(row.encode_stages, row.encode_over_floor) for row in rows])
        _bars(decode, "decode", rows, [(row.decode_stages, row.decode_over_floor) for row in rows])
        labels = {text: handle for axes in (encode, decode)
                  for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}  # fmt: skip
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=6, frameon=False)
        headline(figure, "Time of one block, by that of the bare matrix products in their fastest form")


def _bars(
    axes: Axes, title: str, rows: list[Row], drawn: list[tuple[Mapping[str, float], float | None]]
) -> None:
    names = [f"{row.codec}  {row.p:,} / {row.rank:,}" for row in rows]
    left = [0.0] * len(rows)
    for name, colour in zip(STAGES, _COLOURS, strict=True):
        widths = [found.get(name, 0.0) / sum(found.values()) * (over or 0.0) for found, over in drawn]
        if any(widths):
            axes.barh(names, widths, left=left, color=colour, height=0.7, label=name)
        left = [edge + width for edge, width in zip(left, widths, strict=True)]
    axes.axvline(1.0, color="#08306b", linewidth=1, label="bare products")
    axes.set_title(title, fontsize=9)
    axes.margins(y=0.01)
    axes.tick_params(axis="y", length=0, labelsize=8)
