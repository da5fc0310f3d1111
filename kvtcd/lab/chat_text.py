"""Tokens to text as they come: whole characters, and nothing of what ends an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Words:
    """Text of tokens, one after the other.

    What a token says can depend on the one before it, so each is decoded with those since the last whole
    character.

    Args:
        decode: makes text of token ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = self._shown = 0

    def add(self, token: int) -> str:
        """Return the text that is whole with one more token."""
        self._tokens.append(token)
        return "" if self._new().endswith(_BROKEN) else self._show()

    def rest(self) -> str:
        """Return what no token has made whole."""
        return self._show()

    def _new(self) -> str:
        before = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(before) :]

    def _show(self) -> str:
        new = self._new()
        self._start, self._shown = self._shown, len(self._tokens)
        return new


class UntilStop:
    """Lets text through up to the first of some stop texts; what may be the beginning of one waits.

    Args:
        stops: the texts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Return what may be shown with more text."""
        held = self._held + text
        ends = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return held[: min(ends)]
        keep = max(
            (n for stop in self._stops for n in range(len(stop)) if held.endswith(stop[:n])), default=0
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """Return what waited for nothing."""
        held, self._held = self._held, ""
        return held
