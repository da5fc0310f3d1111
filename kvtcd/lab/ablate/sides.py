"""One side of a scheme, keys or values, with every factor free; made of the pieces of `codec.rivals`.

A vector is normalised, rotated, cut to levels, and what that loses may be sketched. With the factors of `tq`
this is `tq` bit for bit, which a test holds; the rest is what codecs of rotations, codebooks and sketches may
be otherwise.

Bits are true ones, of a vector: codes, norms, ranges, means, each in float16. What calibration made (bases,
spectra, fitted levels) is not in them: it is stored once for a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvtcd.codec.rivals.codebook import Codebook, beta, gaussian
from kvtcd.codec.rivals.draws import Draw
from kvtcd.codec.rivals.rotation import haar, hadamard
from kvtcd.codec.rivals.sketch import Sketch
from kvtcd.codec.rivals.waterfill import MOST, water_fill
from kvtcd.lab.ablate.levels import fitted

Rotation = Literal["none", "wht", "rht1", "rht2", "rht3", "haar", "eigen"]
Levels = Literal["uniform", "gauss", "beta", "empirical"]
Scale = Literal["raw", "norm", "unbiased"]
Correction = Literal["none", "qjl", "qjl-orth", "full"]
Allocation = Literal["uniform", "band", "fill"]
Normalise = Literal["row", "none", "channel-mean"]

_WORD = 16
_TINY = torch.finfo(torch.float32).tiny
_TURN, _SIGNS = range(2)
_USES = 2
KEYS, VALUES = range(2)
"""Which side: their random parts differ."""


@dataclass(frozen=True, slots=True)
class Side:
    """The factors.

    Attributes:
        rotation: none; the Hadamard transform without signs, or with one to three rounds of them; uniform
            over all; or the principal components of the calibration rows.
        levels: evenly spaced from the least to the largest coordinate of a vector; or Lloyd-Max of a normal
            coordinate, of one of a random unit vector, or of the calibration rows.
        scale: of what is decoded: as it is, as long as it was, or right on average.
        correction: a sketch of the remainder, by normal or by orthogonal rows, for one bit less; or of the
            whole vector, for all bits.
        allocation: equal bits; reverse water-filling among the first components, as many as there are
            dimensions (SpectralQuant's second version); or among all.
        normalise: lengths are stored; or are not; or are, after the mean of each channel was taken out.
        foreign: calibrated on rows of the other side.
        seed: which of several draws of the random parts.
    """

    rotation: Rotation = "rht1"
    levels: Levels = "beta"
    scale: Scale = "raw"
    correction: Correction = "none"
    allocation: Allocation = "uniform"
    normalise: Normalise = "row"
    foreign: bool = False
    seed: int = 0


class Coded(NamedTuple):
    """What was decoded, ``[N, S, D]``, and the bits of a vector."""

    decoded: Tensor
    bits: float


class _Prepared(NamedTuple):
    """Rotations ``[N, D, D]``, components in rows; variances ``[N, D]`` of what they make of `rows`."""

    turn: Tensor
    variances: Tensor
    rows: Tensor


def code(side: Side, which: int, x: Tensor, rows: Tensor, *, bits: int, seeds: tuple[int, ...]) -> Coded:
    """Encode and decode vectors.

    Args:
        side: the factors.
        which: `KEYS` or `VALUES`.
        x: float32 ``[N, S, D]``.
        rows: to calibrate on, ``[N, C, D]``.
        bits: of a coordinate.
        seeds: by trial.
    """
    dim, tokens = x.shape[2], x.shape[1]
    if side.correction == "full":
        draws = [_draw(seed, side, which, _SIGNS) for seed in seeds]
        return Coded(_sketched(x, draws, bits * dim, orthogonal=False), bits * dim + _WORD)
    extra = 0.0
    if side.normalise == "channel-mean":
        mean = x.mean(dim=1, keepdim=True).half().float()
        coded = _coarse(side, which, x - mean, rows - rows.mean(dim=1, keepdim=True), bits=bits, seeds=seeds)
        decoded, extra = coded.decoded + mean, _WORD * dim / tokens
    else:
        coded = _coarse(side, which, x, rows, bits=bits, seeds=seeds)
        decoded = coded.decoded
    if side.correction == "none":
        return Coded(decoded, coded.bits + extra)
    draws = [_draw(seed, side, which, _SIGNS) for seed in seeds]
    missing = _sketched(x - decoded, draws, dim, orthogonal=side.correction == "qjl-orth")
    return Coded(decoded + missing, coded.bits + extra + dim + _WORD)


def allocated(variances: Tensor, kind: Allocation, bits: int, total: int) -> Tensor:
    """Return the bits of each coordinate, ``[N, D]``, given variances in descending order.

    Args:
        variances: ``[N, D]``.
        kind: of allocation.
        bits: of a coordinate where all have the same.
        total: of a vector, where they have not.
    """
    even = torch.full(variances.shape, bits)
    if kind == "uniform":
        return even
    if kind == "fill":
        return water_fill(variances, min(total, MOST * variances.shape[1]))
    for own, among in zip(even, variances, strict=True):
        count = band(among)
        own[:count] = water_fill(among[:count], bits * count)
    return even


def band(variances: Tensor) -> int:
    """Return how many components SpectralQuant calls semantic: the participation ratio, rounded up."""
    ratio = float(variances.sum() ** 2 / variances.square().sum().clamp_min(_TINY))
    return max(2, min(int(ratio) + (ratio > int(ratio)), len(variances) - 2))


def prepared(side: Side, which: int, rows: Tensor, seeds: tuple[int, ...]) -> _Prepared:
    """Return rotation and variances out of calibration rows that are normalised as vectors will be."""
    dim = rows.shape[2]
    unit = _unit(rows) if side.normalise != "none" else rows
    if side.rotation == "eigen":
        moment = (unit.mT @ unit / unit.shape[1]).to(torch.float64)
        values, vectors = torch.linalg.eigh(moment)
        return _Prepared(vectors.mT.flip(-2).float(), values.flip(-1).clamp_min(_TINY).float(), unit)
    energy = unit.square().mean(dim=(1, 2)).clamp_min(_TINY)[:, None].expand(-1, dim)
    turn = torch.stack([_turned(side, which, dim, seed) for seed in seeds])
    return _Prepared(turn, energy, unit)


def _coarse(side: Side, which: int, x: Tensor, rows: Tensor, *, bits: int, seeds: tuple[int, ...]) -> Coded:
    """Code without a sketch; one bit less where there is one."""
    bits -= side.correction != "none"
    dim = x.shape[2]
    ready = prepared(side, which, rows, seeds)
    if side.levels == "uniform":
        decoded = _ranged(x @ ready.turn.mT, bits) @ ready.turn
        return Coded(decoded, bits * dim + 2 * _WORD)
    by_row = side.normalise != "none"
    norms = x.norm(dim=2, keepdim=True)
    turned = (x / norms.clamp_min(_TINY) if by_row else x) @ ready.turn.mT
    spread = ready.variances.sqrt()[:, None]
    # A vector without a norm has its bits for codes, if they can be dealt out one by one.
    total = bits * dim + (0 if by_row else _WORD)
    widths = allocated(ready.variances, side.allocation, bits, total)
    restored = _levelled(turned / spread, widths, side, (ready.rows @ ready.turn.mT) / spread) * spread
    if side.scale == "norm":
        norms = norms / restored.norm(dim=2, keepdim=True).clamp_min(_TINY)
    elif side.scale == "unbiased":
        norms = norms / _kept(ready.variances, widths, dim)
    decoded = restored @ ready.turn
    decoded = decoded * norms.half().float() if by_row else decoded
    stored = int(widths[0].sum()) + (_WORD if by_row else 0)
    return Coded(decoded, float(stored))


def _levelled(z: Tensor, widths: Tensor, side: Side, rows: Tensor) -> Tensor:
    """Round coordinates of unit variance ``[N, S, D]`` to levels, each to as many as it has bits."""
    columns = z.mT.contiguous()
    found = torch.zeros_like(columns)
    for bits in sorted(set(widths.flatten().tolist())):
        chosen = widths == bits
        if bits and side.levels == "empirical":
            for own, mine, sample, out in zip(columns, chosen, rows, found, strict=True):
                out[mine] = _through(fitted(sample, bits), own[mine])
        elif bits:
            book, scale = _book(side.levels, bits, z.shape[2])
            found[chosen] = _through(book, columns[chosen] / scale) * scale
    return found.mT


def _through(book: Codebook, x: Tensor) -> Tensor:
    found: Tensor = book.values(book.nearest(x))
    return found


@lru_cache
def _book(levels: Levels, bits: int, dim: int) -> tuple[Codebook, float]:
    """Return a codebook, and how far apart its coordinates are from those of unit variance."""
    return (beta(bits, dim), dim**0.5) if levels == "beta" else (gaussian(bits), 1.0)


def _kept(variances: Tensor, widths: Tensor, dim: int) -> Tensor:
    """Return the share of the energy that levels keep, ``[N, 1, 1]``."""
    lost = torch.tensor([1.0, *(beta(bits, dim).distortion for bits in range(1, MOST + 1))])
    share = 1 - (variances * lost[widths]).sum(dim=1) / variances.sum(dim=1)
    return share[:, None, None]


def _ranged(z: Tensor, bits: int) -> Tensor:
    """Round each vector to levels evenly spaced between its ends, which are float16."""
    low = z.amin(dim=2, keepdim=True).half().float()
    step = ((z.amax(dim=2, keepdim=True) - low) / (2**bits - 1)).half().float().clamp_min(_TINY)
    found: Tensor = ((z - low) / step).round().clamp(0, 2**bits - 1) * step + low
    return found


def _sketched(x: Tensor, draws: list[Draw], size: int, *, orthogonal: bool) -> Tensor:
    make = Sketch.orthogonal if orthogonal else Sketch.normal
    sketches = [make(size, x.shape[2], draw) for draw in draws]
    return torch.stack([own.decode(own.encode(each)) for own, each in zip(sketches, x, strict=True)])


def _turned(side: Side, which: int, dim: int, seed: int) -> Tensor:
    draw = _draw(seed, side, which, _TURN)
    match side.rotation:
        case "rht1" | "rht2" | "rht3":
            return hadamard(dim, draw, rounds=int(side.rotation[-1]))
        case "haar":
            return haar(dim, draw)
        case "wht":
            return _plain_hadamard(dim)
        case _:
            return torch.eye(dim)


@lru_cache
def _plain_hadamard(dim: int) -> Tensor:
    """Return the transform without signs: what one round makes of its own signs taken back."""
    draw = Draw(0, 0)
    plain: Tensor = hadamard(dim, draw) * draw.signs(1, dim)[0].float()
    return plain


def _unit(x: Tensor) -> Tensor:
    unit: Tensor = x / x.norm(dim=2, keepdim=True).clamp_min(_TINY)
    return unit


def _draw(seed: int, side: Side, which: int, use: int) -> Draw:
    return Draw(seed, (side.seed * 2 + which) * _USES + use)
