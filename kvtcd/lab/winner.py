"""Which codec wins at a ratio: the smallest blobs among those that are not told apart from the best.

Those that no other codec is shown to have less divergence than are not told apart: the truly best is among
them in 95 of 100 cases, whichever it is and whichever looks best. Of them the one that stores least wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from kvtcd.codec.choices import Candidate, Choice
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.evaluate import Size
from kvtcd.lab.simultaneous import ALPHA, above
from kvtcd.lab.statistics import Floats, interval, logs, mean


@dataclass(frozen=True, slots=True)
class Sample:
    """One document through one codec; `errors` are weighted ones of a coded token, by stream, nats."""

    size: Size
    kl: float
    errors: Mapping[str, float]


Samples = Mapping[Spec, Sequence[Sample]]
"""By codec, one for each document, in the same order for all."""


def choose(ratio: float, samples: Samples, groups: Sequence[int]) -> Choice:
    """Choose, and compare the others with what was chosen.

    Args:
        ratio: that all of them have.
        samples: of the codecs.
        groups: by document, which file it is of.
    """
    kls = {spec: logs([one.kl for one in own]) for spec, own in samples.items()}
    sizes = {spec: reduce(add, (one.size for one in own)) for spec, own in samples.items()}
    chosen = max(tied(kls, groups), key=lambda spec: sizes[spec].ratio)
    others = sorted((spec for spec in samples if spec != chosen), key=lambda spec: float(kls[spec].mean()))
    found = []
    for spec in (chosen, *others):
        own = samples[spec]
        kl = interval(mean([one.kl for one in own]), groups, positive=True)
        times = interval(mean(kls[spec] - kls[chosen]), groups)
        lo, hi = (bound if np.isfinite(bound) else kl.value for bound in (kl.lo, kl.hi))
        found.append(
            Candidate(
                spec.choice(), sizes[spec].ratio, kl.value, max(lo, 0.0), hi,
                float(np.exp(times.value)), float(np.exp(times.lo)), float(np.exp(times.hi)),
                {name: float(np.mean([one.errors[name] for one in own])) for name in own[0].errors},
            )
        )  # fmt: skip
    return Choice(ratio, len(groups), tuple(found))


def tied(kls: Mapping[Spec, Floats], groups: Sequence[int]) -> list[Spec]:
    """Return codecs that no other is shown to have less divergence than.

    Each is held against all others at once, so that the truly best is left out in 5 % of cases at most
    (subset selection: Gupta 1965), whichever looks best.

    Args:
        kls: by codec, the logarithm of the divergence of each document.
        groups: by document, which file it is of.
    """
    found = []
    for spec, own in kls.items():
        others = [own - kl for other, kl in kls.items() if other != spec]
        if not others or above(np.stack(others, axis=1), groups).min() >= ALPHA:
            found.append(spec)
    return found
