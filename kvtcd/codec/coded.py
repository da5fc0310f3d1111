"""Coded runs of tokens: the transform codec of one layout under one profile, without any policy.

A coded run has, per stream, one section of codes for each width its plan uses and four of ranges: the low and
high bytes of the scales, then of the shifts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvtcd.codec.coefficients import Coded, code, restore
from kvtcd.codec.exact import decode_exact
from kvtcd.codec.lossless import check_blob, check_raw
from kvtcd.codec.pack import packed_width
from kvtcd.codec.plan import Plan
from kvtcd.codec.ports import Reason
from kvtcd.codec.profile import Profile
from kvtcd.codec.quantize import MAX_RANGE
from kvtcd.codec.rope import Rotation
from kvtcd.codec.sections import Part, by_run, read, require, write
from kvtcd.codec.transform import views
from kvtcd.core.blob import BasisId, Blob, CodecId, Kind, Run, Section
from kvtcd.core.errors import BadField, ProfileMismatch
from kvtcd.core.identity import Rope
from kvtcd.core.layout import Layout

VERSION = 1
_RANGE_PLANES = 4


class Coder:
    """Codes and decodes runs of tokens with any plan of a profile.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        profile: made for a model of these shapes; that it is this very model, the caller has checked.
        device: where the products run, and where raw blocks lie.

    Raises:
        ProfileMismatch: streams, layers or RoPE differ.
    """

    def __init__(
        self, layout: Layout, rope: Rope | None, profile: Profile, device: torch.device | str = "cpu"
    ) -> None:
        origin = profile.origin
        for what, want, got in (
            ("streams", layout.streams, origin.streams),
            ("layers", layout.layers, origin.layers),
            ("rope", rope, origin.rope),
        ):
            if want != got:
                raise ProfileMismatch(what, want, got)
        self.layout = layout
        self.profile = profile
        self._rope = rope
        self._device = torch.device(device)
        self._transforms = [
            profile.streams[stream.name].transform(layout.layers, self._device) for stream in layout.streams
        ]

    def encode(
        self, block: Sequence[Tensor], ratio: int, *, start: int, count: int, first_token: int
    ) -> list[Run] | Reason:
        """Code tokens ``start .. start + count - 1`` of a block, given as the views of its streams.

        Returns:
            The sections, or why these tokens cannot be coded.
        """
        runs: list[Run] = []
        for index, view in enumerate(block):
            plan = self._plan(index, ratio)
            rotation = self._rotation(index, first_token + start, count, inverse=True)
            coefficients = self._transforms[index].forward(
                view[:, start : start + count], rotation, plan.rank
            )
            if plan.groups and (reason := _obstacle(coefficients)):
                return reason
            runs += _write(index, code(coefficients, plan), start, count)
        return runs

    def decode(self, blob: Blob, out: Tensor) -> None:
        """Decode a blob of the `kvtc` codec; see `BlobDecoder`.

        Raises:
            ProfileMismatch: the blob was written with another profile.
        """
        header = blob.header
        check_blob(blob, self.layout, CodecId.KVTC, VERSION)
        if header.profile != self.profile.digest:
            raise ProfileMismatch("digest", header.profile.hex(), self.profile.digest.hex())
        if header.basis is not BasisId.PLAIN or header.plan not in self.profile.ratios:
            raise BadField("blob", f"the profile has no plan {header.plan} for basis {header.basis}")
        if header.first_token is None:
            raise BadField("blob", "a coded block must know the position of its first token")
        check_raw(out, self.layout, header.tokens)
        block = views(out, self.layout, header.tokens)
        for (start, count), found in sorted(by_run(blob).items()):
            if any(part.kind is Kind.PLANE for part in found):
                decode_exact(blob, found, block, start, count)
            else:
                target = [view[:, start : start + count] for view in block]
                self._decode_run(blob, found, target, header.first_token + start)

    def _decode_run(
        self, blob: Blob, found: Mapping[Part, Section], target: Sequence[Tensor], position: int
    ) -> None:
        plans = [self._plan(index, blob.header.plan) for index in range(len(target))]
        tokens = target[0].shape[1]
        sizes: dict[Part, int] = {}
        for index, plan in enumerate(plans):
            sizes |= _sizes(index, plan, tokens)
        require(found, sizes)
        for index, (plan, view) in enumerate(zip(plans, target, strict=True)):
            coefficients = restore(_read(blob, found, index, plan, tokens).to(self._device), plan)
            rotation = self._rotation(index, position, tokens, inverse=False)
            self._transforms[index].inverse(coefficients, rotation, view)

    def _plan(self, index: int, ratio: int) -> Plan:
        return self.profile.streams[self.layout.streams[index].name].plans[ratio]

    def _rotation(self, index: int, position: int, tokens: int, *, inverse: bool) -> Rotation | None:
        if not self.layout.streams[index].rope or self._rope is None:
            return None
        return Rotation(self._rope, position, tokens, inverse=inverse, device=self._device)


def _obstacle(coefficients: Tensor) -> Reason | None:
    """Why these coefficients cannot be quantised, if so.

    A NaN or an infinity in a row spreads to all of its coefficients, so this sees those too.
    """
    low, high = (float(value) for value in torch.aminmax(coefficients))
    if low >= -MAX_RANGE and high <= MAX_RANGE:
        return None
    return Reason.RANGE if torch.isfinite(coefficients).all() else Reason.NOT_FINITE


def _write(index: int, coded: Coded, start: int, count: int) -> list[Run]:
    runs = [
        write(Part(Kind.CODES, index, bits), start, count, packed) for bits, packed in coded.codes.items()
    ]
    if coded.codes:
        ranges = torch.stack((coded.scales, coded.shifts)).view(torch.int16)
        for plane in range(_RANGE_PLANES):
            data = (ranges[plane // 2] >> (8 * (plane % 2))).to(torch.uint8)
            runs.append(write(Part(Kind.RANGES, index, plane), start, count, data))
    return runs


def _sizes(index: int, plan: Plan, tokens: int) -> dict[Part, int]:
    """The sections that `_write` writes, with their uncompressed sizes."""
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


def _read(blob: Blob, found: Mapping[Part, Section], index: int, plan: Plan, tokens: int) -> Coded:
    codes = {
        bits: read(blob, found[Part(Kind.CODES, index, bits)]).view(plan.components(bits), -1)
        for bits in {group.bits for group in plan.groups}
    }
    ranges = torch.zeros((2, len(plan.groups), tokens), dtype=torch.int16)
    for plane in range(_RANGE_PLANES if plan.groups else 0):
        data = read(blob, found[Part(Kind.RANGES, index, plane)]).view(-1, tokens)
        ranges[plane // 2] |= data.to(torch.int16) << (8 * (plane % 2))
    scales, shifts = ranges.view(torch.float16)
    return Coded(codes, scales, shifts)
