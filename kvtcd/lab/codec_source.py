"""Codecs that a command line named, opened as a daemon opens them, with the profile that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvtcd.codec.choose import NamespaceCodec, codec_for
from kvtcd.codec.profile import Profile, load
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.core.dials import DIALS
from kvtcd.core.errors import ConfigError, UnknownProfile
from kvtcd.core.identity import Identity
from kvtcd.lab.calibrate import profile_for
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.phases import Phases

_OPTION = "--codec"
_BITS = (2, 3, 4)
"""Where a codec that takes bits is put, or as many as it takes."""
_STEPS = tuple(2 ** (half / 2) for half in range(-1, 7))
"""What a sweep multiplies a ratio with: half octaves from 0.7 to 8."""


class ProfileSource(ProfileFolder):
    """A folder in which one profile counts, or none.

    Args:
        path: its file; None where no codec needs one.
        identity: of the model.

    Raises:
        ConfigError: the file cannot be read.
        Corrupt: it is no profile.
        ProfileMismatch: it is of another model.
    """

    def __init__(self, path: Path | None, identity: Identity) -> None:
        super().__init__(path.parent if path else Path())
        try:
            self._profile = load(path) if path else None
        except OSError as error:
            raise ConfigError(str(path), "", f"cannot be read: {error.strerror}") from error
        if self._profile:
            self._profile.check(identity)

    @property
    def digest(self) -> str | None:
        """Of the profile, 64 hex digits."""
        return self._profile.digest.hex() if self._profile else None

    @property
    def ratios(self) -> tuple[int, ...]:
        """Ratios that the profile has bit plans for."""
        return self._profile.ratios if self._profile else ()

    def find(self, identity: Identity) -> Profile | None:  # noqa: ARG002 - compared when this was made
        """Return the profile."""
        return self._profile

    def get(self, digest: bytes) -> Profile:
        """Return the profile, if it has this digest."""
        if self._profile is None or digest != self._profile.digest:
            raise UnknownProfile(digest)
        return self._profile


def profile_source(
    loaded: LoadedModel, identity: Identity, specs: Sequence[Spec], path: Path | None, phases: Phases
) -> ProfileSource:
    """Return the profile that codecs need, if any: the user's, or the one of the built-in recipe.

    Raises:
        ConfigError, Corrupt, ProfileMismatch: see `ProfileSource`.
    """
    needed = path or any(DIALS[spec.name].calibrated for spec in specs)
    return ProfileSource((path or profile_for(loaded, phases)) if needed else None, identity)


def open_codecs(
    identity: Identity, specs: Sequence[Spec], source: ProfileSource
) -> dict[Spec, NamespaceCodec]:
    """Return what daemons with these codecs in their policies pack with, by codec and dial.

    A codec without a dial is put at several: `kvtc` at every ratio that the profile has bit plans for, those
        that take bits at 2, 3 and 4, those that take a level at all of them, and any other in steps of half
        an octave around the ratios of all, as far as the profile goes.

    Raises:
        ConfigError: a daemon would store losslessly instead, or there is nothing to sweep around.
    """
    found: dict[Spec, NamespaceCodec] = {}
    for spec in specs:
        refused = []
        for stand in _stands(spec, specs, source.ratios):
            codec = codec_for(identity, stand.choice(), source)
            if codec.reason:
                refused.append(f"{stand} cannot be had: {codec.reason}")
            else:
                found[stand] = codec
        if refused and not (spec.swept and any(stand.codec == spec.codec for stand in found)):
            raise ConfigError(_OPTION, "", refused[0])
    return found


def _stands(spec: Spec, specs: Sequence[Spec], planned: Sequence[int]) -> list[Spec]:
    """Where the dial of a codec is put."""
    if not spec.swept:
        return [spec]
    dial = DIALS[spec.name]
    if spec.name == "kvtc":
        dials: Sequence[float] = planned
    elif dial.highest:
        dials = [bits for bits in _BITS if dial.lowest <= bits <= dial.highest]
        dials = dials if "bits" in dial.names else range(dial.lowest, dial.highest + 1)
    else:
        around = [
            other.dial
            for other in specs
            if other.dial is not None and other.dial >= 1 and "ratio" in DIALS[other.name].names
        ]
        if not around:
            raise ConfigError(
                _OPTION, "", f"{spec} is swept around the ratios of others, for instance {_OPTION} kvtc:16"
            )
        dials = sorted({round(d * step) for d in around for step in _STEPS})
    return [replace(spec, dial=dial) for dial in dials]
