"""Coded runs of tokens: the transform codec of one layout under one profile, without any policy.

A coded run has, per stream, one section of codes for each width its plan uses and four of ranges: the low and
high bytes of the scales, then of the shifts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kvtcd.codec.coefficients import Coded, code, restore
from kvtcd.codec.graphs import Graphs
from kvtcd.codec.pack import packed_width
from kvtcd.codec.plan import Plan
from kvtcd.codec.ports import Reason
from kvtcd.codec.profile import Profile
from kvtcd.codec.quantize import MAX_RANGE
from kvtcd.codec.runs import Packed, RunDecoder, position_tensor
from kvtcd.codec.sections import Part, Plain, Scratch, plains
from kvtcd.codec.stages import stage
from kvtcd.codec.transform import Transform
from kvtcd.core.blob import BasisId, CodecId, Header, Kind, Section
from kvtcd.core.errors import BadField
from kvtcd.core.identity import Rope
from kvtcd.core.layout import Layout

VERSION = 1
_RANGE_PLANES = 4


class Coder(RunDecoder):
    """Codes and decodes runs of tokens with any plan of a profile.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        profile: made for a model of these shapes; that it is this very model, the caller has checked.
        device: where the products run, and where raw blocks lie.
        graphs: replay there what recurs; None: nothing is replayed.

    Raises:
        ProfileMismatch: streams, layers or RoPE differ.
    """

    codec, version = CodecId.KVTC, VERSION

    def __init__(
        self, layout: Layout, rope: Rope | None, profile: Profile, device: torch.device | str = "cpu",
        *, graphs: Graphs | None = None,
    ) -> None:  # fmt: skip
        profile.origin.check_shapes(layout, rope)
        where = torch.device(device)
        streams = [profile.streams[stream.name] for stream in layout.streams]
        transforms = partial(
            profile.residency.hold,
            (profile.digest, BasisId.PLAIN), where, sum(stream.nbytes(where) for stream in streams),
            lambda: [stream.transform(layout.layers, where) for stream in streams],
        )  # fmt: skip
        super().__init__(layout, rope, profile, transforms, where, graphs=graphs)

    def analyze(
        self,
        block: Sequence[Tensor],
        ratio: int,
        *,
        start: int,
        count: int,
        first_token: int,
        scratch: Scratch,
    ) -> list[Plain] | Reason:
        """Code tokens ``start .. start + count - 1`` of a block, given as the views of its streams.

        Returns:
            The sections, or why these tokens cannot be coded.
        """
        sections: list[Plain] = []
        position = position_tensor(first_token + start)
        for index, view in enumerate(block):
            work, key = partial(self._symbols, index, ratio), ("encode", index, ratio)
            with self._transforms() as transforms:
                told = self._launched(transforms, key, work, [position, view[:, start : start + count]])
                extremes, symbols = next(told)
            with stage("pack"):
                if reason := _obstacle(*extremes.cpu().tolist()):
                    return reason
                sizes = _sizes(index, self._plan(index, ratio), count)
                sections += plains(sizes, start, count, symbols, scratch)
        return sections

    def _symbols(
        self, index: int, ratio: int, transforms: Sequence[Transform], position: Tensor, view: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the extremes of one stream's coefficients, and its sections in the order of `_sizes`."""
        plan, tokens = self._plan(index, ratio), view.shape[1]
        centred = transforms[index].centred(view, self._rotation(index, position, tokens, inverse=True))
        coefficients = transforms[index].forward(centred, plan.rank)
        with stage("quantise"):
            low, high = torch.aminmax(coefficients) if plan.groups else coefficients.new_zeros(2)
        coded = code(coefficients, plan)
        with stage("pack"):
            sections = torch.cat([coefficients.new_empty(0, dtype=torch.uint8), *_flat(coded)])
            extremes = torch.stack((low, high))
        yield extremes, sections

    def _check_header(self, header: Header) -> None:
        if header.basis is not BasisId.PLAIN or header.plan not in self.profile.ratios:
            raise BadField("blob", f"the profile has no plan {header.plan} for basis {header.basis}")

    def _sizes(self, found: Mapping[Part, Section], header: Header, count: int) -> dict[Part, int]:  # noqa: ARG002 - the plan says it all
        sizes: dict[Part, int] = {}
        for index in range(len(self.layout.streams)):
            sizes |= _sizes(index, self._plan(index, header.plan), count)
        return sizes

    def _packed(self, found: Mapping[Part, Tensor], index: int, header: Header, count: int) -> Packed:
        plan = self._plan(index, header.plan)
        with stage("unpack"):
            coded = _coded(found, index, plan, count)
        inputs = [coded.scales, coded.shifts, *coded.codes.values()]
        return Packed(header.plan, inputs, partial(self._coefficients, plan, tuple(coded.codes)))

    def _coefficients(
        self, plan: Plan, widths: Sequence[int], scales: Tensor, shifts: Tensor, *codes: Tensor
    ) -> tuple[Tensor]:
        coded = Coded(dict(zip(widths, codes, strict=True)), scales, shifts)
        with stage("unpack"):
            coded = coded.to(self._device)
        return (restore(coded, plan),)

    def _plan(self, index: int, ratio: int) -> Plan:
        return self.profile.streams[self.layout.streams[index].name].plans[ratio]


def _obstacle(low: float, high: float) -> Reason | None:
    """Why coefficients between these extremes cannot be quantised, if so.

    A NaN or an infinity in a row spreads to all of its coefficients, and a NaN to both extremes.
    """
    if low >= -MAX_RANGE and high <= MAX_RANGE:
        return None
    return Reason.RANGE if math.isfinite(low) and math.isfinite(high) else Reason.NOT_FINITE


def _flat(coded: Coded) -> Iterator[Tensor]:
    """The sections of one stream's run, flat uint8, in order."""
    for packed in coded.codes.values():
        yield packed.flatten()
    if coded.codes:
        ranges = torch.stack((coded.scales, coded.shifts)).view(torch.int16)
        for plane in range(_RANGE_PLANES):
            yield (ranges[plane // 2] >> (8 * (plane % 2))).to(torch.uint8).flatten()


def _sizes(index: int, plan: Plan, tokens: int) -> dict[Part, int]:
    """The sections that `_flat` yields, in order, with their uncompressed sizes."""
    sizes = {
        Part(Kind.CODES, index, bits): plan.components(bits) * packed_width(tokens, bits)
        for bits in dict.fromkeys(band.bits for band in plan.bands)
    }
    if plan.groups:
        ranges = {
            Part(Kind.RANGES, index, plane): len(plan.groups) * tokens for plane in range(_RANGE_PLANES)
        }
        sizes |= ranges
    return sizes


def _coded(found: Mapping[Part, Tensor], index: int, plan: Plan, tokens: int) -> Coded:
    """What `_flat` was given."""
    codes = {
        bits: found[Part(Kind.CODES, index, bits)].view(plan.components(bits), -1)
        for bits in dict.fromkeys(band.bits for band in plan.bands)
    }
    device = next((data.device for data in found.values()), None)
    ranges = torch.zeros((2, len(plan.groups), tokens), dtype=torch.int16, device=device)
    for plane in range(_RANGE_PLANES if plan.groups else 0):
        data = found[Part(Kind.RANGES, index, plane)].view(-1, tokens)
        ranges[plane // 2] |= data.to(torch.int16) << (8 * (plane % 2))
    scales, shifts = ranges.view(torch.float16)
    return Coded(codes, scales, shifts)
