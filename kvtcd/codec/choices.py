"""What `name = "auto"` of a policy stands for: choices that were measured with a profile, and are kept in it.

A choice is for a ratio. Of all codecs that store at most so many bytes, those that are not told apart from
the one with the least divergence, on documents that the profile was not made from, are as good as it; the one
of them that stores least is chosen. The others are kept beside it, with what they had: what has less than one
time its divergence was measured to have less, in more bytes, and not beyond noise.
A blob has one codec, so keys and values share it; which would be best for each alone is kept as evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from kvtcd.core.dials import DIALS, CodecName
from kvtcd.core.errors import BadField
from kvtcd.core.policy import CodecChoice

_NUMBERS = ("ratio", "kl", "kl_lo", "kl_hi", "times", "times_lo", "times_hi")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A codec that was measured.

    Attributes:
        codec: with its options and where its dial stands, as a policy says it.
        ratio: of coded tokens, every byte counted.
        kl, kl_lo, kl_hi: divergence, nats per token, and its 95 % interval over documents; `kl` itself where
            there is none.
        times, times_lo, times_hi: its divergence over that of the chosen one, paired, and the interval of
            this pair alone.
        errors: by stream, weighted error of a token, nats.
    """

    codec: CodecChoice
    ratio: float
    kl: float
    kl_lo: float
    kl_hi: float
    times: float
    times_lo: float
    times_hi: float
    errors: Mapping[str, float]

    @property
    def name(self) -> str:
        """The codec, for people."""
        return f"{self.codec.name} {self.codec.dial}".rstrip()


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a ratio.

    Attributes:
        ratio: that the codec was to have at least, but for a tenth.
        documents: that it was measured on.
        candidates: the chosen one first, then by divergence.
    """

    ratio: float
    documents: int
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        """What `auto` stands for."""
        return self.candidates[0]

    def best_of(self, stream: str) -> Candidate:
        """Return the candidate with the least weighted error of one stream."""
        return min(self.candidates, key=lambda one: one.errors.get(stream, math.inf))

    def resolve(self, asked: CodecChoice) -> CodecChoice:
        """Return what a policy means that asks for `auto` at this ratio."""
        return replace(
            self.chosen.codec,
            sinks=asked.sinks,
            window=asked.window,
            on_drift=asked.on_drift,
            device=asked.device,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the canonical form: numbers as text, since canonical JSON has none but integers."""
        return {
            "candidates": [_written(one) for one in self.candidates],
            "documents": self.documents,
            "ratio": repr(self.ratio),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Choice:
        """Build from the form that `to_json` writes.

        Raises:
            BadField: it is not that.
        """
        try:
            found = cls(
                _number(body["ratio"]), int(body["documents"]), tuple(map(_candidate, body["candidates"]))
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as fault:
            raise BadField("profile", f"its choices for auto: {fault}") from None
        if not found.candidates or found.ratio <= 0:
            raise BadField("profile", "a choice for auto has no codec, or no ratio")
        return found


def choice_for(choices: Sequence[Choice], asked: CodecChoice) -> Choice | str:
    """Return what was chosen for the ratio that a policy asks `auto` for, or why there is nothing."""
    if not choices:
        return "has no choice for auto; make one with `kvtcd profile choose`"
    for choice in choices:
        if choice.ratio == asked.ratio:
            return choice
    known = ", ".join(f"{choice.ratio:g}" for choice in choices)
    return f"has choices for auto at ratios of {known}, not {asked.ratio:g}"


def _written(one: Candidate) -> dict[str, Any]:
    dial = next((name for name in DIALS[one.codec.name].names if getattr(one.codec, name) is not None), None)
    return {
        "codec": one.codec.name,
        "dial": {dial: repr(getattr(one.codec, dial))} if dial else {},
        "errors": {name: repr(value) for name, value in one.errors.items()},
        "options": list(one.codec.options),
    } | {name: repr(getattr(one, name)) for name in _NUMBERS}


def _candidate(body: Mapping[str, Any]) -> Candidate:
    name: CodecName = body["codec"]
    if name not in get_args(CodecName) or name == "auto":
        raise ValueError(f"{name!r} is no codec that can be chosen")
    dial: dict[str, Any] = {"ratio": None} | {key: _number(value) for key, value in body["dial"].items()}
    for whole in {"bits", "level"} & dial.keys():
        dial[whole] = int(dial[whole])
    numbers = {key: _number(body[key]) for key in _NUMBERS}
    errors = {str(key): _number(value) for key, value in body["errors"].items()}
    return Candidate(CodecChoice(name, options=tuple(body["options"]), **dial), errors=errors, **numbers)


def _number(text: str) -> float:
    number = float(text)
    if not number >= 0 or not isinstance(text, str):
        raise ValueError(f"{text!r} is no number that may stand there")
    return number
