"""Policy files as frozen values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from kvtcd.config.values import Duration, Fraction, Part, Table, like, read, validated
from kvtcd.core.devices import DEVICE, DeviceName
from kvtcd.core.dials import DIALS, CodecName, DialName
from kvtcd.core.drift import OnDrift
from kvtcd.core.errors import ConfigError
from kvtcd.core.policy import (
    LIFT,
    Admit,
    CodecChoice,
    DiskTier,
    Evict,
    EvictName,
    HostTier,
    Match,
    Policy,
    Promote,
    Remote,
    Share,
)


class _MatchTable(Table):
    namespace: str = "*"
    engine: str = "*"
    model: str = "*"
    parallel: str = "*"


_PLANNED = (8, 16, 32, 64)
"""Ratios that profiles have bit plans for."""
_OWN_RATIO = {"kvtc": 16, "kvtc2": 16}
"""What is meant where a policy names no dial."""


class _CodecTable(Table):
    name: CodecName = "kvtc2"
    ratio: Annotated[float | None, Field(gt=1, le=10_000, strict=False, validate_default=True)] = None
    max_kl: Annotated[float | None, Field(gt=0, le=1, strict=False, validate_default=True)] = None
    bits: Annotated[int | None, Field(validate_default=True)] = None
    level: Annotated[int | None, Field(validate_default=True)] = None
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    sinks: Annotated[int, Field(ge=0, le=1024)] = 4
    window: Annotated[int, Field(ge=0, le=4096)] = 128
    device: Annotated[DeviceName, AfterValidator(partial(like, DEVICE.regex, DEVICE.shown))] | None = None

    @field_validator("ratio")
    @classmethod
    def _planned(cls, ratio: float | None, info: ValidationInfo) -> float | None:
        if info.data.get("name") == "kvtc" and ratio not in (*_PLANNED, None):
            raise ValueError(f"kvtc has plans for {', '.join(map(str, _PLANNED))}; kvtc2 takes any ratio")
        return ratio

    @field_validator("ratio", "max_kl", "bits", "level")
    @classmethod
    def _asked(cls, value: float | None, info: ValidationInfo) -> float | None:
        """Compare with what the codec takes, as far as the table has been read."""
        name, field = info.data.get("name"), info.field_name
        if name is None or name == "lossless" or (name in _OWN_RATIO and value is None):
            return value
        asked = {dial: info.data.get(dial) for dial in get_args(DialName)} | {field: value}
        fault = DIALS[name].fault(name, asked)
        if fault and fault[0] == field:
            raise ValueError(fault[1])
        return value

    @field_validator("options")
    @classmethod
    def _known(cls, options: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        name = info.data.get("name")
        if name and (why := DIALS[name].strange(name, options)):
            raise ValueError(why)
        return options

    def choice(self, on_drift: OnDrift) -> CodecChoice:
        """Return what this says."""
        asked = self.model_dump() | {"on_drift": on_drift}
        if self.ratio is None and self.max_kl is None:
            asked["ratio"] = _OWN_RATIO.get(self.name)
        return CodecChoice(**asked)


class _Marks(Table):
    high: Fraction = 0.95
    low: Fraction = 0.85

    @model_validator(mode="after")
    def _ordered(self) -> _Marks:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class _HostTable(_Marks):
    form: Literal["raw", "raw-then-packed"] = "raw-then-packed"
    raw: Annotated[float, Field(ge=0, le=1)] = 0.5

    @field_validator("raw")
    @classmethod
    def _meant(cls, raw: float, info: ValidationInfo) -> float:
        """Refuse what is given and means nothing."""
        if info.data.get("form") == "raw":
            raise ValueError('means nothing to form = "raw", where all stays raw; leave it out')
        return raw


class _DiskTable(_Marks):
    write: Literal["behind", "evict"] = "behind"
    high: Fraction = 0.98
    low: Fraction = 0.92
    ttl: Duration | None = None


class _RemoteTable(Table):
    write: Literal["behind", "none"] = "behind"
    read: bool = True


class _Tiers(Table):
    host: _HostTable = _HostTable()
    disk: _DiskTable = _DiskTable()
    remote: _RemoteTable = _RemoteTable()


class _AdmitTable(Table):
    min_tokens: Annotated[int, Field(ge=0)] = 0
    on_sight: Annotated[int, Field(ge=1, le=15)] = 1


class _EvictTable(Table):
    policy: EvictName = "lfu"
    leaves_first: bool = True
    half_life: Duration | None = None

    @model_validator(mode="after")
    def _meant(self) -> _EvictTable:
        if self.half_life is not None and self.policy != "lfu":
            raise ValueError(f"half_life means nothing to {self.policy}; leave it out")
        return self


class _ShareTable(Table):
    host: Part = 1.0
    disk: Part = 1.0


class _PromoteTable(Table):
    to: Annotated[str, AfterValidator(partial(like, LIFT.regex, LIFT.shown))] = "host"
    on_hit: Annotated[int, Field(ge=1, le=15)] = 1


class _Pressure(Table):
    packer_behind: Literal["drop", "lossless"] = "drop"


class _Quality(Table):
    on_drift: OnDrift = "warn"


class _Stop(Table):
    flush: Literal["none", "host"] = "host"


class _PolicyFile(Table):
    match: _MatchTable = _MatchTable()
    codec: _CodecTable = _CodecTable()
    tiers: _Tiers = _Tiers()
    admit: _AdmitTable = _AdmitTable()
    evict: _EvictTable = _EvictTable()
    share: _ShareTable = _ShareTable()
    promote: _PromoteTable = _PromoteTable()
    pressure: _Pressure = _Pressure()
    quality: _Quality = _Quality()
    stop: _Stop = _Stop()


def load_policies(paths: tuple[Path, ...]) -> tuple[Policy, ...]:
    """Read policy files in order; without any, everything is governed by what balanced.toml says.

    Raises:
        ConfigError: a file is wrong, or the last one does not match every namespace.
    """
    policies = tuple(load_policy(path) for path in paths) or (Policy("balanced"),)
    if not policies[-1].match.everything:
        raise ConfigError(paths[-1], "match", "the last policy must match everything; leave [match] out")
    return policies


def load_policy(path: Path) -> Policy:
    """Read one policy file.

    Raises:
        ConfigError: it cannot be read, or a section or field is unknown, of the wrong type or out of range.
    """
    table = validated(_PolicyFile, read(path), path)
    return Policy(
        name=path.stem,
        match=Match(**table.match.model_dump()),
        codec=table.codec.choice(table.quality.on_drift),
        host=HostTier(**table.tiers.host.model_dump()),
        disk=DiskTier(**table.tiers.disk.model_dump()),
        remote=Remote(**table.tiers.remote.model_dump()),
        admit=Admit(**table.admit.model_dump()),
        evict=Evict(**table.evict.model_dump(exclude_none=True)),
        share=Share(**table.share.model_dump()),
        promote=Promote(**table.promote.model_dump()),
        packer_behind=table.pressure.packer_behind,
        flush=table.stop.flush,
    )
