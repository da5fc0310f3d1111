"""From checks to a verdict in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvtcd.lab.validation.check import Check

Word = Literal["safe", "tq", "collect", "not judged"]
_FLOOR = 1.25
"""What a basis misses, in times of what was promised, however many tokens there were: texts differ."""
_ENOUGH = 1.75
_MOST = 16
"""Times the tokens there were: more than that is no estimate any more."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with one stream: the eigenbasis is `safe`, use `tq`, or `collect` more tokens; in words.

    Without rows to judge by it is `not judged`, unless calibration alone was too little.
    `word` and `text` are of the basis of all layers (`kvtc`, `kvtc2`), `heads` is of those of heads (`sq`).
    """

    word: Word
    text: str
    heads: str


def judge(checks: Sequence[Check], tokens: int, missing: str = "") -> Verdict:
    """Return the verdict on a stream that was calibrated on so many tokens.

    Args:
        checks: of the stream.
        tokens: of calibration.
        missing: what there would have to be, where there were no held-out rows.
    """
    word, text = _judge([check for check in checks if check.basis != "heads"], tokens, missing)
    heads = _judge([check for check in checks if check.basis != "layers"], tokens, missing)[1]
    return Verdict(word, text, heads)


def _judge(checks: Sequence[Check], tokens: int, missing: str) -> tuple[Word, str]:
    failed = [check for check in checks if not check.holds and check.kind != "note"]
    why = "; ".join(check.meaning for check in failed)
    kinds = {check.kind for check in failed}
    if "tails" in kinds:
        return "tq", f"use `tq`: heavy tails, on which a basis spends bits in vain ({why})"
    if "budget" in kinds:
        return "collect", f"collect about {_more(failed, tokens):,} more tokens ({why})"
    if missing:
        return "not judged", f"not judged: {missing}"
    if "drift" in kinds:
        return (
            "collect",
            f"collect {tokens:,} more tokens, of texts like these: calibration had others ({why})",
        )
    if "codec" in kinds:
        return "tq", f"use `tq`: the codec does not keep what the basis promises ({why})"
    if "gain" in kinds:
        return "tq", f"use `tq`: a basis has next to nothing to gain ({why})"
    return "safe", "eigenbasis safe"


def _more(failed: Sequence[Check], tokens: int) -> int:
    """Estimate the tokens that are missing: what a basis misses beyond the floor goes with one over them."""
    times = 2.0
    for check in failed:
        if check.name == "rows of a head":
            times = max(times, check.bound / check.value)
        elif check.name == "energy of all layers":
            times = max(times, (check.value - _FLOOR) / (_ENOUGH - _FLOOR))
    more = int(tokens * (min(times, _MOST) - 1))
    return -(-more // 1000) * 1000
