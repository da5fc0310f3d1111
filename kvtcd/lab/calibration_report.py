"""How a calibration is shown: tables for people, figures for programs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from kvtcd.codec.profile import is_named
from kvtcd.codec.profiles import misnamed
from kvtcd.core.split import CANONICAL
from kvtcd.lab.calibration import Calibration
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.profile_view import curve_table
from kvtcd.terminal import Table

_MB = 1e6


def figures(made: Calibration, loaded: LoadedModel, path: Path, seconds: float) -> dict[str, object]:
    """Return what `--json` writes.

    Args:
        made: the calibration.
        loaded: the model.
        path: where its profile went.
        seconds: from beginning to end; `phases` sums up interrupted runs, this does not.
    """
    streams = made.profile.streams
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    return {
        "model": made.profile.origin.model,
        "parallel": made.profile.origin.parallel,
        "tokens": made.tokens,
        "fitted_tokens": made.profile.origin.tokens,
        "texts": [text.name for text in made.profile.origin.texts],
        "seconds": seconds,
        "phases": made.seconds,
        "profile": str(path),
        "profile_bytes": len(made.data),
        "model_bytes": sum(p.numel() * p.itemsize for p in loaded.model.parameters()),
        "parameters": parameters,
        "share_of_parameters": sum(stream.basis.numel() for stream in streams.values()) / parameters,
        "streams": {
            name: {
                "features": stream.basis.shape[1],
                "rank": stream.basis.shape[0],
                "captured": float(stream.spectrum.sum()) / stream.total,
                "captured_held_out": made.held_out[name].captured,
            }
            for name, stream in streams.items()
        },
        "ratios": [
            {
                "ratio": ratio,
                "bits_per_token": sum(stream.plans[ratio].cost for stream in streams.values()),
                "streams": {
                    name: {
                        "rank": stream.plans[ratio].rank,
                        "bits_per_token": stream.plans[ratio].cost,
                        "error": made.held_out[name].error[ratio],
                    }
                    for name, stream in streams.items()
                },
            }
            for ratio in made.profile.ratios
        ],
        "sensitivity": made.profile.origin.sensitivity,
        "curve": [dict(row) for row in made.profile.origin.curve],
    }


def show(console: Console, made: Calibration, path: Path, found: dict[str, object]) -> None:
    """Print what was made and what it took."""
    share, model_bytes = found["share_of_parameters"], found["model_bytes"]
    assert isinstance(share, float)
    assert isinstance(model_bytes, int)
    streams, origin = made.profile.streams, made.profile.origin
    whose = origin.model if origin.parallel == CANONICAL else f"{origin.model} {origin.parallel}"
    table = Table(
        title=f"Profile of {whose}: {made.tokens:,} tokens read, fitted to {origin.tokens:,}",
        caption="bytes before DEFLATE; error: share of the energy of held-out rows",
    )
    for heading in (
        "ratio",
        "bytes a token",
        *(f"{n} {what}" for n in streams for what in ("coded", "error")),
    ):
        table.add_column(heading, justify="right")
    raw = sum(2 * stream.basis.shape[1] for stream in streams.values())
    table.add_row(
        "1", f"{raw:,}", *(cell for s in streams.values() for cell in (f"{s.basis.shape[1]:,}", ""))
    )
    for ratio in made.profile.ratios:
        plans = {name: stream.plans[ratio] for name, stream in streams.items()}
        cells = [
            cell
            for name, plan in plans.items()
            for cell in (f"{plan.rank:,}", f"{made.held_out[name].error[ratio]:.1%}")
        ]
        table.add_row(str(ratio), f"{sum(plan.cost for plan in plans.values()) // 8:,}", *cells)
    console.print(table)
    if curve := made.profile.curve:
        console.print(curve_table(curve))
    for name, stream in streams.items():
        console.print(
            f"{name}: {stream.basis.shape[0]:,} of {stream.basis.shape[1]:,} components hold "
            f"{float(stream.spectrum.sum()) / stream.total:.1%} of the energy they were fitted to, "
            f"{made.held_out[name].captured:.1%} of that of held-out rows"
        )
    console.print(
        f"{len(made.data) / _MB:.1f} MB beside {model_bytes / _MB:.1f} MB of weights; "
        f"its bases have {share:.1%} as many numbers as the model has parameters"
    )
    console.print(", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in made.seconds.items()))
    if origin.starved:
        console.print(f"Its basis was {origin.starved}.", soft_wrap=True, highlight=False)
    console.print(str(path), soft_wrap=True, highlight=False)
    if not is_named(path):
        console.print(misnamed(made.profile.digest), soft_wrap=True, highlight=False)
