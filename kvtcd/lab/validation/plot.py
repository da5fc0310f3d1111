"""A validation as a picture: energy that is missed, calibrated and held out, and tails of coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtcd.core.errors import ConfigError
from kvtcd.lab.picture import headline, picture

if TYPE_CHECKING:
    from kvtcd.lab.validation.command import Stream

_LEAST = 1e-4


def draw(model: str, streams: Sequence[Stream], path: Path) -> None:
    """Draw every stream that was looked at, into a file by its suffix.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: there is nothing to draw, or the file cannot be written, or is of another type.
    """
    shown = [(stream.name, stream.verdict.word, stream.seen) for stream in streams if stream.seen]
    if not shown:
        raise ConfigError("--plot", "", "draws held-out caches; say --dump, or --model with --text")
    with picture(path, 8, 3 * len(shown)) as figure:
        axes = figure.subplots(len(shown), 2, squeeze=False)
        for (name, word, seen), (energy, tails) in zip(shown, axes, strict=True):
            for missed, label, colour in zip(
                seen.missed, ("calibration", "held out"), ("#999999", "#08519c"), strict=True
            ):
                rank = np.arange(1, len(missed) + 1)
                energy.plot(rank, missed.clamp_min(_LEAST).numpy(), color=colour, label=label)
            energy.set_xscale("log")
            energy.set_yscale("log")
            energy.set_title(f"{name}: {word}", fontsize=9)
            energy.set_xlabel("components of all layers")
            energy.set_ylabel("energy missed")
            energy.legend(frameon=False)
            tails.hist(seen.kurtosis.clamp(0, 20).numpy(), bins=60, color="#08519c")
            tails.axvline(3, color="#999999", linestyle=":")
            tails.axvline(9, color="#d94801", linestyle=":")
            tails.set_xlabel("kurtosis of a coordinate (normal: 3)")
            tails.set_ylabel("coordinates")
        headline(figure, f"{model}: profile against caches it was not made from")
