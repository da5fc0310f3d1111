"""Sums over what the guard did, and how well the error it looks at ranks documents by their divergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtcd.lab.statistics import Floats, Indices, interval


@dataclass(frozen=True, slots=True)
class Case:
    """One document that was stored.

    Attributes:
        name: of its file, of what it is made of, or of what was done to its cache.
        blocks: those with coded tokens.
        finer, refused: of these, stored at a finer step, and losslessly.
        error: weighted error at the step asked for, over what calibration measured; infinite where the cache
            cannot be coded.
        ratio: of coded tokens, as stored.
        kl: divergence behind what was stored, from behind the cache that was to be stored, nats per token;
            NaN where the model says nothing behind that one either.
        kl_bare: the same without a guard.
    """

    name: str
    blocks: int
    finer: int
    refused: int
    error: float
    ratio: float
    kl: float
    kl_bare: float


@dataclass(frozen=True, slots=True)
class Point:
    """All documents of one name: sums of blocks, means of figures, and `kl_most`, the largest divergence."""

    name: str
    documents: int
    blocks: int
    finer: int
    refused: int
    error: float
    ratio: float
    kl: float
    kl_most: float
    kl_bare: float


@dataclass(frozen=True, slots=True)
class Rank:
    """Spearman's rank correlation of error and divergence without a guard, and its 95 % interval."""

    documents: int
    value: float
    lo: float
    hi: float


def points(cases: Sequence[Case]) -> list[Point]:
    """Sum up documents of one name, in the order they came."""
    found = []
    for name in dict.fromkeys(case.name for case in cases):
        own = [case for case in cases if case.name == name]
        found.append(
            Point(
                name=name,
                documents=len(own),
                blocks=sum(case.blocks for case in own),
                finer=sum(case.finer for case in own),
                refused=sum(case.refused for case in own),
                error=_mean([case.error for case in own]),
                ratio=_mean([case.ratio for case in own]),
                kl=_mean([case.kl for case in own]),
                kl_most=float(np.max([case.kl for case in own])),
                kl_bare=_mean([case.kl_bare for case in own]),
            )
        )
    return found


def rank(cases: Sequence[Case]) -> Rank:
    """Correlate ranks over documents that could be coded; resampled within documents of one name."""
    used = [case for case in cases if np.isfinite([case.error, case.kl_bare]).all()]
    both = np.array([[case.error, case.kl_bare] for case in used]).T

    def spearman(documents: Indices) -> Floats:
        error, divergence = (_ranks(values[documents]) for values in both)
        scale = np.sqrt(np.square(error).sum(axis=-1) * np.square(divergence).sum(axis=-1))
        correlation: Floats = (error * divergence).sum(axis=-1) / scale
        return correlation

    names = {name: number for number, name in enumerate(dict.fromkeys(case.name for case in used))}
    found = interval(spearman, [names[case.name] for case in used])
    return Rank(len(used), found.value, found.lo, found.hi)


def _ranks(values: Floats) -> Floats:
    """Ranks along the last axis about their mean; equal values share theirs."""
    mine, others = values[..., :, None], values[..., None, :]
    ranks: Floats = (others < mine).sum(axis=-1) + (others == mine).sum(axis=-1) / 2 - values.shape[-1] / 2
    return ranks


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
