"""Something to measure codecs on that takes no model: a profile of any size and rank, and a block for it.

Speed depends on shapes, and on how coefficients spread, so these are true to life. The magnitude of the k-th
coefficient goes with ``1/k``, which gives components the widths that SmolLM2's have at a ratio of 64 (of 100
coded components 9 have 8 bits, 34 have 4, 27 have 2 and 30 have 1), and `kvtc` codes 56 of 100 with 4 bits
and 43 with 2, as its plan for SmolLM2 at 16 does. The ratio then follows from ``p`` and rank, as it does for
real models: 20 to 30 where a quarter of the components is kept, more where fewer are. Means, bases and what
predicts the class of a token are random, and errors weigh alike; none of that changes what is computed.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtcd.codec.origin import Origin
from kvtcd.codec.plan import Group, Plan
from kvtcd.codec.profile import Profile, StreamProfile
from kvtcd.codec.rope import Rotation
from kvtcd.codec.weighted import Weighted
from kvtcd.codec.widths import LEAST
from kvtcd.core.errors import ConfigError
from kvtcd.core.identity import Rope, RopeKind
from kvtcd.core.layout import Dtype, Layout, kv_layout

FIRST_TOKEN = 1024
"""Position of the block: neither sinks nor recent tokens are in it."""
TOKENS = 256
PLAN = 16
"""What the plan of `kvtc` is called in the profile."""
GROUP = 16
"""Components of the smallest group of a plan; ranks are multiples of it."""
_CLASS_SPREAD = 1.5
"""Standard deviation of step classes, half octaves."""


@dataclass(frozen=True, eq=False)
class Case:
    """A profile, and a block of `TOKENS` tokens that its codecs code whole.

    Attributes:
        p: features of each of its two streams.
        rank: components of each, all of which both codecs code.
        step: at which `kvtc2` codes all components.
        raw: the block, flat uint8, bfloat16 values.
    """

    p: int
    rank: int
    layout: Layout
    rope: Rope
    profile: Profile
    step: float
    raw: Tensor


def shape(p: int) -> Layout:
    """Return a plausible layout of `p` features a stream.

    Heads of 128, or of 64 where 512 does not divide `p`, and as many of them, up to 8, as leave 16 layers: so
    5,760 is SmolLM2-135M, 14,336 is Qwen2.5-7B and 32,768 is Llama 3 8B.

    Raises:
        ConfigError: `p` is no multiple of 64.
    """
    head_dim = 64 if p % 512 else 128
    if p % head_dim:
        raise ConfigError(
            "--p", "", f"{p} features do not make up heads of {head_dim}; take a multiple of it"
        )
    vectors = p // head_dim
    fitting = [heads for heads in (8, 4, 3, 2) if vectors % heads == 0 and vectors >= 16 * heads]
    heads = max(fitting, default=1)
    return kv_layout(layers=vectors // heads, kv_heads=heads, head_dim=head_dim, dtype=Dtype.BF16)


def check(p: int, rank: int) -> None:
    """Make sure that there is such a case.

    Raises:
        ConfigError: there is no such shape, or the rank is above half of `p` or no multiple of 16.
    """
    shape(p)
    if rank % GROUP or 2 * rank > p:
        raise ConfigError(
            "--rank", "", f"{rank} of {p} features: take a multiple of {GROUP}, at most half of them"
        )


def make(p: int, rank: int) -> Case:
    """Make profile and block of a case that `check` has passed."""
    layout = shape(p)
    draw = torch.Generator().manual_seed(p + rank)
    magnitudes = 1.0 / torch.arange(1, rank + 1)
    spectrum = 2 * magnitudes.square()
    rope = Rope(RopeKind.DEFAULT, 500_000.0, layout.streams[0].head_dim)
    turn = Rotation(rope, FIRST_TOKEN, TOKENS, inverse=False)
    plain, weighted, block = {}, {}, []
    for stream in layout.streams:
        basis = cosines(p, rank, draw)
        mean = 2 * (spectrum.sum() / p).sqrt() * torch.randn(p, generator=draw)
        values = mean + (_laplace((TOKENS, rank), draw) * magnitudes) @ basis
        by_layer = values.view(TOKENS, layout.layers, stream.heads, stream.head_dim).transpose(0, 1)
        block.append((turn(by_layer) if stream.rope else by_layer).to(torch.bfloat16).flatten())
        stored = basis.half()
        plain[stream.name] = StreamProfile(mean, stored, spectrum, float(spectrum.sum()), {PLAN: plan(rank)})
        weighted[stream.name] = Weighted(
            mean=mean,
            basis=stored,
            root=torch.eye(stream.head_dim).expand(layout.layers, stream.heads, -1, -1),
            spread=magnitudes,
            tokens=(basis[:1] * _CLASS_SPREAD / spectrum[:1].sqrt()).repeat(len(layout.streams), 1),
            level=torch.zeros(1),
        )
    origin = Origin(
        model="made up", weights="0" * 64, adapter="none", rope=rope, streams=layout.streams,
        layers=layout.layers, parallel="canonical", sinks=0, tokens=0, texts=(), seed=0, version="0",
    )  # fmt: skip
    profile = Profile(origin, plain, weighted, hashlib.sha256(f"{p} {rank}".encode()).digest())
    # A hair below the step at which the last component is no longer coded.
    step = float(magnitudes[-1]) / LEAST * (1 - 1e-6)
    return Case(p, rank, layout, rope, profile, step, torch.cat(block).view(torch.uint8))


def cosines(p: int, rank: int, draw: torch.Generator) -> Tensor:
    """Return an orthonormal basis ``[rank, p]`` that takes no factorisation: rows of a cosine transform.

    Of DCT-II, any but the constant one, with random signs of features.
    """
    rows = 1 + torch.randperm(p - 1, generator=draw)[:rank]
    angles = torch.outer(rows, 2 * torch.arange(p) + 1) % (4 * p)  # exact, before they are rounded
    signs = torch.randint(0, 2, (p,), generator=draw) * 2 - 1
    return angles.to(torch.float32).mul_(math.pi / (2 * p)).cos_().mul_(signs * math.sqrt(2 / p))


def plan(rank: int) -> Plan:
    """Return groups of `kvtc` over so many components, in the proportions of a real plan."""
    groups: list[Group] = []
    start = 0
    for end, bits in ((GROUP, 8), (rank * 9 // 16 // GROUP * GROUP, 4), (rank, 2)):
        while start < end:
            size = 64 if end - start >= 64 else GROUP
            groups.append(Group(start, size, bits))
            start += size
    return Plan(tuple(groups))


def _laplace(size: tuple[int, int], draw: torch.Generator) -> Tensor:
    """Draw two-sided exponential numbers of mean magnitude 1: their tails are like those of coefficients."""
    magnitudes = torch.empty(size).exponential_(generator=draw)
    return magnitudes * (torch.randint(0, 2, size, generator=draw) * 2 - 1)
