"""Attention problems out of caches of the user's own.

A trial is a document, the unit that differs by itself: what is measured on the heads looked at in it is
averaged, logarithms of divergences and of errors, before anything is tested. Bases are calibrated, for each
head, on the documents that are not tested: every other one. Keys are coded with RoPE undone and looked at
with RoPE, by queries of later tokens.

Documents may be of any length, but all trials have one shape: the last tokens of each tested document, as
many as the shortest has behind its sinks, or as were asked for, and the first of its queries, as many as the
fewest are.
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
from kvtcd.lab.ablate.schemes import transforms
from kvtcd.lab.dump import SINKS, Document, Dump

REGIME = "caches"
_LEAST = 6
"""Documents to test; fewer cannot be significant at 5 % by signed ranks."""
_SHORTEST = 16
"""Tokens; fewer behind the sinks are no cache to compare codecs on."""
_NARROWEST = 16
"""Dimensions of a head; of fewer, budgets come to the same bits, and there are no bands of components."""
_LONGEST = torch.finfo(torch.float16).max / 2
"""Of a vector: schemes store lengths, also about the mean of a channel, in float16."""


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
        ConfigError: too few documents, one that is too short, one without queries, heads that are too narrow,
            or values that are nothing but zero or too large.
    """
    if (dim := dump.documents[0].keys.shape[3]) < _NARROWEST:
        raise ConfigError(str(path), "0.k", f"has heads of {dim} dimensions; it takes {_NARROWEST}")
    if len(dump.documents) < 2 * _LEAST:
        raise ConfigError(
            str(path),
            "",
            f"has {len(dump.documents)} documents; half calibrate, and {_LEAST} at least are tested",
        )
    for number, document in enumerate(dump.documents):
        if document.queries is None:
            raise ConfigError(
                str(path), f"{number}.q", "is missing: it takes queries, which `kvtcd eval dump` writes"
            )
        if (tokens := len(document.keys)) < SINKS + _SHORTEST:
            raise ConfigError(
                str(path),
                f"{number}.k",
                f"has {tokens} tokens, fewer than {SINKS + _SHORTEST}: leave the document out",
            )
        for name, tensor in (("k", document.keys), ("v", document.values)):
            own = tensor[SINKS:]
            if not own.any():
                raise ConfigError(
                    str(path),
                    f"{number}.{name}",
                    f"is zero behind the first {SINKS} tokens, so there is nothing to tell: leave the "
                    "document out",
                )
            if (longest := float(own.float().norm(dim=3).max())) > _LONGEST:
                raise ConfigError(
                    str(path),
                    f"{number}.{name}",
                    f"has a vector of length {longest:.3g}; lengths are stored in float16, which ends at "
                    f"{2 * _LONGEST:g}, and beyond half of that nothing can be told",
                )
    if not _live(dump):
        raise ConfigError(
            str(path), "", "has no head whose keys and values are not all zero in some document"
        )


def check_figures(rows: Sequence[Row], path: object, trial: int) -> None:
    """Make sure that there is something to compare in what was measured of a document.

    Raises:
        ConfigError: a divergence or an error is no number, as where the untouched output is zero.
    """
    for row in rows:
        for figure in FIGURES:
            if not np.isfinite(row.measured[figure]).all():
                raise ConfigError(
                    str(path),
                    f"{2 * trial + 1}.k",
                    f"nothing can be told of this document: {row.scheme} at {row.budget} bits has a figure "
                    f"`{figure}` that is no number, as where the untouched output is zero; leave it out",
                )


def sites(dump: Dump, count: int) -> list[Site]:
    """Return layers and heads spread over the model, of those that there is something to tell of."""
    live = _live(dump)
    chosen = np.linspace(0, len(live) - 1, min(count, len(live))).round().astype(int)
    return [live[one] for one in chosen]


def _live(dump: Dump) -> list[Site]:
    """Return the heads whose keys and values are not all zero behind the sinks, in any document."""
    found = torch.stack(
        [
            tensor[SINKS:].ne(0).any(dim=3).any(dim=0)
            for document in dump.documents
            for tensor in (document.keys, document.values)
        ]
    ).all(dim=0)
    return [Site(layer, head) for layer, head in found.nonzero().tolist()]


def cell(dump: Dump, tokens: int, rows: int, budgets: tuple[int, ...]) -> Cell:
    """Return what is measured of a dump that is as it should be (`check`).

    Args:
        dump: the caches.
        tokens: to measure of each document at most.
        rows: to calibrate on at most.
        budgets: bits of a coordinate.
    """
    tested, others = dump.documents[1::2], dump.documents[::2]
    _, _, heads, dim = tested[0].keys.shape
    queries = min(len(_queries(document)) for document in tested)
    groups = _queries(tested[0]).shape[2] // heads
    shape = Shape(
        dim=dim,
        tokens=min(tokens, *(len(document.keys) - SINKS for document in tested)),
        queries=queries * groups,
        rows=sum(map(len, _places(others, rows))),
    )
    return Cell(REGIME, shape, budgets)


def told(dump: Dump, what: Cell) -> str:
    """Say what is measured, for people."""
    lengths = sorted(len(document.keys) for document in dump.documents[1::2])
    of = f"{lengths[0]:,}" if lengths[0] == lengths[-1] else f"{lengths[0]:,} to {lengths[-1]:,}"
    shape, others = what.shape, len(dump.documents[::2])
    _, layers, heads, dim = dump.documents[0].keys.shape
    dead = layers * heads - len(_live(dump))
    also = f"; {dead} of {layers * heads} heads left out, of keys or values that are all zero" if dead else ""
    if not transforms(dim):
        also += f"; random rotations in place of Hadamard transforms, which {dim} dimensions do not have"
    return (
        f"the last {shape.tokens:,} tokens of each of {len(lengths)} documents of {of}, seen by "
        f"{shape.queries} queries; calibrated on {shape.rows:,} rows of {others} others{also}"
    )


def problem(dump: Dump, wanted: Sequence[Site], what: Cell, *, seed: int, trial: int) -> Problem:
    """Return the problems of one tested document, one of each site."""
    tested, others = dump.documents[1::2][trial], dump.documents[::2]
    shape = what.shape
    first = len(tested.keys) - shape.tokens
    layers, heads = [s.layer for s in wanted], [s.head for s in wanted]
    rows: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for other, at in zip(others, _places(others, shape.rows), strict=True):
        for own, x in zip(rows, (dump.unrotated(other), other.values), strict=True):
            own.append(x[at][:, layers, heads].float())
    keys = dump.unrotated(tested)[first:, layers, heads]
    values = tested.values[first:, layers, heads].float()
    found = _queries(tested)
    _, deep, _, dim = found.shape
    grouped = found.view(len(found), deep, tested.keys.shape[2], -1, dim)  # [Q, L, H, G, D]
    asked = grouped[: shape.queries // grouped.shape[3], layers, heads]
    queries = asked.float().transpose(0, 1).flatten(1, 2)
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


def _places(documents: Sequence[Document], rows: int) -> list[torch.Tensor]:
    """Return which tokens of each document to calibrate on: equally many, or all behind the sinks.

    The fewest for which that is so many rows together, or all there are; asked for their sum, it is the same.
    """
    lengths = [len(document.keys) - SINKS for document in documents]
    wanted = min(rows, sum(lengths))
    share = next(n for n in range(1, max(lengths) + 1) if sum(min(n, own) for own in lengths) >= wanted)
    return [torch.linspace(SINKS, SINKS + n - 1, min(share, n)).long() for n in lengths]


def _queries(document: Document) -> torch.Tensor:
    assert document.queries is not None, "checked"
    return document.queries


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
