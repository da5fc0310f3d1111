"""The dial of `kvtc2`: what each step costs and saves, as calibration measured it on held-out text.

A policy names a ratio or a divergence; the step is read off the curve, straight lines in logarithms between
measured points. Nothing is extrapolated: where all of the curve keeps a bound, its coarsest point counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise

from kvtcd.core.errors import BadField


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at one step, over coded tokens of held-out windows.

    Attributes:
        step: of the quantiser.
        ratio: of 16-bit values to all bytes stored for them.
        error: half the squared weighted error, a mean over tokens: nats per position, to second order.
        kl: divergence of the continuation, nats per token; `kl_lo` and `kl_hi` bound it at 95 %, and are
            `kl` itself where there was one window alone, which tells no bounds.
        top1: share of equal most likely successors.
    """

    step: float
    ratio: float
    error: float
    kl: float
    kl_lo: float
    kl_hi: float
    top1: float

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The 95 % interval of `kl`; None where one window alone was measured."""
        return (self.kl_lo, self.kl_hi) if self.kl_lo < self.kl_hi else None

    def to_json(self) -> dict[str, int | str]:
        """Return the canonical form: floats as their `repr`."""
        return {name: repr(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Curve:
    """Points by ascending step.

    Attributes:
        points: at least two.
        floor: divergence, in nats per token, of the untouched cache read in another shape: what rounding to
            the model's own type does. No step gets below.
    """

    points: tuple[Point, ...]
    floor: float

    def __post_init__(self) -> None:
        steps = [point.step for point in self.points]
        if len(steps) < 2 or steps != sorted(set(steps)) or not all(map(_positive, self.points)):
            raise BadField("profile", "its rate-quality curve is no ascending run of positive points")

    @property
    def dips(self) -> bool:
        """Whether a coarser step measured less divergence, as happens by chance on too little text."""
        return any(right.kl < left.kl for left, right in pairwise(self.points))

    def step_for(self, *, ratio: float | None = None, max_kl: float | None = None) -> float:
        """Return the step for a ratio, or the largest measured one whose divergence stays below `max_kl`.

        That is the coarsest of all where every measured step keeps the bound.

        Raises:
            ValueError: a ratio beyond what was measured, or a divergence below; the message says how far that
                reaches.
        """
        if (ratio is None) == (max_kl is None):
            raise ValueError("say either a ratio or a divergence")
        if ratio is not None:
            return self._solve(lambda point: point.ratio, ratio, "ratio {:.4g}")
        assert max_kl is not None
        if max_kl > max(point.kl for point in self.points):
            return self.points[-1].step
        return self._solve(lambda point: point.kl, max_kl, "a divergence of {:.3g} nats per token")

    def at(self, step: float) -> Point:
        """Return the point of a step, interpolated; that of the nearest end beyond the curve."""
        points = self.points
        if step <= points[0].step or step >= points[-1].step:
            return points[0] if step <= points[0].step else points[-1]
        right = next(i for i, point in enumerate(points) if point.step >= step)
        share = _share(points[right - 1].step, points[right].step, step)
        values = {
            field.name: math.exp(
                (1 - share) * math.log(getattr(points[right - 1], field.name))
                + share * math.log(getattr(points[right], field.name))
            )
            for field in fields(Point)
        }
        return Point(**values)

    def to_json(self) -> list[dict[str, int | str]]:
        """Return the canonical form: a row per point, the floor first, at step 0."""
        return [{"kl": repr(self.floor), "step": "0"}, *(point.to_json() for point in self.points)]

    @classmethod
    def from_json(cls, rows: Sequence[Mapping[str, int | str]]) -> Curve | None:
        """Build from the form that `to_json` writes; None where nothing was measured.

        Raises:
            BadField: a row is wrong.
        """
        if not rows:
            return None
        try:
            points = tuple(
                Point(**{field.name: float(row[field.name]) for field in fields(Point)}) for row in rows[1:]
            )
            return cls(points, float(rows[0]["kl"]))
        except (KeyError, ValueError, TypeError, OverflowError) as fault:
            raise BadField("profile", f"its rate-quality curve: {fault}") from None

    def _solve(self, of: Callable[[Point], float], target: float, what: str) -> float:
        """Return the first step at which the curve, made ascending, reaches a target."""
        reached = list(_ascending(of(point) for point in self.points))
        if not reached[0] <= target <= reached[-1]:
            raise ValueError(
                f"{what.format(target)} is outside of what was measured, "
                f"{what.format(reached[0])} to {what.format(reached[-1])}"
            )
        right = max(1, next(i for i, value in enumerate(reached) if value >= target))
        left_step, right_step = self.points[right - 1].step, self.points[right].step
        share = _share(reached[right - 1], reached[right], target)
        return math.exp((1 - share) * math.log(left_step) + share * math.log(right_step))


def _ascending(values: Iterable[float]) -> Iterable[float]:
    """Yield the running maximum: noise may make a measured curve dip."""
    most = 0.0
    for value in values:
        most = max(most, value)
        yield most


def _share(left: float, right: float, value: float) -> float:
    return math.log(value / left) / math.log(right / left) if right > left else 1.0


def _positive(point: Point) -> bool:
    return all(math.isfinite(value) and value > 0 for value in asdict(point).values())
