"""Runs of tokens coded with one step for all components of all streams: what `kvtc2` writes and reads.

A coded run has, per stream, the step classes of its tokens, a section of codes for each width that occurs
(`widths`), and one of escapes if there are any. A token of class ``c`` has ``2^((MIDDLE - c)/2)`` times the
step of the header. The run has a class of its own, the `part` of the sections of classes: widths are those of
that class. Codes are in order of class, then of token, so that bytes hold codes of one distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from kvtcd.codec.ports import Reason
from kvtcd.codec.profile import Profile
from kvtcd.codec.runs import RunDecoder
from kvtcd.codec.sections import Part, Plain, Scratch, plains
from kvtcd.codec.stages import stage
from kvtcd.codec.transform import product_dtype
from kvtcd.codec.uniform import Arithmetic, InTorch, Quantised
from kvtcd.codec.usual import Usual
from kvtcd.codec.weighted import CLASSES, MIDDLE
from kvtcd.codec.widths import Widths
from kvtcd.core.blob import BasisId, CodecId, Header, Kind, Section
from kvtcd.core.errors import BadField, ProfileMismatch
from kvtcd.core.identity import Rope
from kvtcd.core.layout import Layout

VERSION = 1
_FACTORS = np.array(
    [2.0 ** ((MIDDLE - c) // 2) * (1.0, math.sqrt(2.0))[(MIDDLE - c) % 2] for c in range(CLASSES)], np.float32
)
"""By class, what it makes of the step."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start .. start + count - 1`` of a block, coded `finer` half octaves finer than others."""

    start: int
    count: int
    finer: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A coded run.

    Attributes:
        sections: of the blob.
        error: the weighted error of each token, float32 ``[T]``: half of the squared error in the weighted
            space, times what the token's class says of its sensitivity.
        usual: whether every layer and head is spread as calibration saw it (`usual`).
    """

    sections: list[Plain]
    error: Tensor
    usual: bool


class Stepped(RunDecoder):
    """Codes and decodes runs of tokens in the weighted basis of a profile.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        profile: made for a model of these shapes; that it is this very model, the caller has checked.
        device: where the products run, and where raw blocks lie.
        arithmetic: who turns coefficients into codes there, and back; None: torch.
        classes: code tokens that are likely to matter with finer steps; decoding does not depend on it.

    Raises:
        ProfileMismatch: streams, layers or RoPE differ, or the profile has no weighted basis.
    """

    codec, version = CodecId.KVTC2, VERSION

    def __init__(
        self, layout: Layout, rope: Rope | None, profile: Profile, device: torch.device | str = "cpu",
        *, arithmetic: Arithmetic | None = None, classes: bool = True,
    ) -> None:  # fmt: skip
        profile.origin.check_shapes(layout, rope)
        if not profile.weighted:
            raise ProfileMismatch("basis", "weighted", "plain alone")
        where = torch.device(device)
        self._streams = [profile.weighted[stream.name] for stream in layout.streams]
        transforms = partial(
            profile.residency.hold,
            (profile.digest, BasisId.WEIGHTED), where, sum(own.nbytes(where) for own in self._streams),
            lambda: [own.transform(where) for own in self._streams],
        )  # fmt: skip
        super().__init__(layout, rope, profile, transforms, where)
        self._by_token, self._arithmetic = classes, arithmetic or InTorch()
        self._levels = torch.cat([weighted.level for weighted in self._streams]).to(self._device)
        self._widths = lru_cache(maxsize=64)(self._make_widths)
        self._further = lru_cache(maxsize=16)(self._make_further)
        self._usual = lru_cache(self._make_usual)

    def analyze(
        self, block: Sequence[Tensor], span: Span, step: float, *, first_token: int, scratch: Scratch
    ) -> Run | Reason:
        """Code a span of a block, given as the views of its streams.

        Returns:
            The run, or why these tokens cannot be coded.
        """
        own = MIDDLE + span.finer
        products: list[Tensor] = []
        told: list[Tensor] = []
        widths = [self._widths(index, class_step(step, own)) for index in range(len(block))]
        for index, view in enumerate(block):
            rotation = self._rotation(index, first_token + span.start, span.count, inverse=True)
            rank = widths[index].rank
            with self._transforms() as transforms:
                centred = transforms[index].centred(view[:, span.start : span.start + span.count], rotation)
                products.append(transforms[index].forward(centred, rank, self._further(index, rank)))
            with stage("classify"):
                told += [products[-1].abs().amax().isfinite(), self._usual(index).holds(centred)]
        with stage("classify"):
            finite, usual = torch.stack(told).cpu().view(-1, 2).t().tolist()
            if not all(finite):
                return Reason.NOT_FINITE
            classes = self._classify(products, widths, own)
            order = torch.argsort(classes, stable=True)
            steps = class_steps(step, classes)
            sensitivity = torch.exp2((classes - own).to(torch.float32))
        coded: list[Quantised] = []
        error = torch.zeros(span.count, device=self._device)
        for index, product in enumerate(products):
            rank = widths[index].rank
            coded.append(self._arithmetic.quantise(product[:rank], steps[index], order[index], widths[index]))
            with stage("quantise"):
                off = coded[-1].lost + product[rank + len(block) :].square().sum(dim=0)
                error += 0.5 * off * sensitivity[index]
        with stage("pack"):
            escapes, beyond = torch.stack([each.found for each in coded]).cpu().t().tolist()
            if any(beyond):
                return Reason.RANGE
            parts = _parts(coded, escapes, classes, widths, own)
            return Run(plains(parts, span.start, span.count, scratch), error, all(usual))

    def _check_header(self, header: Header) -> None:
        if header.basis is not BasisId.WEIGHTED or header.plan:
            raise BadField("blob", f"basis {header.basis} and plan {header.plan} for a codec with a step")
        if not (math.isfinite(header.step) and header.step > 0) or header.token_classes != CLASSES:
            raise BadField("blob", f"a step of {header.step} and {header.token_classes} classes")

    def _coefficients(self, found: Mapping[Part, Tensor], index: int, header: Header, count: int) -> Tensor:
        own = _class_of(found, index)
        classes = found[Part(Kind.CLASSES, index, own)]
        if (classes >= CLASSES).any():
            raise BadField("blob", f"a token of class {int(classes.max())}, of {CLASSES}")
        widths = self._widths(index, class_step(header.step, own))
        with stage("unpack"):
            codes = [found[Part(Kind.CODES, index, bits)] for bits in widths.rows]
            escapes = found.get(Part(Kind.ESCAPES, index, 0), classes[:0])
            sizes = [count, sum(map(len, codes)), len(escapes)]
            classes, packed, escapes = torch.split(
                torch.cat((classes, *codes, escapes)).to(self._device), sizes
            )
        with stage("dequantise"):
            steps, order = class_steps(header.step, classes), torch.argsort(classes, stable=True)
        return self._arithmetic.restore(packed, escapes.view(2, -1), steps, order, widths)

    def _classify(self, products: Sequence[Tensor], widths: Sequence[Widths], own: int) -> Tensor:
        """Return the step class of each token in each stream, int64 ``[streams, T]``."""
        if not self._by_token:
            return torch.full((len(products), products[0].shape[1]), own, device=self._device)
        offsets = self._levels[:, None]
        for product, width in zip(products, widths, strict=True):
            offsets = offsets + product[width.rank : width.rank + len(products)]
        return (offsets.round().to(torch.int64) + own).clamp_(0, CLASSES - 1)

    def _make_widths(self, index: int, step: float) -> Widths:
        return Widths.of(self._streams[index].spread, step).to(self._device)

    def _make_further(self, index: int, rank: int) -> Tensor:
        """What is multiplied with features besides the basis: what tells classes, and the sketch."""
        own = self._streams[index]
        return torch.cat((own.tokens, own.sketch(rank))).to(self._device, product_dtype(self._device))

    def _make_usual(self, index: int) -> Usual:
        return Usual.of(self._streams[index], self._device)

    def _sizes(self, found: Mapping[Part, Section], header: Header, count: int) -> dict[Part, int]:
        sizes: dict[Part, int] = {}
        for index in range(len(self.layout.streams)):
            own = _class_of(found, index)
            sizes[Part(Kind.CLASSES, index, own)] = count
            widths = self._widths(index, class_step(header.step, own))
            sizes |= {Part(Kind.CODES, index, bits): size for bits, size in widths.sizes(count).items()}
            escapes = Part(Kind.ESCAPES, index, 0)
            if escapes in found:
                # How many there are, the codes say: compared once they are inflated.
                sizes[escapes] = found[escapes].raw_bytes // 2 * 2
        return sizes


def class_step(step: float, step_class: int) -> float:
    """Return the step of a class, as a float32 holds it."""
    return float(np.float32(step) * _FACTORS[step_class])


def class_steps(step: float, classes: Tensor) -> Tensor:
    """Return the step of each token, float32 ``[T]``, given its class."""
    table = torch.from_numpy(np.float32(step) * _FACTORS)
    return table.to(classes.device)[classes.to(torch.int64)]


def _class_of(found: Mapping[Part, object], index: int) -> int:
    """The class of a stream's run, by the parts of its sections."""
    own = [part.part for part in found if part.kind is Kind.CLASSES and part.stream == index]
    if len(own) != 1 or own[0] >= CLASSES:
        raise BadField("blob", f"classes {own} of the run of one stream")
    return own[0]


def _parts(
    coded: Sequence[Quantised], escapes: Sequence[int], classes: Tensor, widths: Sequence[Widths], own: int
) -> Iterator[tuple[Part, Tensor]]:
    """Yield the sections of a run, in order."""
    for index, each in enumerate(coded):
        sizes = widths[index].sizes(classes.shape[1])
        yield Part(Kind.CLASSES, index, own), classes[index]
        for bits, codes in zip(sizes, torch.split(each.codes, list(sizes.values())), strict=True):
            yield Part(Kind.CODES, index, bits), codes
        if escapes[index]:
            yield Part(Kind.ESCAPES, index, 0), each.escapes[:, : escapes[index]]
