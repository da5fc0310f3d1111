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

from kvtcd.codec.graphs import Graphs
from kvtcd.codec.ports import Reason
from kvtcd.codec.profile import Profile
from kvtcd.codec.runs import Packed, RunDecoder, position_tensor
from kvtcd.codec.sections import Part, Plain, Scratch, plains
from kvtcd.codec.stages import stage
from kvtcd.codec.transform import Transform, product_dtype
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
_LEAST_ROOM = 64
"""Escapes that there is room for at least."""


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
        graphs: replay there what recurs; None: nothing is replayed.

    Raises:
        ProfileMismatch: streams, layers or RoPE differ, or the profile has no weighted basis.
    """

    codec, version = CodecId.KVTC2, VERSION

    def __init__(
        self, layout: Layout, rope: Rope | None, profile: Profile, device: torch.device | str = "cpu",
        *, arithmetic: Arithmetic | None = None, classes: bool = True, graphs: Graphs | None = None,
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
        super().__init__(layout, rope, profile, transforms, where, graphs=graphs)
        self._by_token, self._arithmetic = classes, arithmetic or InTorch()
        self._levels = torch.cat([weighted.level for weighted in self._streams]).to(self._device)
        self._widths = lru_cache(maxsize=64)(self._make_widths)
        self._steps = lru_cache(maxsize=64)(self._make_steps)
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
        widths = [self._widths(index, class_step(step, own)) for index in range(len(block))]
        further = [self._further(index, each.rank) for index, each in enumerate(widths)]
        usual = [self._usual(index) for index in range(len(block))]
        work = partial(
            self._coded, widths=widths, further=further, usual=usual, steps=self._steps(step), own=own
        )
        views = [view[:, span.start : span.start + span.count] for view in block]
        with self._transforms() as transforms:
            told = self._launched(
                transforms, ("encode", own, step, self._by_token), work,
                [position_tensor(first_token + span.start), *views],
            )  # fmt: skip
            verdict, error, classes, *coded = next(told)
        with stage("pack"):
            finite, held, escapes, beyond = verdict.cpu().t().tolist()
            if not all(finite):
                return Reason.NOT_FINITE
            if any(beyond):
                return Reason.RANGE
            sizes, parts = _parts(coded, escapes, classes, widths, own)
            return Run(plains(sizes, span.start, span.count, torch.cat(parts), scratch), error, all(held))

    def _coded(
        self, transforms: Sequence[Transform], position: Tensor, *views: Tensor,
        widths: Sequence[Widths], further: Sequence[Tensor], usual: Sequence[Usual], steps: Tensor, own: int,
    ) -> Iterator[tuple[Tensor, ...]]:  # fmt: skip
        """Yield what there is to know of a span, and what is to be written of it.

        That is: int64 ``[streams, 4]``, whether all is finite and as usual, and `Quantised.found`; errors as
        of `Run`; classes, uint8 ``[streams, T]``; and codes and escapes of each stream.
        """
        products: list[Tensor] = []
        told: list[Tensor] = []
        for index, view in enumerate(views):
            rotation = self._rotation(index, position, view.shape[1], inverse=True)
            centred = transforms[index].centred(view, rotation)
            products.append(transforms[index].forward(centred, widths[index].rank, further[index]))
            with stage("classify"):
                told += [products[-1].abs().amax().isfinite(), usual[index].holds(centred)]
        with stage("classify"):
            classes = self._classify(products, widths, own)
            order = torch.argsort(classes, stable=True)
            by_token = steps[classes]
            sensitivity = torch.exp2((classes - own).to(torch.float32))
        coded: list[Quantised] = []
        error = torch.zeros(views[0].shape[1], device=self._device)
        for index, product in enumerate(products):
            rank = widths[index].rank
            coded.append(
                self._arithmetic.quantise(product[:rank], by_token[index], order[index], widths[index])
            )
            with stage("quantise"):
                off = coded[-1].lost + product[rank + len(views) :].square().sum(dim=0)
                error += 0.5 * off * sensitivity[index]
        with stage("pack"):
            found = torch.cat(
                [torch.stack(told).view(-1, 2), torch.stack([each.found for each in coded])], dim=1
            )
            small = classes.to(torch.uint8)
        yield (found, error, small, *(part for each in coded for part in (each.codes, each.escapes)))

    def _check_header(self, header: Header) -> None:
        if header.basis is not BasisId.WEIGHTED or header.plan:
            raise BadField("blob", f"basis {header.basis} and plan {header.plan} for a codec with a step")
        if not (math.isfinite(header.step) and header.step > 0) or header.token_classes != CLASSES:
            raise BadField("blob", f"a step of {header.step} and {header.token_classes} classes")

    def _packed(self, found: Mapping[Part, Tensor], index: int, header: Header, count: int) -> Packed:
        own = _class_of(found, index)
        classes = found[Part(Kind.CLASSES, index, own)]
        if (classes >= CLASSES).any():
            raise BadField("blob", f"a token of class {int(classes.max())}, of {CLASSES}")
        widths = self._widths(index, class_step(header.step, own))
        with stage("unpack"):
            codes = [found[Part(Kind.CODES, index, bits)] for bits in widths.rows]
            escapes = found.get(Part(Kind.ESCAPES, index, 0), classes[:0]).view(2, -1)
            there = escapes.shape[1]
            room = _room(there)
            padded = torch.nn.functional.pad(escapes, (0, room - there))
            data = torch.cat((classes, *codes, padded.flatten()))
        sizes = (count, sum(map(len, codes)), 2 * room)
        return Packed(
            key=(own, header.step),
            inputs=[data],
            coefficients=partial(self._coefficients, widths, self._steps(header.step), sizes),
            check=partial(_check_escapes, there),
        )

    def _coefficients(
        self, widths: Widths, steps: Tensor, sizes: Sequence[int], data: Tensor
    ) -> tuple[Tensor, Tensor]:
        with stage("unpack"):
            # Memory that is not pinned has been read when this returns.
            there = data.to(self._device, non_blocking=True)
            classes, packed, escapes = torch.split(there, list(sizes))
        with stage("dequantise"):
            by_token, order = steps[classes.to(torch.int64)], torch.argsort(classes, stable=True)
        return self._arithmetic.restore(packed, escapes.view(2, -1), by_token, order, widths)

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

    def _make_steps(self, step: float) -> Tensor:
        """The step of each class, float32."""
        return torch.from_numpy(np.float32(step) * _FACTORS).to(self._device)

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


def _room(escapes: int) -> int:
    """Return for how many escapes there is room where there are so many: few numbers, so few shapes."""
    return max(_LEAST_ROOM, 1 << (escapes - 1).bit_length()) if escapes else _LEAST_ROOM


def _check_escapes(there: int, asked: Tensor) -> None:
    """Raise BadField unless there are as many escapes as codes ask for."""
    with stage("unpack"):
        wanted = int(asked)
    if there != wanted:
        raise BadField("blob", f"{there} escapes where codes ask for {wanted}")


def _class_of(found: Mapping[Part, object], index: int) -> int:
    """The class of a stream's run, by the parts of its sections."""
    own = [part.part for part in found if part.kind is Kind.CLASSES and part.stream == index]
    if len(own) != 1 or own[0] >= CLASSES:
        raise BadField("blob", f"classes {own} of the run of one stream")
    return own[0]


def _parts(
    coded: Sequence[Tensor], escapes: Sequence[int], classes: Tensor, widths: Sequence[Widths], own: int
) -> tuple[dict[Part, int], list[Tensor]]:
    """Return the sections of a run with their sizes, in order, and the flat bytes that make them up."""
    tokens = classes.shape[1]
    sizes: dict[Part, int] = {}
    parts: list[Tensor] = []
    for index, (codes, beyond) in enumerate(zip(coded[::2], coded[1::2], strict=True)):
        sizes[Part(Kind.CLASSES, index, own)] = tokens
        sizes |= {Part(Kind.CODES, index, bits): size for bits, size in widths[index].sizes(tokens).items()}
        parts += [classes[index], codes]
        if escapes[index]:
            sizes[Part(Kind.ESCAPES, index, 0)] = 2 * escapes[index]
            parts += beyond[:, : escapes[index]]
    return sizes, parts
