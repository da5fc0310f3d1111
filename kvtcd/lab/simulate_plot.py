"""What policies find in a trace, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtcd.lab.picture import picture
from kvtcd.lab.simulate import Row

_COLOURS = ("#08519c", "#4292c6", "#9ecae1", "#d94801", "#fd8d3c", "#fdbe85", "#525252")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a group of bars for each budget and ratio, between raw LRU and the optimum over raw blocks.

    Args:
        rows: of `simulate`.
        path: PNG, SVG or PDF, by its suffix.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    groups = list(dict.fromkeys((row.budget_blocks, row.ratio) for row in rows))
    names = list(dict.fromkeys(row.policy for row in rows))
    width = 0.8 / len(names)
    with picture(path, 1.6 + 1.6 * len(groups), 4) as figure:
        axes = figure.subplots()
        for number, name in enumerate(names):
            bars = [row for row in rows if row.policy == name]
            places = [groups.index((row.budget_blocks, row.ratio)) for row in bars]
            middle = [place - 0.4 + (number + 0.5) * width for place in places]
            axes.bar(
                middle, [r.hit_ratio for r in bars], width, label=name, color=_COLOURS[number % len(_COLOURS)]
            )
        yards = [next(r for r in rows if (r.budget_blocks, r.ratio) == group) for group in groups]
        left, right = ([place + side for place in range(len(groups))] for side in (-0.45, 0.45))
        axes.hlines([row.belady for row in yards], left, right, "#333333", "-", label="optimum, raw")
        axes.hlines([row.hit_ratio_raw_lru for row in yards], left, right, "#333333", ":", label="LRU, raw")
        axes.set_xticks(
            range(len(groups)), [f"{budget:,} blocks\nratio {ratio:g}" for budget, ratio in groups]
        )
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.set_ylabel("blocks found")
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower center", ncols=len(names) + 2, frameon=False)
