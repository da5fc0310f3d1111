"""The `kvtc` codec: KV Cache Transform Coding (Staniszewski and Łańcucki, arXiv 2511.01815).

All layers and heads of a stream together, RoPE undone, mean removed, principal components of calibration,
bits allocated by dynamic programming, DEFLATE. The first tokens of a sequence (attention sinks) and the most
recent ones are kept exactly. What cannot be coded is stored losslessly, and the result says why.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvtcd.codec.coded import VERSION, Coder
from kvtcd.codec.exact import to_planes
from kvtcd.codec.lossless import Lossless, check_raw
from kvtcd.codec.ports import Encoder, Reason, Symbols
from kvtcd.codec.profile import Profile
from kvtcd.codec.sections import Scratch
from kvtcd.codec.transform import views
from kvtcd.core.blob import BasisId, CodecId, Header
from kvtcd.core.identity import Rope
from kvtcd.core.layout import Layout


class Kvtc(Encoder):
    """Encoder of one layout, profile and ratio.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        profile: made for this model; the caller has checked that.
        ratio: nominal ratio, one the profile has a plan for.
        sinks: first positions of a sequence that stay exact.
        window: last tokens of a sequence that stay exact.
        device: where raw blocks lie and the products run.
    """

    def __init__(
        self,
        layout: Layout,
        rope: Rope | None,
        profile: Profile,
        ratio: int,
        *,
        sinks: int = 4,
        window: int = 128,
        device: torch.device | str = "cpu",
    ) -> None:
        self._layout = layout
        self._coder = Coder(layout, rope, profile, device)
        self._lossless = Lossless(layout)
        self._ratio, self._sinks, self._window = ratio, sinks, window

    def analyze(
        self, raw: Tensor, *, tokens: int, first_token: int | None, after: int, scratch: Scratch
    ) -> Symbols:
        """Transform and quantise a block; see `Encoder`."""
        check_raw(raw, self._layout, tokens)
        losslessly = partial(
            self._lossless.instead,
            raw=raw, tokens=tokens, first_token=first_token, after=after, scratch=scratch,
        )  # fmt: skip
        if first_token is None:
            return losslessly(Reason.POSITION)
        start = min(tokens, max(0, self._sinks - first_token))
        end = tokens - min(tokens, max(0, self._window - after))
        if start >= end:
            return losslessly(Reason.WINDOW)
        block = views(raw, self._layout, tokens)
        coded = self._coder.analyze(
            block, self._ratio, start=start, count=end - start, first_token=first_token, scratch=scratch
        )
        if isinstance(coded, Reason):
            return losslessly(coded)
        header = Header(
            codec=CodecId.KVTC,
            codec_version=VERSION,
            dtype=self._layout.dtype,
            layout=self._layout.digest,
            tokens=tokens,
            raw_bytes=raw.numel(),
            first_token=first_token,
            basis=BasisId.PLAIN,
            plan=self._ratio,
            profile=self._coder.profile.digest,
        )
        head = to_planes(block, 0, start, scratch) if start else []
        tail = to_planes(block, end, tokens - end, scratch) if end < tokens else []
        return Symbols(header, [*head, *coded, *tail])
