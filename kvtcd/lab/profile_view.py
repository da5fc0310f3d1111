"""`kvtcd profile show`: what a profile was made of, what its components hold, what plans and steps cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from torch import Tensor

from kvtcd import terminal
from kvtcd.codec.dial import Curve, Point
from kvtcd.codec.plan import WIDTHS, Plan
from kvtcd.codec.profile import Profile, StreamProfile, is_named, load
from kvtcd.codec.profiles import misnamed
from kvtcd.core.errors import ConfigError
from kvtcd.lab.figures import write_json
from kvtcd.terminal import Table

_TYPES = {8: "fp8", 4: "int4", 2: "int2"}
_HEIGHTS = {8: "█", 4: "▄", 2: "▂", 0: " "}
_STRIP = 24
"""Characters of the strip that draws a plan."""
_SHARES = (32, 16, 8, 4)
"""Energy is given at ``p`` over these ranks."""


def command(file: Path, *, plot: Path | None, json: Path | None) -> None:
    """Show a profile as tables, and as a picture and as JSON if asked.

    Raises:
        Corrupt: the file is no profile, or damaged.
        ConfigError: it cannot be read, or the picture not be written.
        Unavailable: matplotlib is not installed.
    """
    try:
        profile = load(file)
    except OSError as error:
        raise ConfigError(file, "", f"cannot be read: {error.strerror}") from error
    show(console := terminal.console(), profile)
    if profile.origin.starved:
        console.print(f"Its basis was {profile.origin.starved}.", soft_wrap=True, highlight=False)
    if not is_named(file):
        console.print(f"{file.name}: {misnamed(profile.digest)}", soft_wrap=True, highlight=False)
    if json:
        write_json(json, "profile show", figures(profile) | {"profile_bytes": file.stat().st_size})
    if plot:
        from kvtcd.lab.profile_plot import draw  # noqa: PLC0415 - loads matplotlib, which not all have

        draw(profile, plot)


def figures(profile: Profile) -> dict[str, object]:
    """Return what `--json` writes."""
    curve = profile.curve
    return {
        "digest": profile.digest.hex(),
        "origin": profile.origin.to_json(),
        "streams": {
            name: {
                "features": stream.basis.shape[1],
                "rank": stream.basis.shape[0],
                "energy": [{"rank": rank, "share": share} for rank, share in energy(stream)],
                "plans": [_plan_figures(stream, ratio) for ratio in profile.ratios],
            }
            for name, stream in profile.streams.items()
        },
        "weighted": {
            name: {"rank": len(stream.basis), "bytes": stream.basis.nbytes}
            for name, stream in profile.weighted.items()
        },
        "curve": [_point_figures(point) for point in curve.points] if curve else [],
        "floor": curve.floor if curve else None,
    }


def energy(stream: StreamProfile) -> list[tuple[int, float]]:
    """Return (rank, share of the energy of the rows it was fitted to) at some ranks, the basis's own last."""
    rank, features = stream.basis.shape
    cumulative = cumulative_energy(stream)
    ranks = [features // share for share in _SHARES if 0 < features // share < rank]
    return [(at, float(cumulative[at - 1])) for at in (*ranks, rank) if at]


def cumulative_energy(stream: StreamProfile) -> Tensor:
    """Return the share of energy in the first 1, 2, ... r components: ``[r]``."""
    return stream.spectrum.cumsum(dim=0) / stream.total


def coded_energy(stream: StreamProfile, plan: Plan) -> float:
    """Return the share of energy in the components that a plan codes."""
    coded = [index for index, bits in enumerate(widths(plan)) if bits]
    return float(stream.spectrum[coded].sum()) / stream.total


def widths(plan: Plan) -> list[int]:
    """Return the bits of each component up to the last coded one."""
    bits = [0] * plan.rank
    for group in plan.groups:
        bits[group.start : group.start + group.size] = [group.bits] * group.size
    return bits


def show(console: Console, profile: Profile) -> None:
    """Print a profile as tables."""
    console.print(_origin_table(profile))
    console.print(_energy_table(profile))
    for name, stream in profile.streams.items():
        console.print(_plan_table(name, stream, profile.ratios))
    if curve := profile.curve:
        console.print(curve_table(curve))


def curve_table(curve: Curve) -> Table:
    """Return what `kvtc2` costs and saves by step."""
    caption = f"KL in nats per token, bounds at 95 % over windows; rounding alone: {curve.floor:.2g}"
    if not any(point.bounds for point in curve.points):
        caption += "\nOne window alone tells no bounds: calibrate on more tokens"
    if curve.dips:
        caption += "\nThe divergence dips where it should rise: calibrate on more tokens to rely on it"
    table = Table(title="kvtc2 on held-out text", caption=caption)
    for heading in ("ratio", "KL", "", "top-1", "step"):
        table.add_column(heading, justify="right")
    for point in curve.points:
        bounds = "{:.2g} to {:.2g}".format(*point.bounds) if point.bounds else "—"
        table.add_row(
            f"{point.ratio:.1f}", f"{point.kl:.2g}", bounds, f"{point.top1:.1%}", f"{point.step:.2e}"
        )
    return table


def _point_figures(point: Point) -> dict[str, float | None]:
    """Return a point of the curve, null for bounds that there are none of."""
    return asdict(point) | ({} if point.bounds else {"kl_lo": None, "kl_hi": None})


def _plan_figures(stream: StreamProfile, ratio: int) -> dict[str, object]:
    plan = stream.plans[ratio]
    return {
        "ratio": ratio,
        "bits_per_token": plan.cost,
        "rank": plan.rank,
        "energy": coded_energy(stream, plan),
        "components": {str(bits): plan.components(bits) for bits in WIDTHS},
        "groups": [
            {"size": size, "bits": bits, "count": count} for (bits, size), count in _groups(plan).items()
        ],
    }


def _groups(plan: Plan) -> dict[tuple[int, int], int]:
    """Count groups by (bits, size), the finest first."""
    counted = Counter((group.bits, group.size) for group in plan.groups)
    return dict(sorted(counted.items(), key=lambda item: (-item[0][0], item[0][1])))


def _origin_table(profile: Profile) -> Table:
    origin = profile.origin
    table = Table(title=f"Profile of {origin.model}", show_header=False)
    table.add_row("digest", profile.digest.hex())
    table.add_row("weights", origin.weights)
    table.add_row("adapter", origin.adapter)
    rope = origin.rope
    table.add_row("RoPE", f"{rope.kind}, theta {rope.theta:g}, {rope.pairing}" if rope else "none")
    table.add_row(
        "fitted to",
        f"{origin.tokens:,} tokens; more were read: the first {origin.sinks} of each window are left out, "
        "and windows held out to measure on",
    )
    for text in origin.texts:
        table.add_row("text", f"{text.name}, SHA-256 {text.sha256[:16]}…")
    if profile.weighted:
        table.add_row("weights of errors", origin.sensitivity)
    table.add_row("made by", f"kvtcd {origin.version}, seed {origin.seed}, {origin.parallel}")
    return table


def _energy_table(profile: Profile) -> Table:
    table = Table(title="Energy of the rows fitted to, in the first components")
    for heading in ("", "L x H x D", "p", *(f"p/{share}" for share in _SHARES), "rank", "all"):
        table.add_column(heading, justify="right")
    for described in profile.origin.streams:
        stream = profile.streams[described.name]
        rank, features = stream.basis.shape
        at = dict(energy(stream))
        table.add_row(
            described.name,
            f"{profile.origin.layers} x {described.heads} x {described.head_dim}",
            f"{features:,}",
            *(f"{at[cut]:.1%}" if (cut := features // share) in at else "" for share in _SHARES),
            f"{rank:,}",
            f"{at.get(rank, 0.0):.1%}",
        )
    return table


def _plan_table(name: str, stream: StreamProfile, ratios: tuple[int, ...]) -> Table:
    longest = max(plan.rank for plan in stream.plans.values())
    table = Table(
        title=f"Plans of {name}",
        caption=f"bytes a token before DEFLATE, ranges included; the strip spans {longest:,} components",
    )
    for heading in ("ratio", "bytes", "coded", "energy"):
        table.add_column(heading, justify="right")
    table.add_column("size x count")
    table.add_column("bits by component", no_wrap=True, min_width=_STRIP)
    for ratio in ratios:
        plan = stream.plans[ratio]
        table.add_row(
            str(ratio),
            f"{plan.cost / 8:,.0f}",
            f"{sum(plan.components(bits) for bits in WIDTHS):,}",
            f"{coded_energy(stream, plan):.1%}",
            _describe(plan),
            _strip(plan, longest),
        )
    return table


def _describe(plan: Plan) -> str:
    """Groups by type, a line each."""
    groups = _groups(plan)
    lines = []
    for bits, name in _TYPES.items():
        if sizes := [f"{size}x{count}" for (width, size), count in groups.items() if width == bits]:
            lines.append(f"{name} {' '.join(sizes)}")
    return "\n".join(lines)


def _strip(plan: Plan, longest: int) -> str:
    """Draw the most bits of any component in each of `_STRIP` runs."""
    bits = widths(plan) + [0] * (longest - plan.rank)
    edges = [longest * step // _STRIP for step in range(_STRIP + 1)]
    return "".join(_HEIGHTS[max(bits[start:stop], default=0)] for start, stop in pairwise(edges))
