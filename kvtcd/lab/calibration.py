"""Calibration: a model and texts in, a profile out, or one for each rank of a model that is split.

The paper calibrates on 160,000 tokens in under ten minutes on a GPU, and its bases have 2.4 to 8.7 % of the
parameters of models of 1.5 to 70 billion (appendix B.1, tables 8 and 21). A basis has ``r p`` numbers, where
``p`` is the width of the KV heads of all layers side by side, and parameters grow faster with a model than
``p^2``: the smaller the model, the larger the share.

The result depends on model, texts, tokens, seed and rank and, through the order of floating-point sums, on
threads, device and torch. With all of these equal it is the same file to the last byte, however often
calibration was interrupted.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvtcd import __version__
from kvtcd.codec.allocate import squared_error
from kvtcd.codec.fit import MAX_RANK, fit_profile
from kvtcd.codec.origin import Origin
from kvtcd.codec.origin import Text as Source
from kvtcd.codec.profile import SUFFIX, Profile, StreamProfile, build
from kvtcd.core.identity import Identity
from kvtcd.core.layout import canonical_json
from kvtcd.lab import models
from kvtcd.lab.attention import local_gradients
from kvtcd.lab.checkpoint import Checkpoint, sweep
from kvtcd.lab.dial import finer, measure, steps
from kvtcd.lab.gather import Gathered, Taker, gather
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.parts import Part
from kvtcd.lab.phases import Phases
from kvtcd.lab.reading import SAMPLE, SINKS, WINDOW, Reading, plan_reading
from kvtcd.lab.sensitivity import Differentiate, gradients
from kvtcd.lab.texts import Text

Sensitivity = Literal["fisher", "attention", "none"]
_DIFFERENTIATE: dict[Sensitivity, Differentiate] = {"fisher": gradients, "attention": local_gradients}


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A stream of a profile on rows it was not fitted to; shares of their energy about the mean.

    Attributes:
        captured: by all components that the file has.
        error: by ratio, what its plan leaves.
    """

    captured: float
    error: dict[int, float]


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile, and what making it took.

    Attributes:
        profile: the profile.
        data: bytes of its file.
        tokens: that the model read.
        seconds: by phase, over all runs if it was interrupted.
        held_out: by stream.
    """

    profile: Profile
    data: bytes
    tokens: int
    seconds: dict[str, float]
    held_out: dict[str, HeldOut]


def calibrate(
    loaded: LoadedModel,
    identity: Identity,
    sources: Sequence[Text],
    *,
    parts: Sequence[Part] = (),
    tokens: int,
    seed: int = 0,
    rank: int = MAX_RANK,
    window: int = WINDOW,
    sensitivity: Sensitivity = "fisher",
    checkpoints: Path,
    every: float = 30.0,
    phases: Phases | None = None,
) -> list[Calibration]:
    """Run a model over texts once and fit a profile, or one for each rank.

    Args:
        loaded: the model; second moments lie on its device.
        identity: of its caches. Where no stream is rotated, keys are taken as they are in the cache.
        sources: the texts.
        parts: of all ranks; without, there is one, the whole.
        tokens: how many of them to read, in whole windows.
        seed: of every random choice.
        rank: cap on components.
        window: tokens of a window.
        sensitivity: how to weigh errors: by gradients (``fisher``), by what attention alone makes of them
            (``attention``), or all alike (``none``).
        checkpoints: folder for what was read so far, removed at the end. What killed runs have left half
            written there, and what is a month old, is removed as well.
        every: seconds between checkpoints.
        phases: shows and times what goes on.

    Raises:
        ConfigError: the texts have fewer tokens.
        UnsupportedCache: a layer of the model does not keep its whole past.
        UnsupportedModel: ``attention`` was asked for, and the model's is not of the standard kind.
    """
    start, phases = models.tokenize(loaded, ""), phases or Phases()
    ids = [models.tokenize(loaded, source.text)[len(start) :] for source in sources]
    reading = plan_reading(ids, tokens, seed=seed, window=window, start=start)
    ranks = parts or [Part.whole(identity)]
    origins = [_origin(part.identity, sources, reading, seed, sensitivity) for part in ranks]
    sweep(checkpoints)
    kept = [Checkpoint(checkpoints / _checkpoint_name(loaded, one, reading), every) for one in origins]
    takers = [
        Taker(part, checkpoint.restore(loaded.model.device), checkpoint.keep)
        for part, checkpoint in zip(ranks, kept, strict=True)
    ]
    if origins[0].starved:
        phases.note(f"The basis will be {origins[0].starved}.")
    phases.seconds |= takers[0].gathered.seconds
    if done := min(taker.gathered.read for taker in takers):
        phases.note(
            f"going on from the checkpoint in {checkpoints}: {done} of {len(reading.windows)} windows done"
        )
    gather(loaded, identity, reading, takers, phases=phases, differentiate=_DIFFERENTIATE.get(sensitivity))
    fitted = [
        _fit(origin, taker.gathered, rank, phases) for origin, taker in zip(origins, takers, strict=True)
    ]
    grid = steps([own for profile in fitted for own in profile.weighted.values()])
    fitted = [_trimmed(profile, profile.origin, grid[0])[0] for profile in fitted]
    curves = measure(
        loaded, identity, list(zip(ranks, fitted, strict=True)), reading.windows[: reading.held_out],
        grid=finer(grid), phases=phases,
    )  # fmt: skip
    made = []
    for number, trimmed in enumerate(fitted):
        curve = tuple(curves[number].to_json()) if curves else ()
        profile, data = _trimmed(trimmed, dataclasses.replace(origins[number], curve=curve), grid[0])
        samples = takers[number].gathered.samples
        held_out = {name: _held_out(stream, samples[name]) for name, stream in profile.streams.items()}
        made.append(Calibration(profile, data, sum(map(len, reading.windows)), phases.seconds, held_out))
    for checkpoint in kept:
        checkpoint.discard()
    return made


def _fit(origin: Origin, gathered: Gathered, rank: int, phases: Phases) -> Profile:
    weights = {name: found.moment for name, found in gathered.sensitivities.items()}
    predictor = gathered.tokens.rows(gathered.pilot_basis()) if gathered.tokens else None
    profile, _ = fit_profile(
        origin, gathered.moments, gathered.samples, rank=rank, weights=weights, tokens=predictor,
        weighed=gathered.weighed, watch=phases,
    )  # fmt: skip
    return profile


def _trimmed(profile: Profile, origin: Origin, step: float) -> tuple[Profile, bytes]:
    """Return a profile, and its file, without what the finest step that is measured leaves uncoded."""
    weighted = {name: own.trimmed(step) for name, own in profile.weighted.items()}
    return build(origin, profile.streams, weighted)


def _origin(
    identity: Identity, sources: Sequence[Text], reading: Reading, seed: int, sensitivity: Sensitivity
) -> Origin:
    return Origin(
        model=identity.model,
        weights=identity.weights,
        adapter=identity.adapter,
        rope=identity.rope,
        streams=identity.layout.streams,
        layers=identity.layout.layers,
        parallel=identity.parallel,
        sinks=SINKS,
        tokens=reading.fitted_tokens,
        texts=tuple(Source(source.name, digest_of(source)) for source in sources),
        seed=seed,
        version=__version__,
        sensitivity=sensitivity,
    )


def _checkpoint_name(loaded: LoadedModel, origin: Origin, reading: Reading) -> str:
    """Name of the file for what exactly these windows of this model come to, in this place."""
    windows = hashlib.sha256(repr(reading.windows).encode()).hexdigest()
    place = [torch.__version__, torch.get_num_threads(), str(loaded.model.device), str(loaded.model.dtype)]
    return name_of([origin.to_json(), windows, reading.held_out, SAMPLE, place]) + SUFFIX


def name_of(made_of: list[object]) -> str:
    """Return 32 hex digits that stand for JSON values."""
    return hashlib.sha256(canonical_json(made_of)).hexdigest()[:32]


def digest_of(text: Text) -> str:
    """Return the SHA-256 of a text, 64 hex digits."""
    return hashlib.sha256(text.text.encode()).hexdigest()


def _held_out(stream: StreamProfile, sample: Tensor) -> HeldOut:
    centred = sample.cpu() - stream.mean
    projected = centred @ stream.basis.to(torch.float32).t()
    energy = float(centred.square().sum(dtype=torch.float64))
    lost = energy - float(projected.square().sum(dtype=torch.float64))
    return HeldOut(
        captured=1 - lost / energy,
        error={
            ratio: (lost + squared_error(projected, plan)) / energy for ratio, plan in stream.plans.items()
        },
    )
