"""Other implementations of `tq-kv`: what two programs of one codec differ by, and no more.

One is the codec of a daemon (`codec.rivals.tq`), on each device there is; the other is NumPy in float64,
written from the paper alone: butterflies instead of a matrix, the nearest of all levels instead of edges.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvtcd.codec.rivals.codebook import beta
from kvtcd.codec.rivals.draws import Draw
from kvtcd.codec.rivals.method import Site
from kvtcd.codec.rivals.rotation import hadamard
from kvtcd.codec.rivals.tq import Tq
from kvtcd.lab.ablate import measures
from kvtcd.lab.ablate.regimes import Problem
from kvtcd.lab.ablate.sides import KEYS
from kvtcd.lab.statistics import Floats

_USES = 2


def divergences(problem: Problem, bits: int) -> dict[str, Floats]:
    """Return, by implementation, the logarithm of the divergence of each trial."""
    found = {"numpy float64": _by_numpy(problem, bits), "torch float32": _by_codec(problem, bits, "cpu")}
    if torch.cuda.is_available():
        found["cuda"] = _by_codec(problem, bits, "cuda")
    return {name: measures.of_keys(problem, keys)["kl"].log().numpy() for name, keys in found.items()}


def _by_codec(problem: Problem, bits: int, device: str) -> Tensor:
    _, tokens, dim = problem.keys.shape
    site = Site(layers=1, heads=1, dim=dim, key=True)
    found = []
    for keys, seed in zip(problem.keys, problem.seeds, strict=True):
        method = Tq(site, bits, hadamard(dim, Draw(seed, KEYS * _USES)))
        found.append(method.decode(method.encode(keys[None, :, None].to(device)), tokens)[0, :, 0].cpu())
    return torch.stack(found)


def _by_numpy(problem: Problem, bits: int) -> Tensor:
    keys = problem.keys.numpy().astype(np.float64)
    dim = keys.shape[2]
    levels = beta(bits, dim).levels.numpy().astype(np.float64)
    found = []
    for own, seed in zip(keys, problem.seeds, strict=True):
        signs = Draw(seed, KEYS * _USES).signs(1, dim).numpy()[0]
        norms = np.linalg.norm(own, axis=1, keepdims=True)
        turned = _butterflies(own * signs) / norms
        nearest = levels[np.abs(turned[..., None] - levels).argmin(axis=-1)]
        found.append(_butterflies(nearest) * signs * norms.astype(np.float16).astype(np.float64))
    return torch.from_numpy(np.stack(found))


def _butterflies(x: Floats) -> Floats:
    """Multiply rows with the Hadamard matrix over the root of its size."""
    y, half, dim = x.copy(), 1, x.shape[1]
    while half < dim:
        pairs = y.reshape(len(y), -1, 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        y = np.stack((first + second, first - second), axis=2).reshape(x.shape)
        half *= 2
    found: Floats = y / dim**0.5
    return found
