"""Blocks coded by a rival: sinks and window exact as with `kvtc`, all between in arrays of the rival."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from kvtcd.codec.middle import MiddleEncoder
from kvtcd.codec.ports import Reason
from kvtcd.codec.profile import Profile
from kvtcd.codec.quantize import MAX_RANGE
from kvtcd.codec.rivals.method import ANY, F16, Method, Site
from kvtcd.codec.rivals.methods import method_for
from kvtcd.codec.rivals.setting import CODECS, Setting
from kvtcd.codec.runs import BlockDecoder
from kvtcd.codec.sections import Part, Plain, Scratch, plain
from kvtcd.core.blob import BasisId, CodecId, Header, Kind, Section
from kvtcd.core.errors import BadField
from kvtcd.core.identity import Rope
from kvtcd.core.layout import Layout

VERSION = 1


class RivalDecoder(BlockDecoder):
    """Codes and decodes runs of tokens with one rival, at every stand of its dial.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        codec: the rival.
        profile: made for a model of these shapes; None for a rival that needs none.
        device: where raw blocks lie and the work is done.

    Raises:
        ProfileMismatch: streams, layers or RoPE of the profile differ.
    """

    version = VERSION

    def __init__(
        self,
        layout: Layout,
        rope: Rope | None,
        codec: CodecId,
        profile: Profile | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if profile:
            profile.origin.check_shapes(layout, rope)
        super().__init__(layout, rope, profile, torch.device(device))
        self.codec = codec
        self._profile = profile
        self.methods = lru_cache(maxsize=8)(self._make_methods)

    def analyze(
        self, view: Tensor, setting: Setting, index: int, *, start: int, first_token: int, scratch: Scratch
    ) -> list[Plain] | Reason:
        """Code a run of one stream, ``[L, T, H, D]``, that begins at token `start` of its block.

        Returns:
            The sections, or why these tokens cannot be coded.
        """
        method, count = self.methods(setting)[index], view.shape[1]
        undo = self._rotation(index, first_token + start, count, inverse=True) if method.before_rope else None
        x = undo(view) if undo else view.to(torch.float32)
        if not bool((x.abs() <= MAX_RANGE).all()):
            return Reason.RANGE if bool(torch.isfinite(x).all()) else Reason.NOT_FINITE
        arrays = method.encode(x.contiguous())
        if not all(bool(torch.isfinite(array).all()) for array in arrays if array.dtype == F16):
            return Reason.RANGE
        return [
            plain(
                Part(Kind.ARRAY, index, number),
                start,
                count,
                array.flatten().contiguous().view(torch.uint8),
                scratch,
            )
            for number, array in enumerate(arrays)
            if array.numel()
        ]

    def _check_header(self, header: Header) -> None:
        setting = Setting.read(header)
        if CODECS[setting.codec] is not self.codec:
            raise BadField("blob", f"{setting.codec} is not codec {self.codec}")

    def _sizes(self, found: Mapping[Part, Section], header: Header, count: int) -> dict[Part, int]:
        sizes: dict[Part, int] = {}
        for index, method in enumerate(self.methods(Setting.read(header))):
            for number, field in enumerate(method.fields(count)):
                part, nbytes = Part(Kind.ARRAY, index, number), field.item
                if ANY in field.shape:
                    # How many there are, the codes say: compared when they are decoded.
                    nbytes *= found[part].raw_bytes // field.item if part in found else 0
                if nbytes:
                    sizes[part] = nbytes
        return sizes

    def _restore(
        self, found: Mapping[Part, Tensor], index: int, header: Header, *, position: int, out: Tensor,
        at_once: int,  # noqa: ARG002 - a method decodes all layers together
    ) -> Iterator[slice]:  # fmt: skip
        method, count = self.methods(Setting.read(header))[index], out.shape[1]
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        arrays = [
            found.get(Part(Kind.ARRAY, index, number), empty)
            .to(self._device)
            .view(field.dtype)
            .view(field.shape)
            for number, field in enumerate(method.fields(count))
        ]
        values = method.decode(arrays, count)
        apply = self._rotation(index, position, count, inverse=False) if method.before_rope else None
        values = apply(values) if apply else values
        if out.dtype == torch.float16:
            values = values.clamp(-MAX_RANGE, MAX_RANGE)
        out.copy_(values)
        yield slice(0, len(out))

    def _make_methods(self, setting: Setting) -> list[Method]:
        methods = []
        for number, stream in enumerate(self.layout.streams):
            site = Site(
                layers=self.layout.layers,
                heads=stream.heads,
                dim=stream.head_dim,
                key=stream.rope or stream.name == "k",
                number=number,
                rope=self._rope if stream.rope else None,
                profile=self._profile.streams[stream.name] if self._profile else None,
            )
            methods.append(method_for(setting, site))
        return methods


class Rival(MiddleEncoder):
    """Encoder of one layout and rival.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        setting: the rival, and where its dial stands.
        profile: made for this model; None for a rival that needs none.
        sinks: first positions of a sequence that stay exact.
        window: last tokens of a sequence that stay exact.
        device: where raw blocks lie and the work is done.
    """

    def __init__(
        self,
        layout: Layout,
        rope: Rope | None,
        setting: Setting,
        profile: Profile | None = None,
        *,
        sinks: int = 4,
        window: int = 128,
        device: torch.device | str = "cpu",
    ) -> None:
        codec, digest = CODECS[setting.codec], profile.digest if profile else bytes(32)
        self._setting = setting
        self._coder = RivalDecoder(layout, rope, codec, profile, device)
        header = Header(
            codec=codec,
            codec_version=VERSION,
            dtype=layout.dtype,
            layout=layout.digest,
            tokens=0,
            raw_bytes=0,
            basis=BasisId.PLAIN if profile else BasisId.NONE,
            plan=setting.plan,
            step=setting.dial,
            profile=digest,
        )
        super().__init__(layout, header, sinks=sinks, window=window)

    def _code(
        self, block: tuple[Tensor, ...], start: int, count: int, *, first_token: int, scratch: Scratch
    ) -> list[Plain] | Reason:
        coded: list[Plain] = []
        for index, view in enumerate(block):
            run = self._coder.analyze(
                view[:, start : start + count],
                self._setting,
                index,
                start=start,
                first_token=first_token,
                scratch=scratch,
            )
            if isinstance(run, Reason):
                return run
            coded += run
        if sum(section.data.numel() for section in coded) > self._layout.nbytes(count):
            return Reason.RANGE
        return coded
