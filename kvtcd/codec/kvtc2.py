"""The `kvtc2` codec: transform coding in which errors are weighed by what they do to the model.

The weighted basis of a profile, one step for all components of all streams, finer for tokens that are likely
to matter and for the most recent ones (`weighted`, `stepped`). The first tokens of a sequence are kept
exactly.

**Guard.** Every block's own weighted error is known once it is coded. Above `bound` the block is coded again
at half the step, and again; still above, or if it cannot be coded, it is stored losslessly. So is a block in
which a layer or head is not spread as calibration saw it (`usual`). The result says so. This bounds the
weighted error, not the divergence.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvtcd.codec.exact import to_planes
from kvtcd.codec.graphs import Graphs
from kvtcd.codec.lossless import Lossless, check_raw
from kvtcd.codec.ports import Encoder, Reason, Symbols
from kvtcd.codec.profile import Profile
from kvtcd.codec.sections import Plain, Scratch
from kvtcd.codec.stepped import VERSION, Run, Span, Stepped, class_step
from kvtcd.codec.transform import views
from kvtcd.codec.uniform import Arithmetic
from kvtcd.codec.weighted import CLASSES, MIDDLE
from kvtcd.core.blob import BasisId, CodecId, Header
from kvtcd.core.identity import Rope
from kvtcd.core.layout import Layout

GUARD = 2.0
"""The bound as a multiple of the error that calibration measured at the same step."""
RECENT = 8
"""Half octaves by which the step of the most recent tokens is finer."""
_TRIES = 3
"""Steps tried, each half of the one before."""


class Kvtc2(Encoder):
    """Encoder of one layout, profile and step.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        profile: made for this model, with a weighted basis; the caller has checked that.
        step: of the quantiser, in square roots of two nats.
        bound: on the mean weighted error of a block's tokens but the most recent, nats; None: no guard
            at all.
        sinks: first positions of a sequence that stay exact.
        window: last tokens of a sequence that are coded finer.
        device: where raw blocks lie and the products run.
        arithmetic: who turns coefficients into codes there; None: torch.
        classes: code tokens that are likely to matter with finer steps.
        graphs: replay there what recurs; None: nothing is replayed.
    """

    def __init__(
        self,
        layout: Layout,
        rope: Rope | None,
        profile: Profile,
        step: float,
        *,
        bound: float | None = None,
        sinks: int = 4,
        window: int = 128,
        device: torch.device | str = "cpu",
        arithmetic: Arithmetic | None = None,
        classes: bool = True,
        graphs: Graphs | None = None,
    ) -> None:
        self._layout = layout
        self._coder = Stepped(
            layout, rope, profile, device, arithmetic=arithmetic, classes=classes, graphs=graphs
        )
        self._lossless = Lossless(layout)
        self._step, self._bound = class_step(step, MIDDLE), bound
        self._sinks, self._window = sinks, window

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
        if start == tokens:
            return losslessly(Reason.WINDOW)
        end = max(start, tokens - max(0, self._window - after))
        spans = [span for span in (Span(start, end - start), Span(end, tokens - end, RECENT)) if span.count]
        block = views(raw, self._layout, tokens)
        for attempt in range(_TRIES):
            step = class_step(self._step, MIDDLE + 2 * attempt)
            coded = self._code(block, spans, step, first_token, scratch)
            if isinstance(coded, Reason):
                return losslessly(coded)
            if coded is None:
                continue
            if sum(section.data.numel() for section in coded) > raw.numel():
                return losslessly(Reason.RANGE)
            header = Header(
                codec=CodecId.KVTC2,
                codec_version=VERSION,
                dtype=self._layout.dtype,
                layout=self._layout.digest,
                tokens=tokens,
                raw_bytes=raw.numel(),
                first_token=first_token,
                basis=BasisId.WEIGHTED,
                step=step,
                token_classes=CLASSES,
                profile=self._coder.profile.digest,
            )
            head = to_planes(block, 0, start, scratch) if start else []
            return Symbols(header, [*head, *coded], Reason.FINER if attempt else None)
        return losslessly(Reason.ERROR)

    def _code(
        self, block: tuple[Tensor, ...], spans: list[Span], step: float, first_token: int, scratch: Scratch
    ) -> list[Plain] | Reason | None:
        """Code spans of a block: the sections, or why that cannot be; None where the error is too large."""
        sections: list[Plain] = []
        for span in spans:
            run = self._coder.analyze(block, span, step, first_token=first_token, scratch=scratch)
            if not isinstance(run, Run):
                return run
            if self._bound is not None and not run.usual:
                return Reason.UNUSUAL
            if self._bound is not None and float(run.error.mean()) > self._bound:
                return None
            sections += run.sections
        return sections
