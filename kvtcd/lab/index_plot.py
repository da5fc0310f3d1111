"""What blocks cost, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtcd.lab.bench_index import ASKED, Row
from kvtcd.lab.picture import picture


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw each figure over the number of blocks.

    Args:
        rows: of `bench_index`.
        path: PNG, SVG or PDF, by its suffix.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    blocks = [row.blocks for row in rows]
    curves = (
        ("memory, bytes each", [row.bytes_per_block for row in rows]),
        (f"match of {ASKED} keys, ms", [row.match_ms for row in rows]),
        ("the same over HTTP, ms", [row.match_http_ms for row in rows]),
        ("start, s", [row.restart_s for row in rows]),
    )
    with picture(path, 9, 2.6) as figure:
        for axes, (name, values) in zip(figure.subplots(1, len(curves)), curves, strict=True):
            axes.plot(blocks, values, "o-", color="#08519c")
            axes.set_xscale("log")
            axes.set_ylim(bottom=0)
            axes.set_title(name, fontsize=9)
            axes.set_xlabel("blocks", fontsize=8)
            axes.grid(color="#dddddd", linewidth=0.6)
