"""Attention problems of known law: keys, values, queries, and rows to calibrate on, of one trial.

The regimes have the names of "Ablation, Statistical Inference, and Validation for KV-Cache Compression"
(arXiv 2607.09683), which does not say how they are drawn; these are definitions under which its findings come
out. Rows are independent; those to calibrate on are drawn from the same law. All vectors have a mean squared
length of d.

A fat tail is one of each coordinate. An elliptical law (a row times a random length) would test nothing:
codecs store lengths.

Every trial has a seed sequence of its own, and data, calibration and each random part of a codec are children
of it: nothing is a seed plus a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtcd.lab.statistics import Floats

REGIMES = ("unit_sphere", "fattail", "lowrank", "lowrank_aligned", "lowrank_steep", "lowrank_misalign")
STRUCTURED = REGIMES[2:]
RANK = 8
_FREEDOM = 2.5
"""Degrees of freedom of Student's t: the variance is finite, the kurtosis is not."""
_NOISE = 0.05
_ALIGNED = 0.3
_DATA, _CALIBRATION, _CODEC = range(3)


@dataclass(frozen=True, eq=False)
class Problem:
    """Attention problems, one of each trial; float32.

    Attributes:
        keys, values: ``[N, S, D]``.
        queries: ``[N, Q, D]``.
        key_rows, value_rows: to calibrate on, ``[N, C, D]``.
        seeds: of the random parts of codecs, one of each trial.
        seen: what is done to keys before queries look at them; nothing without.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    key_rows: Tensor
    value_rows: Tensor
    seeds: tuple[int, ...]
    seen: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions, tokens, queries, and rows to calibrate on."""

    dim: int = 128
    tokens: int = 256
    queries: int = 8
    rows: int = 512


def draw(regime: str, shape: Shape, *, seed: int, trials: range) -> Problem:
    """Draw the problems of some trials; those of a trial do not depend on which others are drawn."""
    found = [_trial(regime, shape, sequence_of(regime, seed, trial)) for trial in trials]
    keys, values, queries, key_rows, value_rows = (
        torch.from_numpy(np.stack(part)).to(torch.float32) for part in zip(*found, strict=True)
    )
    seeds = tuple(codec_seed(sequence_of(regime, seed, trial)) for trial in trials)
    return Problem(keys, values, queries, key_rows, value_rows, seeds)


def sequence_of(regime: str, seed: int, trial: int) -> np.random.SeedSequence:
    """Return the seeds of one trial."""
    return np.random.SeedSequence(seed, spawn_key=(*regime.encode(), trial))


def codec_seed(sequence: np.random.SeedSequence) -> int:
    """Return the seed of what is random in codecs."""
    return int(_child(sequence, _CODEC).generate_state(1)[0])


def _child(sequence: np.random.SeedSequence, number: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(sequence.entropy, spawn_key=(*sequence.spawn_key, number))


def _trial(regime: str, shape: Shape, sequence: np.random.SeedSequence) -> tuple[Floats, ...]:
    data, calibration = (np.random.default_rng(_child(sequence, use)) for use in (_DATA, _CALIBRATION))
    d = shape.dim
    maps = _maps(regime, d, data)
    keys, values = (_rows(regime, data, shape.tokens, d, own) for own in maps)
    key_rows, value_rows = (_rows(regime, calibration, shape.rows, d, own) for own in maps)
    return keys, values, _queries(regime, data, shape.queries, d), key_rows, value_rows


def _maps(regime: str, d: int, draw: np.random.Generator) -> tuple[Floats, Floats]:
    """Return how the coordinates of keys, and of values, come from independent ones, ``[r, D]``."""
    match regime:
        case "unit_sphere" | "fattail":
            eye = np.eye(d)
            return eye, eye
        case "lowrank_aligned":
            axes = np.eye(d)[:RANK] * math.sqrt(d / RANK)
            return axes, axes
        case "lowrank":
            first, second = (haar(d, draw)[:RANK] * math.sqrt(d / RANK) for _ in range(2))
            return first, second
        case "lowrank_misalign":
            turned = haar(d, draw) * math.sqrt(d / RANK)
            return turned[:RANK], turned[RANK : 2 * RANK]
        case "lowrank_steep":
            spread = np.sqrt(d * 2.0 ** -np.arange(1, d + 1) + _NOISE**2)[:, None]
            first, second = (haar(d, draw) * spread for _ in range(2))
            return first, second
        case _:
            raise AssertionError(regime)


def _rows(regime: str, draw: np.random.Generator, count: int, d: int, mapped: Floats) -> Floats:
    if regime == "fattail":
        heavy: Floats = draw.standard_t(_FREEDOM, (count, d)) * math.sqrt((_FREEDOM - 2) / _FREEDOM)
        return heavy
    rows: Floats = draw.standard_normal((count, len(mapped))) @ mapped
    if regime == "unit_sphere":
        return _on_sphere(rows)
    if regime != "lowrank_steep":
        rows += _NOISE * draw.standard_normal((count, d))
    return rows


def _queries(regime: str, draw: np.random.Generator, count: int, d: int) -> Floats:
    if regime == "lowrank_aligned":
        inside = draw.standard_normal((count, RANK)) @ (np.eye(d)[:RANK] * math.sqrt(d / RANK))
        return _ALIGNED * (inside + draw.standard_normal((count, d)))
    rows: Floats = draw.standard_normal((count, d))
    return _on_sphere(rows) if regime == "unit_sphere" else rows


def _on_sphere(rows: Floats) -> Floats:
    found: Floats = rows / np.linalg.norm(rows, axis=1, keepdims=True) * math.sqrt(rows.shape[1])
    return found


def haar(d: int, draw: np.random.Generator) -> Floats:
    """Return an orthogonal matrix, uniform over all."""
    q, r = np.linalg.qr(draw.standard_normal((d, d)))
    return np.asarray(q * np.sign(np.diag(r)), np.float64)
