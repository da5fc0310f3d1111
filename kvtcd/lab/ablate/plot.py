"""An ablation as a picture: where schemes win and lose, and rate against divergence in every cell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtcd.lab.ablate.contrasts import Table
from kvtcd.lab.ablate.schemes import NAMED, REFERENCE
from kvtcd.lab.picture import headline, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvtcd.lab.ablate.command import Figures

_SHOWN = {
    "tq-kv": "#08519c", "tq-qkv": "#6baed6", "plain-kv": "#999999", "squ-kv": "#fdae6b",
    "squ-kv-raw": "#d94801", "sqw-kv": "#238b45", "sqw-kv-raw": "#a1d99b",
}  # fmt: skip
_MOST = 6
"""Cells that are drawn."""


def draw(figures: Figures, path: Path) -> None:
    """Draw ratios of divergence to the reference, and curves of the first cells, into a file by its suffix.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    shown = figures.cells[:_MOST]
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    with picture(path, 9.6, 3.2 + 2.4 * lines) as figure:
        from matplotlib.gridspec import GridSpec  # noqa: PLC0415 - an extra

        places = GridSpec(lines + 1, columns, figure)
        _surface(figure.add_subplot(places[0, :]), figures)
        axes = [figure.add_subplot(places[1 + n // columns, n % columns]) for n in range(len(shown))]
        for (cell, rows), own in zip(shown, axes, strict=True):
            _curves(own, Table(cell.name, rows))
        axes[0].legend(frameon=False, fontsize=6)
        headline(figure, f"{figures.source or 'Problems of known law'}, {figures.trials} trials a cell")


def _surface(axes: Axes, figures: Figures) -> None:
    """Draw log10 of the ratio to the reference, a row for each scheme."""
    names = [name for name in NAMED if name != REFERENCE]
    found = {
        (one.of, f"{one.cell.partition(' ')[0]} {one.budget}"): one.found
        for one in figures.contrasts
        if one.figure == "kl" and one.over == REFERENCE
    }
    places = list(dict.fromkeys(place for _, place in found))
    ratios = np.array([[found[name, place].delta / np.log(10) for place in places] for name in names])
    image = axes.imshow(np.clip(ratios, -2, 2), cmap="RdBu_r", vmin=-2, vmax=2, aspect="auto")
    for row, name in enumerate(names):
        for column, place in enumerate(places):
            own = found[name, place]
            if own.lo <= 0 <= own.hi:
                axes.text(column, row, "·", ha="center", va="center")
    axes.set_xticks(range(len(places)), places, rotation=60, ha="right", fontsize=6)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.figure.colorbar(image, ax=axes, label=f"log10 of KL over {REFERENCE}")


def _curves(axes: Axes, table: Table) -> None:
    for name, colour in _SHOWN.items():
        if name in table.schemes:
            bits = [table.row(name, budget).bits for budget in table.budgets]
            kl = [np.exp(table.logs(name, budget, "kl").mean()) for budget in table.budgets]
            axes.plot(bits, kl, color=colour, marker="o", markersize=3, linewidth=1.2, label=name)
    axes.set_yscale("log")
    axes.set_title(table.name, fontsize=7)
    axes.set_xlabel("bits a value, all counted", fontsize=7)
    axes.set_ylabel("KL of keys", fontsize=7)
    axes.tick_params(labelsize=6)
    axes.grid(color="#dddddd", linewidth=0.6)
