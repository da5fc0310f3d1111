"""Codecs as a command line names them: ``NAME`` or ``NAME:dial``.

A dial of 1 or more is a ratio; below, it is the most divergence there may be, in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from kvtcd.codec.choose import NamespaceCodec, codec_for
from kvtcd.codec.profile import Profile, load
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.core.errors import ConfigError, UnknownProfile
from kvtcd.core.identity import Identity
from kvtcd.core.policy import CodecChoice, CodecName
from kvtcd.lab.calibrate import profile_for
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.phases import Phases

_OPTION = "--codec"
_WITHOUT_DIAL = "lossless"
_STEPS = tuple(2 ** (half / 2) for half in range(-1, 7))
"""What a sweep multiplies a ratio with: half octaves from 0.7 to 8."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A codec, and where its dial stands.

    Attributes:
        name: of the codec.
        dial: a ratio or a divergence; None: it has no dial, or the dial is to be swept.
    """

    name: CodecName
    dial: float | None = None

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Read ``kvtc:16``, ``kvtc2:0.02``, ``kvtc`` or ``lossless``.

        Raises:
            ConfigError: no such codec, or a dial that it does not have.
        """
        name, colon, dial = text.partition(":")
        if name not in get_args(CodecName):
            raise ConfigError(_OPTION, "", f"{name!r} is not one of {', '.join(get_args(CodecName))}")
        if colon and name == _WITHOUT_DIAL:
            raise ConfigError(_OPTION, "", f"{text!r}: {name} has no dial")
        spec = cls(cast("CodecName", name), _number(text, dial) if colon else None)
        try:
            spec.choice(sinks=0, window=0)
        except ValueError as error:
            raise ConfigError(_OPTION, "", f"{text!r}: {error}") from error
        return spec

    def __str__(self) -> str:
        return self.name if self.dial is None else f"{self.name}:{self.dial:g}"

    @property
    def swept(self) -> bool:
        """Whether the dial is left to be swept."""
        return self.dial is None and self.name != _WITHOUT_DIAL

    def choice(self, *, sinks: int = 4, window: int = 128) -> CodecChoice:
        """Return what a policy with this codec says."""
        if self.dial is None:
            return CodecChoice(self.name, sinks=sinks, window=window)
        if self.dial < 1:
            return CodecChoice(self.name, ratio=None, max_kl=self.dial, sinks=sinks, window=window)
        return CodecChoice(self.name, ratio=self.dial, sinks=sinks, window=window)


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
    needed = path or any(spec.name != _WITHOUT_DIAL for spec in specs)
    return ProfileSource((path or profile_for(loaded, phases)) if needed else None, identity)


def open_codecs(
    identity: Identity, specs: Sequence[Spec], source: ProfileSource, *, sinks: int, window: int
) -> dict[Spec, NamespaceCodec]:
    """Return what daemons with these codecs in their policies pack with, by codec and dial.

    A codec without a dial is put at several: `kvtc` at every ratio that the profile has bit plans for, any
    other in steps of half an octave around the ratios of all, as far as the profile goes.

    Raises:
        ConfigError: a daemon would store losslessly instead, or there is nothing to sweep around.
    """
    found: dict[Spec, NamespaceCodec] = {}
    for spec in specs:
        refused = []
        for stand in _stands(spec, specs, source.ratios):
            codec = codec_for(identity, stand.choice(sinks=sinks, window=window), source)
            if codec.reason:
                refused.append(f"{stand} cannot be had: {codec.reason}")
            else:
                found[stand] = codec
        if refused and not (spec.swept and any(stand.name == spec.name for stand in found)):
            raise ConfigError(_OPTION, "", refused[0])
    return found


def _stands(spec: Spec, specs: Sequence[Spec], planned: Sequence[int]) -> list[Spec]:
    """Where the dial of a codec is put."""
    if not spec.swept:
        return [spec]
    if spec.name == "kvtc":
        return [Spec(spec.name, ratio) for ratio in planned]
    around = [other.dial for other in specs if other.dial is not None and other.dial >= 1]
    if not around:
        raise ConfigError(
            _OPTION, "", f"{spec} is swept around the ratios of others, for instance {_OPTION} kvtc:16"
        )
    return [Spec(spec.name, dial) for dial in sorted({round(d * step) for d in around for step in _STEPS})]


def _number(text: str, dial: str) -> float:
    try:
        number = float(dial)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(_OPTION, "", f"{text!r}: the dial is a ratio of at least 1, or a divergence below")
    return number
