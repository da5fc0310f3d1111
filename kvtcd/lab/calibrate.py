"""`kvtcd calibrate`, and the profiles that the lab makes for itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from kvtcd import __version__, outputs, terminal
from kvtcd.codec.profile import SUFFIX, store
from kvtcd.codec.weighted import EXPONENT
from kvtcd.core.errors import ConfigError, Unavailable
from kvtcd.lab import models, texts
from kvtcd.lab.calibration import Sensitivity, calibrate, digest_of, name_of
from kvtcd.lab.calibration_report import figures, show
from kvtcd.lab.figures import write_json
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.parts import parts_of
from kvtcd.lab.phases import Phases
from kvtcd.lab.reading import SAMPLE, WINDOW

RECIPE_TOKENS = 32_768
"""Tokens of the recipe for the profiles that `profile_for` makes.

SmolLM2 at ratio 16, over eight windows of four kinds of text: .0219, .0188 and .0172 nats per token of
divergence with 16, 32 and 64 thousand tokens, for 140, 200 and 310 seconds of one busy core.
"""

_SENSITIVITY: Sensitivity = "fisher"
_WINDOWS = 4
"""At least so many windows are read, however few the tokens."""
_SHORT, _FEW = 512, 2048
"""Tokens of a window, and components of a stream, where memory is scarce."""


def command(
    *,
    model: str,
    files: Sequence[Path],
    tokens: int,
    seed: int,
    rank: int,
    sensitivity: Sensitivity,
    low_memory: bool,
    split: str | None,
    stage_layers: Sequence[int],
    threads: int | None,
    device: str,
    out: Path | None,
    json: Path | None,
) -> None:
    """Calibrate a model, write its profile, and say what it is like and what it took.

    Args:
        model: an alias or a folder, see `models.resolve`.
        files: files, see `texts.read`; the recipe when there are none.
        tokens: to read.
        seed: of every random choice.
        rank: cap on components.
        sensitivity: how errors are weighed, see `calibration.calibrate`.
        low_memory: read shorter windows, whose gradients take less, and cap components lower.
        split: over which ranks the model is split, each of which gets a profile; see `parts.parts_of`.
        stage_layers: layers of each stage of a pipeline; equally many without.
        threads: of the model and the fit; as many as torch chooses when None.
        device: where the model runs and the profile is fitted.
        out: a file, but not for several profiles, or a folder; profiles in the cache folder when None.
        json: a file for the figures.

    Raises:
        Unavailable: the model or the device cannot be had.
        UnsupportedCache, UnsupportedModel: it cannot be calibrated.
        ConfigError: a text, the split or the output cannot be used, or the texts have fewer tokens.
    """
    began = time.perf_counter()
    if threads:
        torch.set_num_threads(threads)
    sources = texts.read(files) if files else texts.recipe()
    target = out or models.cache_folder() / "profiles"
    check_place(target)
    if split and target.suffix == SUFFIX:
        raise ConfigError(target, "", "is one file; --split makes a profile for each rank: name a folder")
    console = terminal.console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with terminal.progress(console, *columns) as progress:
        loaded = models.load(models.resolve(model, progress))
        _move(loaded, device)
        identity = models.identity(loaded)
        ranks = calibrate(
            loaded, identity, sources, parts=parts_of(identity, split, stage_layers) if split else (),
            tokens=tokens, seed=seed, rank=min(rank, _FEW) if low_memory else rank,
            window=min(_SHORT if low_memory else WINDOW, _window(tokens)), sensitivity=sensitivity,
            checkpoints=_checkpoints(), phases=Phases(progress),
        )  # fmt: skip
    took, of_ranks = time.perf_counter() - began, []
    for made in ranks:
        path = _write(made.data, target)
        of_ranks.append(figures(made, loaded, path, took))
        show(console, made, path, of_ranks[-1])
    if json:
        write_json(json, "calibrate", {"ranks": of_ranks} if split else of_ranks[0])


def profile_for(loaded: LoadedModel, phases: Phases | None = None, *, tokens: int = RECIPE_TOKENS) -> Path:
    """Return the profile of a model by the built-in recipe: calibrated once, then found in the cache folder.

    The file is named by its digest and alone in its folder, which can serve a daemon as it is.

    Args:
        loaded: the model.
        phases: shows and times the minutes that a first use takes.
        tokens: to read, in windows that leave at least `_WINDOWS` of them.

    Raises:
        UnsupportedCache, UnsupportedModel: the model cannot be calibrated.
        ConfigError: the recipe has fewer tokens.
    """
    identity = models.identity(loaded)
    folder = recipe_folder(identity.weights, tokens)
    if not (found := sorted(folder.glob(f"*{SUFFIX}"))):
        (made,) = calibrate(
            loaded, identity, texts.recipe(), tokens=tokens, window=_window(tokens), sensitivity=_SENSITIVITY,
            checkpoints=_checkpoints(), phases=phases,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        found = [store(made.data, folder)]
    return found[0]


def recipe_folder(weights: str, tokens: int = RECIPE_TOKENS) -> Path:
    """Return the folder where `profile_for` puts its profile of a model, by the digest of its weights."""
    made_of = [
        __version__,
        weights,
        [_SENSITIVITY, repr(EXPONENT)],
        tokens,
        _window(tokens),
        SAMPLE,
        [digest_of(text) for text in texts.recipe()],
    ]
    return models.cache_folder() / "profiles" / name_of(made_of)


def _window(tokens: int) -> int:
    return min(WINDOW, tokens // _WINDOWS)


def _move(loaded: LoadedModel, device: str) -> None:
    try:
        loaded.model.to(device)  # type: ignore[arg-type]  # its decorator hides the signature
    except (RuntimeError, AssertionError) as error:  # torch has no class for either
        raise Unavailable(f"device {device} cannot be used: {error}") from error


def _checkpoints() -> Path:
    folder = models.cache_folder() / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_place(out: Path) -> None:
    """Refuse a place for a profile, a file or a folder, where it could not be written.

    Raises:
        ConfigError: why.
    """
    outputs.check_folder(_folder(out))
    if out.suffix == SUFFIX and _folder(out).is_dir():
        outputs.check(out)


def _folder(out: Path) -> Path:
    return out.parent if out.suffix == SUFFIX else out


def _write(data: bytes, out: Path) -> Path:
    """Write a profile, whole or not at all: into a folder under its digest, or as the given file.

    Raises:
        ConfigError: the disk has changed its mind.
    """
    try:
        _folder(out).mkdir(parents=True, exist_ok=True)
        path = store(data, _folder(out))
        return path.replace(out) if out.suffix == SUFFIX else path
    except OSError as error:
        raise ConfigError(out, "", f"cannot be written: {error.strerror}") from error
