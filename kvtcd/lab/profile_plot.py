"""A profile as a picture: the energy of its components, the bits of its plans, the curve of its dial."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtcd.codec.dial import Curve
from kvtcd.codec.profile import Profile, StreamProfile
from kvtcd.lab.picture import headline, picture
from kvtcd.lab.profile_view import coded_energy, cumulative_energy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {8: "#08519c", 4: "#4292c6", 2: "#9ecae1"}
_TYPES = {8: "8 bits, floating point", 4: "4 bits", 2: "2 bits"}


def draw(profile: Profile, path: Path) -> None:
    """Draw a profile into a PNG, SVG or PDF file, by its suffix: a column per stream.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    curve = profile.curve
    with picture(path, 4.5 * len(profile.streams) + 0.8, 8.4 if curve else 5.4) as whole:
        from matplotlib.patches import Patch  # noqa: PLC0415 - an extra

        parts = whole.subfigures(2 if curve else 1, 1, squeeze=False, height_ratios=(9, 5)[: 1 + bool(curve)])
        figure = parts[0][0]
        axes = figure.subplots(
            2, len(profile.streams), squeeze=False, sharex="col", sharey="row", height_ratios=(3, 2)
        )
        if curve:
            _draw_curve(parts[1][0].subplots(), curve)
        for (name, stream), above, below in zip(profile.streams.items(), *axes, strict=True):
            _draw_energy(above, stream, profile.ratios)
            above.set_title(f"{name}: {stream.basis.shape[0]:,} of {stream.basis.shape[1]:,} components")
            _draw_plans(below, stream, profile.ratios)
            below.set_xlabel("principal component")
        axes[0][0].set_ylabel("energy in the first components")
        axes[1][0].set_ylabel("plan for ratio")
        patches = [Patch(color=_COLOURS[bits], label=label) for bits, label in _TYPES.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
        headline(whole, f"{profile.origin.model}, fitted to {profile.origin.tokens:,} tokens")


def _draw_curve(axes: Axes, curve: Curve) -> None:
    """Divergence over ratio, with the interval of each point and the floor."""
    ratios, kl = [point.ratio for point in curve.points], [point.kl for point in curve.points]
    reach = [
        [point.kl - point.kl_lo for point in curve.points],
        [point.kl_hi - point.kl for point in curve.points],
    ]
    axes.errorbar(ratios, kl, yerr=reach, color="#08519c", marker="o", markersize=4, capsize=2, linewidth=1.5)
    axes.axhline(curve.floor, color="#888888", linewidth=0.8, linestyle="--")
    axes.annotate("rounding alone", (ratios[-1], curve.floor), xytext=(0, 3), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
    axes.xaxis.set_minor_formatter(lambda ratio, _: f"{ratio:g}" if f"{ratio:g}"[0] in "235" else "")
    axes.set_xlabel("ratio of coded tokens")
    axes.set_ylabel("KL, nats per token")
    axes.set_title("kvtc2 on held-out text")
    axes.grid(color="#dddddd", linewidth=0.6)


def _draw_energy(axes: Axes, stream: StreamProfile, ratios: tuple[int, ...]) -> None:
    """The curve, and on it the last component of each plan."""
    cumulative = cumulative_energy(stream)
    axes.plot(range(1, len(cumulative) + 1), cumulative, color="#333333", linewidth=1.5)
    for ratio in ratios:
        if rank := stream.plans[ratio].rank:
            share = float(cumulative[rank - 1])
            axes.plot([rank], [share], "o", color="#d94801", markersize=4)
            axes.annotate(str(ratio), (rank, share), xytext=(0, 5), textcoords="offset points", ha="right")
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)


def _draw_plans(axes: Axes, stream: StreamProfile, ratios: tuple[int, ...]) -> None:
    """A bar per ratio, coloured by bits. Components count from 1; each spans half of either side."""
    for row, ratio in enumerate(ratios):
        plan = stream.plans[ratio]
        for band in plan.bands:
            axes.barh(
                row, band.stop - band.start, left=band.start + 0.5, height=0.7, color=_COLOURS[band.bits],
                linewidth=0,
            )  # fmt: skip
        axes.annotate(
            f"{plan.cost:,} bits a token, {coded_energy(stream, plan):.1%} of energy",
            (0.5, row), xytext=(5, 0), textcoords="offset points", va="center", color="white", fontsize=8,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(0.5, stream.basis.shape[1])
    axes.xaxis.set_major_formatter(lambda component, _: f"{component:,.0f}")
    axes.set_yticks(range(len(ratios)), [str(ratio) for ratio in ratios])
    axes.set_ylim(len(ratios) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
