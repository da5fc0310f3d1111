"""The basis of a stream in which errors are measured by what they do to the model.

With ``M`` the second moment of gradients of one layer and head (`lab.sensitivity` gathers them), an error
``d`` of a token costs ``1/2 d^T M d`` nats. In ``y = M^(1/2) x`` that is half the squared length, so
principal components are taken there, and every component deserves the same quantiser step (reverse
water-filling, Cover and Thomas section 10.3.3). ``M`` is gathered from finitely many tokens; `RIDGE` of its
mean diagonal keeps directions that none of them touched from being free.

``M^(1/2)``, one ``D x D`` matrix a head, is folded into both products: encoding takes ``U M^(1/2)``, decoding
``U M^(-1/2)``, each as large as the basis itself.

``M`` is that of the average token. How far a token is from average is predicted from itself, linearly
(`lab.token_weights`), and turned into a *step class*: half octaves by which its step is finer, rounded, about
`MIDDLE`. The step goes with the power -1/4 of the predicted energy of gradients, half of what would be right
if rates were high and the prediction were exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvtcd.codec.basis import Moments, principal
from kvtcd.codec.transform import Transform, orthonormal
from kvtcd.codec.widths import Widths
from kvtcd.core.errors import BadField
from kvtcd.core.layout import Stream

RIDGE = 0.05
CLASSES = 32
MIDDLE = CLASSES // 2
"""Step class of an average token: that of the header's step."""
EXPONENT = 0.5
"""Of the predicted energy of a token's gradients, in the square of its step."""
_PREFIX = "weighted."
_PARTS = ("mean", "basis", "root", "spread", "tokens", "level")
_SKETCH = 32
"""Rows that estimate what the basis leaves out; see `Weighted.sketch`."""


@dataclass(frozen=True, eq=False)
class Weighted:
    """The weighted basis of one stream.

    Attributes:
        mean: of the rows, tokens weighed by their predicted sensitivity, float32 ``[p]``.
        basis: float16 ``[r, p]``, orthonormal rows in the weighted space. root: ``M^(1/2)``, float32 ``[L, H,
        D, D]``; coefficients are in square roots of two nats. spread: mean magnitude of each coefficient on
        rows the basis was not fitted to, each divided by what its
            class makes of the step, float32 ``[r]``.
        tokens: what features about their mean add to the class of a token in each stream, float32
            ``[streams, p]``.
        level: what is added to the classes of this stream, float32 ``[1]``.
    """

    mean: Tensor
    basis: Tensor
    root: Tensor
    spread: Tensor
    tokens: Tensor
    level: Tensor

    def tensors(self, stream: str) -> dict[str, Tensor]:
        """Return what a profile's file has of this, by name."""
        return {_name(stream, part): getattr(self, part).contiguous() for part in _PARTS}

    def trimmed(self, step: float) -> Weighted:
        """Return this without the components behind the last one that is coded at a step."""
        rank = Widths.of(self.spread, step).rank
        return replace(self, basis=self.basis[:rank], spread=self.spread[:rank])

    def transform(self, device: torch.device) -> Transform:
        """Put the map between features and coefficients on a device."""
        basis = self.basis.to(torch.float32)
        encode, decode = by_head(basis, self.root), by_head(basis, torch.linalg.inv(self.root))
        return Transform(self.mean, encode, decode, len(self.root), device)

    def nbytes(self, device: torch.device) -> int:
        """Return the bytes that it takes there."""
        return Transform.nbytes(*self.basis.shape, orthonormal=False, device=device)

    def sketch(self, rank: int) -> Tensor:
        """Return rows that estimate what the first `rank` coefficients leave out, float32 ``[s, p]``.

        Their products with a token's features about the mean, squared and summed up, have the energy of the
        remainder as their expectation: random signs applied to the remainder (Hutchinson 1990).
        """
        draw = torch.Generator().manual_seed(rank)
        signs = torch.randint(0, 2, (_SKETCH, self.basis.shape[1]), generator=draw) * 2.0 - 1.0
        basis = self.basis[:rank].to(torch.float32)
        rows: Tensor = by_head(signs - (signs @ basis.t()) @ basis, self.root) / _SKETCH**0.5
        return rows


def take(streams: Sequence[str], tensors: dict[str, Tensor]) -> dict[str, Weighted]:
    """Take the weighted bases out of the tensors of a file; none are there in those of format 1.

    Raises:
        BadField: some are there and others are not.
    """
    if not any(name.startswith(_PREFIX) for name in tensors):
        return {}
    try:
        return {
            stream: Weighted(*(tensors.pop(_name(stream, part)) for part in _PARTS)) for stream in streams
        }
    except KeyError as missing:
        raise BadField("profile", f"has no tensor {missing}") from None


def check(layers: int, streams: Sequence[Stream], weighted: Mapping[str, Weighted]) -> None:
    """Raise `BadField` unless weighted bases, if any, fit a layout and themselves."""
    if weighted and set(weighted) != {stream.name for stream in streams}:
        raise BadField("profile", "not every stream has a weighted basis")
    for stream in streams if weighted else ():
        own, features = weighted[stream.name], layers * stream.width
        found = {
            "mean": (own.mean, torch.float32, (features,)),
            "basis": (own.basis, torch.float16, (len(own.spread), features)),
            "root": (own.root, torch.float32, (layers, stream.heads, stream.head_dim, stream.head_dim)),
            "spread": (own.spread, torch.float32, (len(own.basis),)),
            "tokens": (own.tokens, torch.float32, (len(streams), features)),
            "level": (own.level, torch.float32, (1,)),
        }
        for name, (tensor, dtype, shape) in found.items():
            where = f"weighted {stream.name}.{name}"
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise BadField("profile", f"{where} is {tensor.dtype} of shape {list(tensor.shape)}")
            if not torch.isfinite(tensor).all():
                raise BadField("profile", f"{where} holds NaN or infinity")
        if not orthonormal(own.basis):
            raise BadField("profile", f"the weighted basis of {stream.name} is not orthonormal")
        if (torch.linalg.cholesky_ex(own.root).info != 0).any() or not torch.equal(own.root, own.root.mT):
            raise BadField("profile", f"the root of {stream.name} is not symmetric and positive")


def root(moment: Tensor) -> Tensor:
    """Return ``(M + ridge)^(1/2)``, float32, of second moments ``[L, H, D, D]``."""
    moment = moment.to(torch.float64)
    diagonal = moment.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    eye = torch.eye(moment.shape[-1], dtype=torch.float64, device=moment.device)
    # A head that no gradient reaches is as dear as the average one: an unused zero would divide by nothing.
    floor = diagonal.mean().clamp_min(torch.finfo(torch.float32).tiny) * 1e-6
    values, vectors = torch.linalg.eigh(moment + (RIDGE * diagonal + floor) * eye)
    half = (vectors * values.clamp_min(floor).sqrt()[..., None, :]) @ vectors.mT
    symmetric: Tensor = (half + half.mT) / 2
    return symmetric.to(torch.float32)


def _name(stream: str, part: str) -> str:
    return f"{_PREFIX}{stream}.{part}"


def by_head(rows: Tensor, matrices: Tensor) -> Tensor:
    """Multiply each head of rows ``[n, p]`` with its own symmetric ``[L, H, D, D]`` matrix."""
    layers, heads, dim, _ = matrices.shape
    return torch.einsum("nlhd,lhde->nlhe", rows.view(-1, layers, heads, dim), matrices).reshape(rows.shape)


def fit(
    moments: Mapping[str, Moments],
    samples: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    tokens: Mapping[str, Tensor],
    *,
    rank: int,
    seed: int,
) -> dict[str, Weighted]:
    """Fit the weighted bases of all streams.

    Args:
        moments: by stream, of its rows, tokens weighed by their predicted sensitivity.
        samples: by stream, the same tokens of text the bases are not fitted to, float32 ``[n, p]``.
        weights: by stream, second moments of gradients, tokens weighed by the inverse, ``[L, H, D, D]``.
        tokens: by stream, what its features add to the log sensitivity of a token in each stream,
            ``[streams, p]``; empty where tokens are alike.
        rank: components to keep at most.
        seed: of the random basis.
    """
    centred = {name: samples[name].to(own.mean.device) - own.mean for name, own in moments.items()}
    scaled = {name: tokens[name] * (EXPONENT / math.log(2)) for name in tokens} or {
        name: torch.zeros((len(moments), x.shape[1]), device=x.device) for name, x in centred.items()
    }
    offsets = torch.stack([centred[name] @ scaled[name].t() for name in centred]).sum(dim=0)  # [n, streams]
    levels = -offsets.mean(dim=0)
    factors = torch.exp2((offsets + levels).round() / 2)  # of codes: one over that of steps
    fitted: dict[str, Weighted] = {}
    for index, (name, own) in enumerate(moments.items()):
        half = root(weights[name])
        basis, _ = principal(own.weighted(partial(by_head, matrices=half)), rank, seed=seed)
        stored = basis.half()
        coefficients = by_head(centred[name], half) @ stored.to(torch.float32).t()
        spread = (coefficients * factors[:, index : index + 1]).abs().mean(dim=0)
        parts = (own.mean, stored, half, spread, scaled[name], levels[index : index + 1])
        fitted[name] = Weighted(*(part.to("cpu") for part in parts))
    return fitted
