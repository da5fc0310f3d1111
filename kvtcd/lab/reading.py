"""What a calibration reads: windows of texts, and which of their rows it keeps.

Texts are cut into windows that start at position 0, as sequences do, dealt out over the texts. The first
windows, at least one of each text, are held out: a seeded choice of their rows is the sample that bits are
allocated on, so that allocation sees components as they are on text the basis was not fitted to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from kvtcd.core.errors import ConfigError
from kvtcd.lab.capture import windows

WINDOW = 1024
"""Tokens of a window."""
SINKS = 4
"""First tokens of each window, not used: attention sinks, unlike all others."""
SAMPLE = 2048
"""Rows that bits are allocated on, at most."""
_HELD_OUT = 8
"""One window in so many is held out."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model is to read.

    Attributes:
        windows: token ids of each.
        held_out: the first so many windows give the sample, the others the moments.
        chosen: by held-out window, which of its rows are in the sample; int64, ascending.
        seed: of the choice of rows, and of labels drawn.
    """

    windows: tuple[Sequence[int], ...]
    held_out: int
    chosen: tuple[Tensor, ...]
    seed: int = 0

    @property
    def fitted_tokens(self) -> int:
        """Rows that moments take in."""
        return sum(len(window) - SINKS for window in self.windows[self.held_out :])


def plan_reading(
    texts: Sequence[Sequence[int]],
    tokens: int,
    *,
    seed: int,
    window: int = WINDOW,
    start: Sequence[int] = (),
) -> Reading:
    """Choose the windows of a calibration.

    Args:
        texts: token ids of each text.
        tokens: budget; whole windows of it are read, spread evenly over each text.
        seed: of the choice of rows.
        window: tokens of a window.
        start: what every window begins with, a BOS for many models: it takes the first sink.

    Raises:
        ConfigError: the budget is under two windows, or the texts do not have so many.
    """
    wanted, taken = tokens // window, window - len(start)
    available = sum(len(text) // taken for text in texts)
    if wanted < 2:
        raise ConfigError("--tokens", "", f"{tokens} are less than two windows of {window}")
    if wanted > available:
        fewer = f", or ask for {available * window}" if available > 1 else f" of at least {taken} tokens"
        raise ConfigError(
            "--tokens", "",
            f"{tokens} are {wanted} windows of {window} tokens, the texts have {available}; add texts{fewer}",
        )  # fmt: skip
    per_text = 1
    while sum(min(per_text, len(text) // taken) for text in texts) < wanted:
        per_text += 1
    dealt = tuple((*start, *ids) for _, ids in islice(windows(texts, taken, per_text), wanted))
    used_texts = sum(len(text) >= taken for text in texts)
    held_out = min(max(used_texts, wanted // _HELD_OUT), wanted // 2)
    return Reading(dealt, held_out, _choose(held_out, window - SINKS, seed), seed)


def _choose(windows: int, rows: int, seed: int) -> tuple[Tensor, ...]:
    """Choose `SAMPLE` rows, or all, among those of the held-out windows."""
    shuffled = torch.randperm(windows * rows, generator=torch.Generator().manual_seed(seed))
    chosen = shuffled[:SAMPLE].sort().values
    return tuple(chosen[chosen // rows == window] % rows for window in range(windows))
