"""The first part of calibration: a model reads texts, and what a profile is fitted to is kept.

Rows of held-out windows (`lab.reading`) give the sample that bits are allocated on. Those of all other
windows go into `Moments` and are forgotten; so do gradients, if sensitivities are wanted
(`lab.sensitivity`, `lab.attention`), into ``4 p D`` bytes per stream, and rows a second time, weighed
(`lab.token_weights`).

Memory does not depend on the number of tokens. For ``p`` features per stream it is ``4 p^2`` bytes of second
moment and ``4 p SAMPLE`` of sample per stream, and the rows of one window: for SmolLM2 (p = 5,760) 0.13 and
0.05 GB; for a 12B model (p = 40,960) 6.7 and 0.34 GB, so 14 GB for both streams beside the model, on the
device of the model. Fitting takes streams one after another and needs one more such matrix and a few of
``[p, r]`` (1.6 GB each at r = 10,000): with the model's 24 GB some 50 of the 80 GB of an accelerator. Texts
are held as token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtcd.codec.basis import Moments
from kvtcd.codec.rope import Rotation
from kvtcd.codec.transform import rows as rows_of
from kvtcd.codec.transform import views
from kvtcd.codec.weighted import EXPONENT
from kvtcd.core.identity import Identity
from kvtcd.integrations.transformers_blocks import raw_block
from kvtcd.lab.capture import prefill
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.parts import Part
from kvtcd.lab.phases import Phases
from kvtcd.lab.reading import SINKS, Reading
from kvtcd.lab.sensitivity import PART, Differentiate, Sensitivity
from kvtcd.lab.token_weights import Pilot, Regression

_REACH = 4.0
"""Bound on the logarithm of a token's weight."""
_STRIDE = 1_000_003
"""Seeds of the labels of one calibration are this far from those of the next."""


@dataclass(slots=True)
class Gathered:
    """What the windows read so far come to.

    Attributes:
        read: number of windows.
        moments: by stream.
        samples: by stream, float32 ``[n, p]``.
        weighed: by stream, of rows that count by their predicted sensitivity.
        sensitivities: by stream, of the fitted windows; empty where none are wanted.
        pilot: by stream, of the held-out windows.
        tokens: which tokens are minded most.
        seconds: spent so far, by phase.
    """

    read: int = 0
    moments: dict[str, Moments] = field(default_factory=dict)
    samples: dict[str, Tensor] = field(default_factory=dict)
    weighed: dict[str, Moments] = field(default_factory=dict)
    sensitivities: dict[str, Sensitivity] = field(default_factory=dict)
    pilot: dict[str, Sensitivity] = field(default_factory=dict)
    tokens: Regression | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    _pilot: Pilot | None = None

    def pilot_basis(self) -> Pilot:
        """Return the basis of the predictor of `tokens`, once all held-out windows have been read."""
        if self._pilot is None:
            moments = {name: sensitivity.moment for name, sensitivity in self.pilot.items()}
            self._pilot = Pilot.of(self.samples, moments)
        return self._pilot


@dataclass(slots=True)
class Taker:
    """Who takes in what a model reads: one rank.

    Attributes:
        part: of the model's cache.
        gathered: so far; changed in place.
        keep: called after each window.
    """

    part: Part
    gathered: Gathered
    keep: Callable[[Gathered], None]


def gather(
    loaded: LoadedModel,
    identity: Identity,
    reading: Reading,
    takers: Sequence[Taker],
    *,
    phases: Phases,
    differentiate: Differentiate | None = None,
) -> None:
    """Run the model over the windows that somebody has not taken in yet.

    The result is the same, bit for bit, however often it was interrupted.

    Args:
        loaded: the model.
        identity: of its caches: layout, and the RoPE to undo.
        reading: the windows.
        takers: whoever takes in rows.
        phases: gets the time of model and moments.
        differentiate: gather sensitivities too, of these gradients.

    Raises:
        UnsupportedCache: a layer of the model does not keep its whole past.
        UnsupportedModel: gradients cannot be had in the way that was asked for.
    """
    total = len(reading.windows)
    with phases.bar(f"{identity.model} reads {total} windows", total) as advance:
        while (number := min(taker.gathered.read for taker in takers)) < total:
            advance(number)
            seen = _read(loaded, identity, reading, number, phases=phases, differentiate=differentiate)
            # Killed between two of them, one has taken in a window that another has not.
            for taker in takers:
                if taker.gathered.read == number:
                    with phases.timed("moments"):
                        _take_in(taker, seen, reading, identity)
                    taker.gathered.read += 1
                    taker.gathered.seconds = dict(phases.seconds)
                    taker.keep(taker.gathered)
        advance(total)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A window that was read.

    Attributes:
        raw: its cache but for the sinks, a raw block.
        tokens: of that.
        gradients: by stream, ``[L, T, H, D]``, of the first of these tokens; empty where none are wanted.
        positions: whose likelihood was differentiated.
    """

    raw: Tensor
    tokens: int
    gradients: Mapping[str, Tensor]
    positions: int


def _read(
    loaded: LoadedModel,
    identity: Identity,
    reading: Reading,
    number: int,
    *,
    phases: Phases,
    differentiate: Differentiate | None,
) -> _Seen:
    """Read a window; for gradients its end behind its beginning."""
    window = reading.windows[number]
    found: dict[str, Tensor] = {}
    continued = len(window) // PART if differentiate else 0
    with phases.timed("model"):
        cache = prefill(loaded, window[: len(window) - continued])
    if differentiate:
        draw = torch.Generator().manual_seed((reading.seed * _STRIDE + number) % 2**63)
        with phases.timed("gradients"):
            cache, every = differentiate(loaded.model, cache, window[-continued:], identity, draw)
        used = slice(SINKS, len(window) - 2 * continued)
        found = {name: gradient[:, used] for name, gradient in every.items()}
    raw = raw_block(cache, SINKS, len(window), identity.layout)
    return _Seen(raw, len(window) - SINKS, found, continued)


def _take_in(taker: Taker, seen: _Seen, reading: Reading, identity: Identity) -> None:
    gathered = taker.gathered
    held_out = gathered.read < reading.held_out
    rows = dict(_rows(seen, identity, taker.part))
    gradients = {name: taker.part.of(name, every) for name, every in seen.gradients.items()}
    if gradients and held_out:
        _add_gradients(gathered.pilot, gradients, seen.positions, {})
    elif gradients:
        used = next(iter(gradients.values())).shape[1]
        _weigh(gathered, {name: batch[:used] for name, batch in rows.items()}, gradients, seen.positions)
    for name, batch in rows.items():
        if held_out:
            chosen = batch[reading.chosen[gathered.read].to(batch.device)]
            before = gathered.samples.get(name)
            gathered.samples[name] = chosen if before is None else torch.cat((before, chosen))
        elif name in gathered.moments:
            gathered.moments[name].add(batch)
        else:
            gathered.moments[name] = Moments.from_rows(batch)


def _weigh(
    gathered: Gathered, rows: Mapping[str, Tensor], found: Mapping[str, Tensor], positions: int
) -> None:
    """Take in rows and gradients of tokens, weighed by what the windows before say of them."""
    pilot = gathered.pilot_basis()
    features = pilot.features(rows)
    seen = Regression.of(features, pilot.sensitivities(found))
    weights = dict.fromkeys(rows, torch.ones(len(features), device=features.device))
    if gathered.tokens:
        offsets = gathered.tokens.offsets(features) * EXPONENT
        weights = dict(zip(rows, offsets.clamp(-_REACH, _REACH).exp().t(), strict=True))
        gathered.tokens.add(seen)
    else:
        gathered.tokens = seen
    _add_gradients(gathered.sensitivities, found, positions, weights)
    for name, batch in rows.items():
        if name in gathered.weighed:
            gathered.weighed[name].add(batch, weights[name])
        else:
            gathered.weighed[name] = Moments.from_rows(batch, weights[name])


def _add_gradients(
    to: dict[str, Sensitivity], found: Mapping[str, Tensor], positions: int, weights: Mapping[str, Tensor]
) -> None:
    for name, gradient in found.items():
        layers, _, heads, dim = gradient.shape
        if name not in to:
            to[name] = Sensitivity.empty(layers, heads, dim, gradient.device)
        to[name].add(gradient, positions, 1 / weights[name] if weights else None)


def _rows(seen: _Seen, identity: Identity, part: Part) -> Iterator[tuple[str, Tensor]]:
    """Yield the rows of each stream of a part, float32 ``[T, p]``, RoPE undone."""
    layout, rope = identity.layout, identity.rope
    for stream, view in zip(layout.streams, views(seen.raw, layout, seen.tokens), strict=True):
        rotation = (
            Rotation(rope, SINKS, seen.tokens, inverse=True, device=seen.raw.device)
            if rope and stream.rope
            else None
        )
        yield stream.name, rows_of(part.of(stream.name, view), rotation)
