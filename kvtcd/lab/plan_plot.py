"""A plan as a picture: what budgets find, and from which length on fetching pays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtcd.config import show_bytes
from kvtcd.lab.picture import picture
from kvtcd.lab.simulate import Row
from kvtcd.lab.speeds import Speeds


def draw(nbytes: Sequence[int], rows: Sequence[Row], speeds: Speeds | None, tokens: int, path: Path) -> None:
    """Draw hits by budget, and seconds by length.

    Args:
        nbytes: budgets.
        rows: what each finds of a trace, if there is one.
        speeds: what reading and fetching cost, if that is known.
        tokens: that were planned for; lengths reach to twice that.
        path: PNG, SVG or PDF, by its suffix.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    panels = bool(rows) + bool(speeds)
    with picture(path, 5.5 * max(1, panels), 4) as figure:
        axes = iter(figure.subplots(1, max(1, panels), squeeze=False)[0])
        if rows:
            hits, places = next(axes), range(len(rows))
            hits.bar(places, [row.hit_ratio for row in rows], 0.6, label="packed", color="#08519c")
            ends = ([place - 0.4 for place in places], [place + 0.4 for place in places])
            hits.hlines([row.hit_ratio_raw_lru for row in rows], *ends, "#333333", ":", label="LRU, raw")
            hits.hlines([row.belady for row in rows], *ends, "#333333", "-", label="optimum, raw")
            hits.set_xticks(places, [show_bytes(each) for each in nbytes])
            hits.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
            hits.set_ylabel("blocks found")
            hits.legend(frameon=False)
        if speeds:
            seconds, lengths = next(axes), np.geomspace(16, 2 * max(tokens, 16), 100)
            seconds.plot(
                lengths, [speeds.prefill.at(n) for n in lengths], color="#333333", label="read again"
            )
            for source, cost in speeds.reuse.items():
                seconds.plot(lengths, [cost.at(n) for n in lengths], label=f"fetch, {source}")
            seconds.set(xscale="log", yscale="log", xlabel="tokens of the prefix", ylabel="seconds")
            seconds.legend(frameon=False)
