"""Whether blocks of a namespace are still like those that its profile was calibrated on: bounds and verdict.

Figures come in windows of rows from several blocks. What one window says counts for nothing: it takes `TURNS`
in a row to believe that blocks have changed, and as many to believe that they are as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from kvtcd.core.forms import Range
from kvtcd.core.message import Answer, derived

OnDrift = Literal["warn", "lossless", "refuse"]
"""What becomes of blocks that are unlike calibration: packed as ever, packed losslessly, or not packed."""
ENERGY = 1.5
"""Times the energy of calibration about its mean, or one over that: beyond it texts are of another kind."""
MISSED = 2.0
"""Times what calibration promised that its first components miss."""
KURTOSIS = 9.0
"""Of a coordinate about its own mean, the median of all that vary; a normal one has 3. 0: none varies."""
TURNS = 2


@dataclass(frozen=True, slots=True)
class Reading(Answer):
    """What one window says of one stream: the figures that `ENERGY`, `MISSED` and `KURTOSIS` bound."""

    energy: Annotated[float, Range(0)]
    missed: Annotated[float, Range(0)]
    kurtosis: Annotated[float, Range(0)]

    @property
    def faults(self) -> tuple[str, ...]:
        """What is not as it should be, in words."""
        found = []
        if not 1 / ENERGY <= self.energy <= ENERGY:
            found.append(f"{self.energy:.2g} times the energy of calibration")
        if self.missed > MISSED:
            found.append(f"{self.missed:.2g} times as much outside of the basis")
        if self.kurtosis > KURTOSIS:
            found.append(f"tails of kurtosis {self.kurtosis:.2g}")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Drift(Answer):
    """What sampled blocks say, so far.

    Attributes:
        state: nothing yet, that they are as in calibration, or that they are not any more.
        blocks: that were looked at since the codec was chosen.
        streams: what the last window said of each; empty before the first.
    """

    state: Literal["unknown", "usual", "drifting"] = "unknown"
    blocks: Annotated[int, Range(0)] = 0
    streams: Mapping[str, Reading] = field(default_factory=dict)

    @derived
    def why(self) -> str:
        """What the last window has found, in words; empty where that is nothing."""
        told = (f"{name}: {', '.join(own.faults)}" for name, own in self.streams.items() if own.faults)
        return "; ".join(told)


class Course:
    """The verdict over windows, with hysteresis."""

    def __init__(self) -> None:
        self.drift = Drift()
        self._turns = 0

    def seen(self, blocks: int) -> None:
        """Note how many blocks have been looked at."""
        self.drift = Drift(self.drift.state, blocks, self.drift.streams)

    def take(self, streams: Mapping[str, Reading]) -> None:
        """Take in what a window says."""
        found = any(own.faults for own in streams.values())
        state = self.drift.state
        # The first windows decide nothing but that there were some.
        self._turns = self._turns + 1 if found is not (state == "drifting") else 0
        if self._turns == TURNS:
            self._turns = 0
            state = "drifting" if found else "usual"
        elif state == "unknown" and not found:
            state = "usual"
        self.drift = Drift(state, self.drift.blocks, dict(streams))
