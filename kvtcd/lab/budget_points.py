"""What calibration tokens buy: divergence at fixed bytes by budget, and how many directions profiles found.

A codec at one stand of its dial takes other bytes with another profile. So each profile is measured at two
stands next to each other, and its divergence is read off between them, at the ratio that the profile of the
largest budget has on the same documents. Everything is paired over documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtcd.codec.ports import Reason
from kvtcd.codec.profile import Profile
from kvtcd.codec.widths import Widths
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.evaluate import Measured, reasons_of
from kvtcd.lab.statistics import Figure, Floats, Indices, at_kl, interval


@dataclass(frozen=True, slots=True)
class Dimension:
    """How many directions a profile has found in one stream.

    Attributes:
        coded: components that a codec codes at its dial.
        participation: participation ratio of the variances along all components, ``(sum v)^2 / sum v^2``.
    """

    coded: int
    participation: float


@dataclass(frozen=True, slots=True)
class Pair:
    """One budget and codec: the two stands of its dial, by ascending ratio, on every document.

    Attributes:
        kl: divergence, ``[documents, 2]``.
        raw: bits of the coded tokens, ``[documents]``.
        stored: bits stored for them, ``[documents, 2]``.
        reasons: how many blocks were stored losslessly for which reason.
    """

    kl: Floats
    raw: Floats
    stored: Floats
    reasons: Mapping[Reason, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stands: Sequence[Sequence[Measured]]) -> Pair:
        """Take what was measured at two stands, on the same documents."""
        kl = np.array([[one.quality.kl for one in row] for row in stands]).T
        stored = np.array([[one.size.coded for one in row] for row in stands]).T
        order = np.argsort(-stored.sum(axis=0))
        raw = np.array([one.size.coded_raw for one in stands[0]])
        return cls(kl[:, order], raw, stored[:, order], reasons_of(one for row in stands for one in row))

    def ratios(self, documents: Indices) -> Floats:
        """Ratio of each stand over documents ``[..., n]``, ``[..., 2]``."""
        found: Floats = self.raw[documents].sum(axis=-1)[..., None] / self.stored[documents].sum(axis=-2)
        return found

    def kl_at(self, ratio: float) -> Figure:
        """Divergence at a ratio: log divergence is linear in log ratio through the two stands."""

        def figure(documents: Indices) -> Floats:
            target = np.full(documents.shape[:-1], ratio)
            return at_kl(self.ratios(documents), self.kl[documents].mean(axis=-2), target)

        return figure


@dataclass(frozen=True, slots=True)
class Row:
    """A codec with the profile of one budget; keys of `--json`.

    Attributes:
        tokens: of the calibration.
        codec, dial: as on the command line.
        ratio: at which divergence is compared: that of the largest budget, over coded tokens.
        kl, kl_lo, kl_hi: divergence at that ratio, and its 95 % interval.
        times, times_lo, times_hi: the same as a multiple of that of the largest budget.
        dimension: by stream.
        reasons: how many blocks were stored losslessly for which reason, at either stand of the dial.
    """

    tokens: int
    codec: str
    dial: float
    ratio: float
    kl: float
    kl_lo: float
    kl_hi: float
    times: float
    times_lo: float
    times_hi: float
    dimension: Mapping[str, Dimension]
    reasons: Mapping[Reason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Advice:
    """The smallest budget whose divergence is not above the interval of the largest; None without one."""

    codec: str
    dial: float
    tokens: int | None


def rows(
    pairs: Mapping[tuple[int, Spec], Pair],
    dimensions: Mapping[tuple[int, Spec], Mapping[str, Dimension]],
    groups: Sequence[int],
) -> list[Row]:
    """Compare budgets, codec by codec.

    Args:
        pairs: by budget and codec.
        dimensions: the same.
        groups: by document, which file it is of.
    """
    found = []
    everything = np.arange(len(groups))
    for spec in dict.fromkeys(spec for _, spec in pairs):
        own = {tokens: pair for (tokens, other), pair in sorted(pairs.items(), key=_budget) if other == spec}
        largest = own[max(own)]
        ratio = float(largest.ratios(everything)[0])
        yard = largest.kl_at(ratio)
        for tokens, pair in own.items():
            figure = pair.kl_at(ratio)
            kl, times = (interval(one, groups, positive=True) for one in (figure, _quotient(figure, yard)))
            found.append(
                Row(
                    tokens=tokens,
                    codec=spec.codec,
                    dial=spec.dial or 0.0,
                    ratio=ratio,
                    kl=kl.value,
                    kl_lo=kl.lo,
                    kl_hi=kl.hi,
                    times=times.value,
                    times_lo=times.lo,
                    times_hi=times.hi,
                    dimension=dimensions[tokens, spec],
                    reasons=pair.reasons,
                )
            )
    return found


def advise(found: Sequence[Row]) -> list[Advice]:
    """Say for each codec how many tokens do; see `Advice`."""
    given = []
    for name, dial in dict.fromkeys((row.codec, row.dial) for row in found):
        own = sorted(
            (row for row in found if (row.codec, row.dial) == (name, dial)), key=lambda row: row.tokens
        )
        enough = next(row for row in own if row.kl <= own[-1].kl_hi or row is own[-1])
        given.append(Advice(name, dial, None if np.isnan(own[-1].kl_hi) else enough.tokens))
    return given


def dimensions(profile: Profile, spec: Spec) -> dict[str, Dimension]:
    """Count what a codec codes at its ratio with a profile, and the directions that the profile found."""
    curve = profile.curve
    found = {}
    for name, stream in profile.streams.items():
        if spec.name == "kvtc":
            coded = stream.plans[int(spec.dial or 0)].rank
        else:
            assert curve is not None, "the codec was opened"
            widths = Widths.of(profile.weighted[name].spread, curve.step_for(ratio=spec.dial))
            coded = sum(len(components) for components in widths.rows.values())
        # Of what the file leaves out, squares are nothing beside those of the leading components.
        found[name] = Dimension(coded, stream.total**2 / float(stream.spectrum.square().sum()))
    return found


def _budget(item: tuple[tuple[int, Spec], Pair]) -> int:
    return item[0][0]


def _quotient(figure: Figure, yard: Figure) -> Figure:
    def quotient(documents: Indices) -> Floats:
        found: Floats = figure(documents) / yard(documents)
        return found

    return quotient
