"""Attention problems out of caches of the user's own.

A trial is a document, the unit that differs by itself: what is measured on the heads looked at in it is
averaged, logarithms of divergences and of errors, before anything is tested. Bases are calibrated, for each
head, on the documents that are not tested: every other one. Keys are coded with RoPE undone and looked at
with RoPE, by queries of later tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvtcd.codec.rope import Rotation
from kvtcd.core.errors import ConfigError
from kvtcd.core.identity import Rope
from kvtcd.lab.ablate.cells import Cell, Row
from kvtcd.lab.ablate.contrasts import FIGURES
from kvtcd.lab.ablate.regimes import Problem, Shape, codec_seed, sequence_of
from kvtcd.lab.dump import Dump

REGIME = "caches"
_LEAST = 6
"""Documents to test; fewer cannot be significant at 5 % by signed ranks."""


@dataclass(frozen=True, slots=True)
class Site:
    """A layer and one of its heads."""

    layer: int
    head: int


@dataclass(frozen=True, slots=True)
class Rotated:
    """RoPE of keys ``[N, S, D]`` from some position on."""

    rope: Rope
    first: int

    def __call__(self, keys: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return Rotation(self.rope, self.first, keys.shape[1], inverse=False)(keys[:, :, None])[:, :, 0]


def check(dump: Dump, path: object) -> None:
    """Make sure that there is enough in a dump.

    Raises:
        ConfigError: too few documents, or no queries.
    """
    if len(dump.documents) < 2 * _LEAST:
        raise ConfigError(
            str(path),
            "",
            f"has {len(dump.documents)} documents; half calibrate, and {_LEAST} at least are tested",
        )
    if any(document.queries is None for document in dump.documents):
        raise ConfigError(str(path), "", "has no queries (0.q and so on), which `kvtcd eval dump` writes")


def sites(dump: Dump, count: int) -> list[Site]:
    """Return layers and heads spread over the model."""
    _, layers, heads, _ = dump.documents[0].keys.shape
    chosen = np.linspace(0, layers * heads - 1, min(count, layers * heads)).round().astype(int)
    return [Site(int(one) // heads, int(one) % heads) for one in chosen]


def cell(dump: Dump, tokens: int, rows: int, budgets: tuple[int, ...]) -> Cell:
    """Return what is measured."""
    shape = dump.documents[0]
    assert shape.queries is not None, "checked"
    length, _, heads, dim = shape.keys.shape
    queries = len(shape.queries) * (shape.queries.shape[2] // heads)
    return Cell(REGIME, Shape(dim, min(tokens, length), queries, rows), budgets)


def problem(dump: Dump, wanted: Sequence[Site], what: Cell, *, seed: int, trial: int) -> Problem:
    """Return the problems of one tested document, one of each site."""
    tested, others = dump.documents[1::2][trial], dump.documents[::2]
    shape = what.shape
    first = len(tested.keys) - shape.tokens
    layers, heads = [s.layer for s in wanted], [s.head for s in wanted]
    share = -(-shape.rows // len(others))
    rows: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for other in others:
        at = torch.linspace(4, len(other.keys) - 1, min(share, len(other.keys) - 4)).long()
        for own, x in zip(rows, (dump.unrotated(other), other.values), strict=True):
            own.append(x[at][:, layers, heads].float())
    keys = dump.unrotated(tested)[first:, layers, heads]
    values = tested.values[first:, layers, heads].float()
    assert tested.queries is not None, "checked"
    count, deep, _, dim = tested.queries.shape
    grouped = tested.queries.view(count, deep, tested.keys.shape[2], -1, dim)  # [Q, L, H, G, D]
    queries = grouped[:, layers, heads].float().transpose(0, 1).flatten(1, 2)
    base = sequence_of(REGIME, seed, trial)
    seeds = tuple(
        codec_seed(np.random.SeedSequence(seed, spawn_key=(*base.spawn_key, number)))
        for number in range(len(wanted))
    )
    return Problem(
        keys.transpose(0, 1).contiguous(),
        values.transpose(0, 1).contiguous(),
        queries.contiguous(),
        torch.cat(rows[0]).transpose(0, 1).contiguous(),
        torch.cat(rows[1]).transpose(0, 1).contiguous(),
        seeds,
        Rotated(dump.rope, first) if dump.rope else None,
    )


def folded(rows: Sequence[Row]) -> list[Row]:
    """Return one figure a document: geometric means of divergences and errors, means of all else."""
    found = []
    for row in rows:
        measured = {}
        for name, values in row.measured.items():
            array = np.asarray(values)
            mean = np.exp(np.log(array).mean()) if name in FIGURES else array.mean()
            measured[name] = (float(mean),)
        found.append(replace(row, measured=measured))
    return found
