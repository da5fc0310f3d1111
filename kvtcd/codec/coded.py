"""Coded runs of tokens: the transform codec of one layout under one profile, without any policy.

A coded run has, per stream, one section of codes for each width its plan uses and four of ranges: the low and
high bytes of the scales, then of the shifts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kvtcd.codec.coefficients import Coded, code, restore
from kvtcd.codec.pack import packed_width
from kvtcd.codec.plan import Plan
from kvtcd.codec.ports import Reason
from kvtcd.codec.profile import Profile
from kvtcd.codec.quantize import MAX_RANGE
from kvtcd.codec.runs import RunDecoder
from kvtcd.codec.sections import Part, Plain, Scratch, plains
from kvtcd.codec.stages import stage
from kvtcd.codec.transform import extremes
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

    Raises:
        ProfileMismatch: streams, layers or RoPE differ.
    """

    codec, version = CodecId.KVTC, VERSION

    def __init__(
        self, layout: Layout, rope: Rope | None, profile: Profile, device: torch.device | str = "cpu"
    ) -> None:
        profile.origin.check_shapes(layout, rope)
        where = torch.device(device)
        streams = [profile.streams[stream.name] for stream in layout.streams]
        transforms = partial(
            profile.residency.hold,
            (profile.digest, BasisId.PLAIN), where, sum(stream.nbytes(where) for stream in streams),
            lambda: [stream.transform(layout.layers, where) for stream in streams],
        )  # fmt: skip
        super().__init__(layout, rope, profile, transforms, where)

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
        for index, view in enumerate(block):
            plan = self._plan(index, ratio)
            rotation = self._rotation(index, first_token + start, count, inverse=True)
            with self._transforms() as transforms:
                centred = transforms[index].centred(view[:, start : start + count], rotation)
                coefficients = transforms[index].forward(centred, plan.rank)
            if plan.groups and (reason := _obstacle(coefficients)):
                return reason
            coded = code(coefficients, plan)
            with stage("pack"):
                sections += plains(_symbols(index, coded), start, count, scratch)
        return sections

    def _check_header(self, header: Header) -> None:
        if header.basis is not BasisId.PLAIN or header.plan not in self.profile.ratios:
            raise BadField("blob", f"the profile has no plan {header.plan} for basis {header.basis}")

    def _sizes(self, found: Mapping[Part, Section], header: Header, count: int) -> dict[Part, int]:  # noqa: ARG002 - the plan says it all
        sizes: dict[Part, int] = {}
        for index in range(len(self.layout.streams)):
            sizes |= _sizes(index, self._plan(index, header.plan), count)
        return sizes

    def _coefficients(self, found: Mapping[Part, Tensor], index: int, header: Header, count: int) -> Tensor:
        plan = self._plan(index, header.plan)
        with stage("unpack"):
            coded = _coded(found, index, plan, count).to(self._device)
        return restore(coded, plan)

    def _plan(self, index: int, ratio: int) -> Plan:
        return self.profile.streams[self.layout.streams[index].name].plans[ratio]


def _obstacle(coefficients: Tensor) -> Reason | None:
    """Why these coefficients cannot be quantised, if so.

    A NaN or an infinity in a row spreads to all of its coefficients, so this sees those too.
    """
    low, high = extremes(coefficients)
    if low >= -MAX_RANGE and high <= MAX_RANGE:
        return None
    return Reason.RANGE if torch.isfinite(coefficients).all() else Reason.NOT_FINITE


def _symbols(index: int, coded: Coded) -> Iterator[tuple[Part, Tensor]]:
    """The sections of one stream's run, in order."""
    for bits, packed in coded.codes.items():
        yield Part(Kind.CODES, index, bits), packed
    if coded.codes:
        ranges = torch.stack((coded.scales, coded.shifts)).view(torch.int16)
        for plane in range(_RANGE_PLANES):
            yield Part(Kind.RANGES, index, plane), ranges[plane // 2] >> (8 * (plane % 2))


def _sizes(index: int, plan: Plan, tokens: int) -> dict[Part, int]:
    """The sections that `_symbols` yields, with their uncompressed sizes."""
    sizes = {
        Part(Kind.CODES, index, bits): plan.components(bits) * packed_width(tokens, bits)
        for bits in {group.bits for group in plan.groups}
    }
    if plan.groups:
        ranges = {
            Part(Kind.RANGES, index, plane): len(plan.groups) * tokens for plane in range(_RANGE_PLANES)
        }
        sizes |= ranges
    return sizes


def _coded(found: Mapping[Part, Tensor], index: int, plan: Plan, tokens: int) -> Coded:
    """What `_symbols` was given."""
    codes = {
        bits: found[Part(Kind.CODES, index, bits)].view(plan.components(bits), -1)
        for bits in {group.bits for group in plan.groups}
    }
    device = next((data.device for data in found.values()), None)
    ranges = torch.zeros((2, len(plan.groups), tokens), dtype=torch.int16, device=device)
    for plane in range(_RANGE_PLANES if plan.groups else 0):
        data = found[Part(Kind.RANGES, index, plane)].view(-1, tokens)
        ranges[plane // 2] |= data.to(torch.int16) << (8 * (plane % 2))
    scales, shifts = ranges.view(torch.float16)
    return Coded(codes, scales, shifts)
