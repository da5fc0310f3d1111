"""A stream of known law, profiles fitted to rows of it, and what `validate` says of held-out rows."""

from __future__ import annotations

import torch

from kvtcd.codec.allocate import allocate, budget_of
from kvtcd.codec.profile import StreamProfile
from kvtcd.lab.validation.check import Check
from kvtcd.lab.validation.checks import of_profile, of_rows
from kvtcd.lab.validation.verdict import Verdict, judge

LAYERS, HEADS, DIM = 3, 2, 8
P = LAYERS * HEADS * DIM
RATIO = 4


def law(seed: int = 0) -> torch.Tensor:
    """A map from independent coordinates to features with variances that fall off."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn((P, P), generator=draw)).Q
    return q * (2.0 ** -(torch.arange(P) / 6))


def rows(count: int, seed: int, mapped: torch.Tensor | None = None) -> torch.Tensor:
    """Normal rows of a law, about 3."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn((count, P), generator=draw) @ (law() if mapped is None else mapped).T + 3.0


def profile(sample: torch.Tensor, rank: int = P) -> StreamProfile:
    """The profile of rows, with a plan."""
    mean = sample.mean(dim=0)
    values, vectors = torch.linalg.eigh((sample - mean).T @ (sample - mean) / len(sample))
    spectrum, basis = values.flip(0).clamp_min(0)[:rank], vectors.flip(1).T[:rank]
    (plan,) = allocate((sample[:1000] - mean) @ basis.T, [budget_of(P, RATIO)])
    return StreamProfile(mean, basis.half(), spectrum, float(values.sum()), {RATIO: plan})


def judged(own: StreamProfile, held: torch.Tensor, tokens: int) -> tuple[Verdict, dict[str, Check]]:
    """What is said of rows ``[n, p]``, and the checks by name."""
    seen = of_rows(own, held.view(-1, LAYERS, HEADS, DIM))
    checks = [*of_profile(own, LAYERS, HEADS, tokens), *seen.checks]
    return judge(checks, tokens), {check.name: check for check in checks}
