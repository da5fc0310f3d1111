"""Blocks of which both ends are exact and the middle is coded."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import partial

from torch import Tensor

from kvtcd.codec.exact import to_planes
from kvtcd.codec.lossless import Lossless, check_raw
from kvtcd.codec.ports import Encoder, Reason, Symbols
from kvtcd.codec.sections import Plain, Scratch
from kvtcd.codec.transform import views
from kvtcd.core.blob import Header
from kvtcd.core.layout import Layout


class MiddleEncoder(Encoder):
    """Codes what is neither a sink nor in the window, if it can, and stores the block losslessly if not.

    Args:
        layout: of the blocks.
        header: of its blobs, but for what differs from block to block.
        sinks: first positions of a sequence that stay exact.
        window: last tokens of a sequence that stay exact.
    """

    def __init__(self, layout: Layout, header: Header, *, sinks: int, window: int) -> None:
        self._layout, self._header = layout, header
        self._lossless = Lossless(layout)
        self._sinks, self._window = sinks, window

    @abstractmethod
    def _code(
        self, block: tuple[Tensor, ...], start: int, count: int, *, first_token: int, scratch: Scratch
    ) -> list[Plain] | Reason:
        """Code tokens of a block, given as views of its streams: the sections, or why that cannot be."""

    def analyze(
        self, raw: Tensor, *, tokens: int, first_token: int | None, after: int, scratch: Scratch
    ) -> Symbols:
        """Code a block; see `Encoder`."""
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
        coded = self._code(block, start, end - start, first_token=first_token, scratch=scratch)
        if isinstance(coded, Reason):
            return losslessly(coded)
        header = replace(self._header, tokens=tokens, raw_bytes=raw.numel(), first_token=first_token)
        head = to_planes(block, 0, start, scratch) if start else []
        tail = to_planes(block, end, tokens - end, scratch) if end < tokens else []
        return Symbols(header, [*head, *coded, *tail])
