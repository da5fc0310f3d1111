"""What a codec does to an attention problem, trial by trial.

``p = softmax(Q K^T / sqrt(D))``, the output is ``p V``. Divergence is of keys alone; the error of the output
is of both. The other four are the geometry of the error: lengths and directions of keys and of values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvtcd.lab.ablate.regimes import Problem
from kvtcd.lab.statistics import NOTHING

_TINY = 1e-30
MEASURES = (
    "kl", "output", "cosine", "top1", "key_mse", "value_mse", "key_norm", "key_direction", "value_norm",
    "value_direction",
)  # fmt: skip
"""Of each trial: divergence (nats) and agreement of the largest weight, means over queries; relative error
(norm) and cosine of the output; relative squared errors of keys and values; mean errors of lengths (relative)
and directions (one minus the cosine)."""


def of_keys(problem: Problem, keys: Tensor) -> Mapping[str, Tensor]:
    """Measure what depends on keys alone, each ``[N]``."""
    true, got = (_log_weights(problem, either) for either in (problem.keys, keys))
    divergence = (true.exp() * (true - got)).sum(dim=-1).mean(dim=-1)
    agreement = (true.argmax(dim=-1) == got.argmax(dim=-1)).to(torch.float64).mean(dim=-1)
    found = {"kl": divergence.clamp_min(NOTHING), "top1": agreement}
    return found | {f"key_{name}": values for name, values in _geometry(problem.keys, keys).items()}


def of_values(problem: Problem, values: Tensor) -> Mapping[str, Tensor]:
    """Measure what depends on values alone."""
    return {f"value_{name}": own for name, own in _geometry(problem.values, values).items()}


def of_output(problem: Problem, keys: Tensor, values: Tensor) -> Mapping[str, Tensor]:
    """Measure the output."""
    true = _log_weights(problem, problem.keys).exp() @ problem.values.to(torch.float64)
    got = _log_weights(problem, keys).exp() @ values.to(torch.float64)
    error = (got - true).flatten(1).norm(dim=1) / true.flatten(1).norm(dim=1)
    cosine = torch.nn.functional.cosine_similarity(true, got, dim=-1).mean(dim=-1)
    return {"output": error.clamp_min(_TINY), "cosine": cosine}


def _log_weights(problem: Problem, keys: Tensor) -> Tensor:
    queries = problem.queries.to(torch.float64) / keys.shape[-1] ** 0.5
    keys = problem.seen(keys) if problem.seen else keys
    weights: Tensor = (queries @ keys.to(torch.float64).mT).log_softmax(dim=-1)
    return weights


def _geometry(true: Tensor, got: Tensor) -> Mapping[str, Tensor]:
    want, have = true.to(torch.float64), got.to(torch.float64)
    lengths, others = (x.norm(dim=-1).clamp_min(_TINY) for x in (want, have))
    cosine = (want * have).sum(dim=-1) / (lengths * others)
    return {
        "mse": (have - want).square().sum(dim=(1, 2)) / want.square().sum(dim=(1, 2)),
        "norm": (others / lengths - 1).abs().mean(dim=1),
        "direction": (1 - cosine).mean(dim=1),
    }
