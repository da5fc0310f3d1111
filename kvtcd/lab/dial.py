"""The rate-quality curve of `kvtc2`, measured on the windows that calibration has held out.

A window is read as sensitivities are gathered: its end behind the cache of its beginning. Every step is
measured on the same windows; intervals resample them (percentile bootstrap), so with few windows they say
what these texts have in common and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvtcd.codec.dial import Curve, Point
from kvtcd.codec.kvtc2 import Kvtc2
from kvtcd.codec.profile import Profile
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.stepped import Run, Span, Stepped
from kvtcd.codec.transform import views
from kvtcd.codec.weighted import Weighted
from kvtcd.codec.widths import LEAST, Widths
from kvtcd.core.blob import CodecId
from kvtcd.core.identity import Identity
from kvtcd.lab import evaluate
from kvtcd.lab.evaluate import Block, Document
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.parts import Part
from kvtcd.lab.phases import Phases
from kvtcd.lab.sensitivity import PART

_MOST, _LEAST = 0.85, 0.01
"""Shares of all features that are coded at the step the basis is trimmed for, and at the coarsest step."""
_GRID = 2**0.75
_FINER = 2
"""Further steps below, where codes get longer and no more components come in."""
_STEPS = 20
_RESAMPLES = 2_000


def steps(streams: Sequence[Weighted]) -> list[float]:
    """Return steps, ascending, by how many components each leaves to code of these streams."""
    features = sum(stream.basis.shape[1] for stream in streams)
    largest = max(float(stream.spread.max()) for stream in streams)

    def coded(step: float) -> float:
        widths = [Widths.of(stream.spread, step) for stream in streams]
        return sum(len(rows) for each in widths for rows in each.rows.values()) / features

    grid = [largest / LEAST / _GRID**n for n in range(_STEPS)]
    return sorted(step for step in grid if _LEAST <= coded(step) <= _MOST)


def finer(grid: Sequence[float]) -> list[float]:
    """Return the steps to measure, ascending: those of a grid, and some below."""
    return [*(grid[0] / _GRID**n for n in range(_FINER, 0, -1)), *grid]


def measure(
    loaded: LoadedModel,
    identity: Identity,
    ranks: Sequence[tuple[Part, Profile]],
    windows: Sequence[Sequence[int]],
    *,
    grid: Sequence[float],
    phases: Phases,
) -> list[Curve] | None:
    """Measure the curves of the profiles of all ranks of a model; None where no window can be used.

    All ranks are packed at once, at the same step: ratio and divergence are those of the model, the same for
    all; the error that a rank's guard goes by is its own.

    Args:
        loaded: the model.
        identity: of its caches, whole.
        ranks: their parts and profiles.
        windows: of tokens.
        grid: steps, ascending.
        phases: shows and times what goes on.

    Raises:
        UnsupportedCache: a layer of the model does not keep its whole past.
    """
    coders = [
        (part, Stepped(part.identity.layout, identity.rope, profile, loaded.model.device))
        for part, profile in ranks
    ]
    with phases.timed("curve"), phases.bar("rate and quality", len(grid) + 1) as advance:
        documents, floors = [], []
        for window in windows:
            behind = len(window) // PART
            documents.append(evaluate.read(loaded, identity, window, len(window) - behind))
            floors.append(evaluate.noise(loaded, identity, documents[-1]).kl)
        points: list[list[Point]] = []
        for done, step in enumerate(grid):
            advance(done + 1)
            if found := _points(loaded, identity, coders, documents, step):
                points.append(found)
    if len(points) < 2:
        return None
    return [Curve(own, float(np.mean(floors))) for own in zip(*points, strict=True)]


def _points(
    loaded: LoadedModel,
    identity: Identity,
    coders: Sequence[tuple[Part, Stepped]],
    documents: Sequence[Document],
    step: float,
) -> list[Point] | None:
    """Measure one step for each rank; None where it is too fine for the codes there are, or to measure."""
    sizes, qualities, errors = evaluate.Size(), [], [list[Tensor]() for _ in coders]
    for document in documents:
        recent = len(document.continuation)
        behind = [block.raw.clone() for block in document.blocks]
        for (part, coder), own in zip(coders, errors, strict=True):
            layout = part.identity.layout
            blocks = [
                replace(block, raw=part.take(block.raw, identity.layout, block.tokens))
                for block in document.blocks
            ]
            encoder = Kvtc2(
                layout, identity.rope, coder.profile, step, window=recent, device=loaded.model.device
            )
            encoded = evaluate.encode(encoder, blocks)
            if any(packed.codec is not CodecId.KVTC2 for packed in encoded):
                return None
            sizes += evaluate.size(layout, blocks, encoded, recent)
            own += [weighted_errors(coder, block, step, recent) for block in blocks]
            for raw, block, whole in zip(
                evaluate.decode(coder, blocks, encoded), blocks, behind, strict=True
            ):
                part.put(raw, whole, identity.layout, block.tokens)
        logits = evaluate.continue_behind(loaded, behind, identity.layout, document.continuation)
        qualities.append(evaluate.quality(document.logits, logits, document.continuation))
    low, high = _interval([quality.kl for quality in qualities])
    if low <= 0.0:  # less than the sum of a distribution's float32 logarithms can tell
        return None
    return [
        Point(
            step=step,
            ratio=sizes.ratio,
            error=float(torch.cat(own).mean()),
            kl=float(np.mean([quality.kl for quality in qualities])),
            kl_lo=low,
            kl_hi=high,
            top1=float(np.mean([quality.top1 for quality in qualities])),
        )
        for own in errors
    ]


def weighted_errors(coder: Stepped, block: Block, step: float, recent: int) -> Tensor:
    """Return weighted errors of a block's tokens that are neither sinks nor recent, as the guard sees them.

    They are infinite where these tokens cannot be coded at all.
    """
    coded = evaluate.coded_tokens(block, recent)
    if not coded:
        return torch.empty(0, device=block.raw.device)
    run = coder.analyze(
        views(block.raw, coder.layout, block.tokens),
        Span(coded.start - block.first_token, len(coded)),
        step,
        first_token=block.first_token,
        scratch=HeapScratch(),
    )
    return (
        run.error if isinstance(run, Run) else torch.full((len(coded),), torch.inf, device=block.raw.device)
    )


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean over windows."""
    draw = np.random.default_rng(0)
    means = draw.choice(np.asarray(values), (_RESAMPLES, len(values))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
