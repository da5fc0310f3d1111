"""The `kvtc` codec: KV Cache Transform Coding (Staniszewski and Łańcucki, arXiv 2511.01815).

All layers and heads of a stream together, RoPE undone, mean removed, principal components of calibration,
bits allocated by dynamic programming, DEFLATE. The first tokens of a sequence (attention sinks) and the most
recent ones are kept exactly. What cannot be coded is stored losslessly, and the result says why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtcd.codec.coded import VERSION, Coder
from kvtcd.codec.graphs import Graphs
from kvtcd.codec.middle import MiddleEncoder
from kvtcd.codec.ports import Reason
from kvtcd.codec.profile import Profile
from kvtcd.codec.sections import Plain, Scratch
from kvtcd.core.blob import BasisId, CodecId, Header
from kvtcd.core.identity import Rope
from kvtcd.core.layout import Layout


class Kvtc(MiddleEncoder):
    """Encoder of one layout, profile and ratio.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        profile: made for this model; the caller has checked that.
        ratio: nominal ratio, one the profile has a plan for.
        sinks: first positions of a sequence that stay exact.
        window: last tokens of a sequence that stay exact.
        device: where raw blocks lie and the products run.
        graphs: replay there what recurs; None: nothing is replayed.
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
        graphs: Graphs | None = None,
    ) -> None:
        self._coder = Coder(layout, rope, profile, device, graphs=graphs)
        self._ratio = ratio
        header = Header(
            codec=CodecId.KVTC,
            codec_version=VERSION,
            dtype=layout.dtype,
            layout=layout.digest,
            tokens=0,
            raw_bytes=0,
            basis=BasisId.PLAIN,
            plan=ratio,
            profile=profile.digest,
        )
        super().__init__(layout, header, sinks=sinks, window=window)

    def _code(
        self, block: tuple[Tensor, ...], start: int, count: int, *, first_token: int, scratch: Scratch
    ) -> list[Plain] | Reason:
        return self._coder.analyze(
            block, self._ratio, start=start, count=count, first_token=first_token, scratch=scratch
        )
