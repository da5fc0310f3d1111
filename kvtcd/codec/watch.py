"""Looks at some of the blocks that are packed with a profile: are they still like those of calibration?

The checks are those of `kvtcd validate`, on live blocks: energy about the mean of calibration, what its first
components miss of it, and tails of each coordinate about its own mean. One block in `EVERY` is looked at, and
of that `ROWS` rows, so that all of it takes at most a few hundredths of the products of packing; what is kept
are sums, four numbers for each feature. After `BLOCKS` blocks the window is judged (`core.drift`).
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from kvtcd.codec.lossless import Lossless, check_raw
from kvtcd.codec.ports import Encoded, Encoder, Reason, Symbols
from kvtcd.codec.profile import Profile, StreamProfile
from kvtcd.codec.rope import Rotation
from kvtcd.codec.sections import Scratch
from kvtcd.codec.stages import stage
from kvtcd.codec.transform import rows, views
from kvtcd.core.drift import Course, Drift, OnDrift, Reading
from kvtcd.core.errors import Drifted
from kvtcd.core.identity import Rope
from kvtcd.core.layout import Layout

EVERY, ROWS, BLOCKS = 8, 64, 8
_HELD = 0.9
"""Share of the calibrated energy in the components beyond which what is missed is looked at."""
_TINY = 1e-30
_STILL = 1e-7
"""Variance over the second moment below which float64 sums do not tell the fourth moment any more."""
_MOST = 1e30


def first_components(spectrum: Tensor, total: float) -> int:
    """Return how many components hold nine tenths of the energy, or all where they do not."""
    missed = 1 - spectrum.cumsum(dim=0) / total
    return min(int((missed > 1 - _HELD).sum()) + 1, len(spectrum))


class Sums(NamedTuple):
    """What rows sum up to: their number, energy in the first components, and powers by feature ``[4, p]``."""

    rows: int
    kept: Tensor
    powers: Tensor


class Window:
    """Sums over rows of one stream.

    Args:
        profile: of the stream.
        device: where rows lie.
    """

    def __init__(self, profile: StreamProfile, device: torch.device) -> None:
        rank = first_components(profile.spectrum, profile.total)
        self._basis = profile.basis[:rank].to(device, torch.float32)
        self._mean = profile.mean.to(device)
        self._total = profile.total
        self._promised = max(1 - float(profile.spectrum[:rank].sum()) / profile.total, _TINY)
        self.clear()

    @property
    def nbytes(self) -> int:
        """Return the bytes that it has on the device."""
        return sum(tensor.nbytes for tensor in (self._basis, self._mean, self._powers, self._kept))

    def clear(self) -> None:
        """Begin anew."""
        self._count = 0
        self._powers = torch.zeros((4, len(self._mean)), dtype=torch.float64, device=self._mean.device)
        self._kept = torch.zeros((), dtype=torch.float64, device=self._mean.device)

    def sums(self, found: Tensor) -> Sums:
        """Sum up rows ``[n, p]``, float32, RoPE undone; what is not finite is left out."""
        x = found - self._mean
        x = x[torch.isfinite(x).all(dim=1)]
        kept = (x @ self._basis.t()).square().sum()
        powers = torch.empty_like(self._powers)
        power = x = x.to(torch.float64)
        for exponent in range(len(powers)):
            powers[exponent] = power.sum(dim=0)
            power = power * x
        return Sums(len(x), kept, powers)

    def add(self, sums: Sums) -> None:
        """Take in what rows sum up to."""
        self._count += sums.rows
        self._kept += sums.kept
        self._powers += sums.powers

    def reading(self) -> Reading | None:
        """Return what the rows say; None where there were none."""
        if not self._count:
            return None
        mean, second, third, fourth = self._powers / self._count
        energy = float(second.sum())
        variance = second - mean**2
        central = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
        varies = (variance > _STILL * second) & (variance > _TINY)
        kurtosis = central[varies] / variance[varies] ** 2
        missed = 1 - float(self._kept) / self._count / max(energy, _TINY)
        return Reading(
            energy=min(energy / max(self._total, _TINY), _MOST),
            missed=max(missed, 0.0) / self._promised,
            kurtosis=min(float(kurtosis.median()), _MOST) if len(kurtosis) else 0.0,
        )


class Watched(Encoder):
    """An encoder whose blocks are looked at, and what a policy wants done where they are not as usual.

    Args:
        encoder: that packs them.
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        profile: that it packs them with.
        sinks: first positions of a sequence that calibration has left out.
        on_drift: what becomes of blocks while they are unlike calibration.
        device: where raw blocks lie.
    """

    def __init__(
        self, encoder: Encoder, layout: Layout, rope: Rope | None, profile: Profile,
        *, sinks: int, on_drift: OnDrift, device: torch.device,
    ) -> None:  # fmt: skip
        self._encoder, self._layout, self._rope = encoder, layout, rope
        self._sinks, self._on_drift, self._device = sinks, on_drift, device
        self._lossless = Lossless(layout)
        self._windows = [Window(profile.streams[stream.name], device) for stream in layout.streams]
        nbytes = sum(window.nbytes for window in self._windows)
        profile.residency.take(device, nbytes)
        weakref.finalize(self, profile.residency.give_back, device, nbytes)
        self._course = Course()
        self._blocks = self._looked = 0

    @property
    def drift(self) -> Drift:
        """What blocks have said so far; may be read on any thread."""
        return self._course.drift

    def analyze(
        self, raw: Tensor, *, tokens: int, first_token: int | None, after: int, scratch: Scratch
    ) -> Symbols:
        """Look at a block, if it is its turn, and turn it into symbols; see `Encoder`.

        Raises:
            Drifted: blocks are unlike calibration, and such are not to be packed.
        """
        check_raw(raw, self._layout, tokens)
        if first_token is not None:
            start = max(0, self._sinks - first_token)
            if start < tokens:
                if self._blocks % EVERY == 0:
                    with stage("watch"):
                        self._look(raw, tokens, start, first_token)
                self._blocks += 1
        if self.drift.state == "drifting":
            if self._on_drift == "refuse":
                raise Drifted(self.drift.why)
            if self._on_drift == "lossless":
                return self._lossless.instead(
                    Reason.DRIFT, raw, tokens=tokens, first_token=first_token, after=after, scratch=scratch
                )
        return self._encoder.analyze(
            raw, tokens=tokens, first_token=first_token, after=after, scratch=scratch
        )

    def deflate(self, symbols: Symbols) -> Encoded:
        """Write a blob; see `Encoder`."""
        return self._encoder.deflate(symbols)

    def _look(self, raw: Tensor, tokens: int, start: int, first_token: int) -> None:
        every = -(-(tokens - start) // ROWS)
        found = views(raw, self._layout, tokens)
        undo = None
        if self._rope:
            undo = Rotation(
                self._rope, first_token + start, -(-(tokens - start) // every),
                inverse=True, every=every, device=self._device,
            )  # fmt: skip
        sums = [
            window.sums(rows(view[:, start::every], undo if stream.rope else None))
            for stream, window, view in zip(self._layout.streams, self._windows, found, strict=True)
        ]
        # Once all are there: where a device has no memory for one, the block is looked at once more.
        for window, each in zip(self._windows, sums, strict=True):
            window.add(each)
        self._looked += 1
        self._course.seen(self._looked)
        if self._looked % BLOCKS == 0:
            self._judge()

    def _judge(self) -> None:
        names = [stream.name for stream in self._layout.streams]
        found = {name: window.reading() for name, window in zip(names, self._windows, strict=True)}
        for window in self._windows:
            window.clear()
        readings = {name: own for name, own in found.items() if own}
        if readings:
            self._course.take(readings)
