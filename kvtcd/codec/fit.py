"""From what calibration gathered to a profile: the end of calibration, once the model has run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from kvtcd.codec.allocate import allocate, budget_of
from kvtcd.codec.basis import Moments, principal
from kvtcd.codec.origin import Origin
from kvtcd.codec.plan import Plan
from kvtcd.codec.profile import Profile, StreamProfile, build
from kvtcd.codec.weighted import fit

RATIOS = (8, 16, 32, 64)
MAX_RANK = 10_000
"""The paper's cap on components (appendix B.1)."""


def fit_profile(
    origin: Origin,
    moments: Mapping[str, Moments],
    samples: Mapping[str, Tensor],
    *,
    ratios: Sequence[int] = RATIOS,
    rank: int = MAX_RANK,
    weights: Mapping[str, Tensor] | None = None,
    tokens: Mapping[str, Tensor] | None = None,
    weighed: Mapping[str, Moments] | None = None,
    watch: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> tuple[Profile, bytes]:
    """Fit bases and plans; return the profile and the bytes of its file (see `profile.store`).

    Args:
        origin: model, texts and seed; the seed is that of the random basis too.
        moments: by stream, of the rows (`transform.rows`) of all calibration tokens but the sinks.
        samples: by stream, some of those rows or rows of further text to allocate bits on, float32
            ``[n, p]``. The paper takes 32,000; 2,000 give the same plans but for a few groups.
        ratios: nominal ratios to make plans for.
        rank: cap on components.
        weights: by stream, second moments of gradients ``[L, H, D, D]``; without, all errors weigh alike.
        tokens: by stream, what predicts the sensitivity of tokens, see `weighted.fit`; without, tokens are
            alike.
        weighed: by stream, moments of rows that count by their sensitivity; `moments` where they are alike.
        watch: is told the name of each phase and surrounds it.
    """
    streams: dict[str, StreamProfile] = {}
    for stream in origin.streams:
        gathered = moments[stream.name]
        mean = gathered.mean
        with watch(f"basis of {stream.name}"):
            basis, spectrum = principal(gathered, min(rank, len(mean)), seed=origin.seed)
        # Allocation sees the basis that the file will hold.
        stored = basis.half()
        with watch(f"bits of {stream.name}"):
            projected = (samples[stream.name].to(mean.device) - mean) @ stored.to(mean.dtype).t()
            plans = _plans(projected, len(mean), ratios)
        streams[stream.name] = StreamProfile(
            mean=mean,
            basis=stored,
            spectrum=spectrum,
            total=float(gathered.covariance().diagonal().sum()),
            plans=plans,
        )
    with watch("weighted bases"):
        weighted = fit(
            weighed or moments,
            samples,
            weights or _alike(origin, moments),
            tokens or {},
            rank=rank,
            seed=origin.seed,
        )
    return build(origin, streams, weighted)


def _alike(origin: Origin, moments: Mapping[str, Moments]) -> dict[str, Tensor]:
    """Second moments of gradients as if all features mattered alike, in proportion to what they vary."""
    found = {}
    for stream in origin.streams:
        variance = moments[stream.name].covariance().diagonal().mean()
        eye = torch.eye(stream.head_dim, device=variance.device) / variance
        found[stream.name] = eye.expand(origin.layers, stream.heads, -1, -1)
    return found


def _plans(projected: Tensor, features: int, ratios: Sequence[int]) -> dict[int, Plan]:
    budgets = [budget_of(features, ratio) for ratio in ratios]
    return dict(zip(ratios, allocate(projected, budgets), strict=True))
