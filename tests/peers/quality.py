"""How far a packed cache takes SmolLM2 from what it says by itself."""

from __future__ import annotations

import math
from pathlib import Path

TEXT = Path(__file__).parents[1] / "data" / "encyclopedia.txt"
TOKEN_BYTES = 23_040
"""Of the cache of one token, in 16 bit."""


def divergence(of: dict[str, float], from_: dict[str, float]) -> float:
    """KL of two distributions over one vocabulary, given as log probabilities: nats."""
    return sum(math.exp(log) * (log - from_[token]) for token, log in of.items())
