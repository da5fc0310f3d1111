"""Times to the first token, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtcd.lab.bench_ttft import Row
from kvtcd.lab.picture import picture

_LINES = {
    "recompute": ("#636363", "recomputed"),
    "disk": ("#08519c", "packed on disk"),
    "host-packed": ("#e6550d", "packed in memory"),
    "host-raw": ("#31a354", "raw in memory"),
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw time to first token over the length of the prompt, a panel for each model.

    Args:
        rows: of `bench_ttft`.
        path: PNG, SVG or PDF, by its suffix.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    names = list(dict.fromkeys(row.model for row in rows))
    with picture(path, 0.6 + 3.6 * len(names), 3.0) as figure:
        panels = figure.subplots(1, len(names), squeeze=False)[0]
        for axes, name in zip(panels, names, strict=True):
            own = [row for row in rows if row.model == name]
            for source, (colour, label) in _LINES.items():
                line = [(row.tokens, row.ttft_s) for row in own if row.source == source]
                axes.plot(*zip(*line, strict=True), "o-", color=colour, label=label, markersize=3)
            floor = [(row.tokens, row.step_s) for row in own if row.source == "recompute"]
            axes.plot(*zip(*floor, strict=True), ":", color="#999999", label="one step of the model")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            tokens = sorted({row.tokens for row in own})
            axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
            axes.set_title(name.rpartition("-")[0] or name, fontsize=9)
            axes.set_xlabel("tokens of the prompt", fontsize=8)
            axes.grid(color="#dddddd", linewidth=0.6)
        panels[0].set_ylabel("seconds to the first token", fontsize=8)
        panels[0].legend(fontsize=7, frameon=False)
