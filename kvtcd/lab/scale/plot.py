"""What a shared store saves, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtcd.lab.picture import picture
from kvtcd.lab.scale.command import Least, Row

_STYLES = {"none": ":", "own": "--", "shared": "-"}
_CALLED = {"none": "no cache", "own": "own caches", "shared": "and a store"}
_COLOURS = ("#9ecae1", "#4292c6", "#08519c", "#d94801", "#525252")


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
        numbers = sorted({row.hosts for row in rows})
        seconds.set(xscale="log", yscale="log", xlabel="hosts", ylabel="first token, 95 % of requests (s)")
        seconds.set_xticks(numbers, [str(number) for number in numbers])
        seconds.minorticks_off()
        seconds.legend(frameon=False, fontsize=7)
        for ratio in ratios:
            line_of = [one for one in least if one.ratio == ratio and one.tokens is not None]
            lengths.plot(
                [one.link_gbit_s for one in line_of], [one.tokens or 0 for one in line_of], marker="o",
                markersize=3, label=f"ratio {ratio:g}", color=colours[ratio],
            )  # fmt: skip
        lengths.set(
            xscale="log", yscale="log", xlabel="link (Gbit/s)", ylabel="tokens from which on fetching pays"
        )
        lengths.legend(frameon=False)
