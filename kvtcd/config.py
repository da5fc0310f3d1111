"""config.toml and policy files as frozen values, or an error with file, field and reason."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvtcd.core.errors import ConfigError
from kvtcd.core.policy import (
    Admit,
    CodecChoice,
    CodecName,
    DiskTier,
    Evict,
    EvictName,
    HostTier,
    Match,
    Policy,
)

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]iB|B?)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+) ?([smhd])")
_MIB = 1 << 20


def _bytes(value: object) -> object:
    """Read a size: a whole number of bytes, or text such as ``"8 GiB"``."""
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if not found:
            raise ValueError(f'{value!r} is not a size; write for instance "8 GiB"')
        return int(float(found[1]) * _UNITS[found[2]])
    return value


def show_bytes(nbytes: int) -> str:
    """Write a size as text that reads back to the same number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]} {unit}"
    return f"{nbytes} B"


def _seconds(value: object) -> object:
    """Read a duration: text such as ``"7d"``."""
    if isinstance(value, str):
        found = _DURATION.fullmatch(value)
        if not found:
            raise ValueError(f'{value!r} is not a duration; write for instance "90s", "5m", "12h" or "7d"')
        return int(found[1]) * _SECONDS[found[2]]
    raise ValueError(f'{value!r} has no unit; write for instance "90s", "5m", "12h" or "7d"')


Size = Annotated[int, BeforeValidator(_bytes), Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Duration = Annotated[int, BeforeValidator(_seconds), Field(ge=1)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Daemon(_Table):
    """Where the daemon lives and how long it takes to stop."""

    state: Annotated[Path, Field(strict=False)] = Path("/var/lib/kvtcd")
    socket: Annotated[Path, Field(strict=False)] = Path("/run/kvtcd/kvtcd.sock")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    stop_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0


class Host(_Table):
    """The host tier: one slab of memory, allocated at start."""

    capacity: Annotated[Size, Field(ge=_MIB)] = 4 << 30


class Disk(_Table):
    """The disk tier; a capacity of 0 switches it off."""

    capacity: Size = 64 << 30


class Codec(_Table):
    """Where profiles lie, and how many threads pack and unpack."""

    profiles: Annotated[Path, Field(strict=False)] = Path("/var/lib/kvtcd/profiles")
    threads: Annotated[int, Field(ge=0, le=256)] = 0
    """Threads of one matrix product; 0: half of the cores."""


class Limits(_Table):
    """Bounds on what clients may do at once."""

    connections: Annotated[int, Field(ge=1)] = 512
    in_flight: Annotated[Size, Field(ge=_MIB)] = 1 << 30
    """Bytes of host memory that requests hold, on their way in or out."""
    tenant_in_flight: Annotated[Size, Field(ge=_MIB)] = 512 << 20


class Config(_Table):
    """The whole of config.toml. Relative paths are taken from the file's folder."""

    daemon: Daemon = Daemon()
    host: Host = Host()
    disk: Disk = Disk()
    codec: Codec = Codec()
    limits: Limits = Limits()
    policies: tuple[Annotated[Path, Field(strict=False)], ...] = Field(default=(), strict=False)


class _MatchTable(_Table):
    namespace: str = "*"
    engine: str = "*"
    model: str = "*"


class _CodecTable(_Table):
    name: CodecName = "kvtc"
    ratio: Literal[8, 16, 32, 64] = 16
    sinks: Annotated[int, Field(ge=0, le=1024)] = 4
    window: Annotated[int, Field(ge=0, le=4096)] = 128


class _Marks(_Table):
    high: Share = 0.95
    low: Share = 0.85

    @model_validator(mode="after")
    def _ordered(self) -> _Marks:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class _DiskTable(_Marks):
    write: Literal["behind", "evict"] = "behind"
    high: Share = 0.98
    low: Share = 0.92
    ttl: Duration | None = None


class _Tiers(_Table):
    host: _Marks = _Marks()
    disk: _DiskTable = _DiskTable()


class _AdmitTable(_Table):
    min_tokens: Annotated[int, Field(ge=0)] = 0
    on_sight: Annotated[int, Field(ge=1, le=15)] = 1


class _EvictTable(_Table):
    policy: EvictName = "lfu"
    leaves_first: bool = True
    half_life: Duration | None = None

    @model_validator(mode="after")
    def _meant(self) -> _EvictTable:
        if self.half_life is not None and self.policy != "lfu":
            raise ValueError(f"half_life means nothing to {self.policy}; leave it out")
        return self


class _Stop(_Table):
    flush: Literal["none", "host"] = "host"


class _PolicyFile(_Table):
    match: _MatchTable = _MatchTable()
    codec: _CodecTable = _CodecTable()
    tiers: _Tiers = _Tiers()
    admit: _AdmitTable = _AdmitTable()
    evict: _EvictTable = _EvictTable()
    stop: _Stop = _Stop()


def load(path: Path | None) -> Config:
    """Read config.toml; None gives the defaults.

    Raises:
        ConfigError: it cannot be read, or a field is unknown, of the wrong type or out of range.
    """
    config: Config = _validated(Config, _read(path) if path else {}, path or "defaults")
    root = path.absolute().parent if path else Path.cwd()

    def absolute(target: Path) -> Path:
        return root / target.expanduser()

    return config.model_copy(
        update={
            "daemon": config.daemon.model_copy(
                update={"state": absolute(config.daemon.state), "socket": absolute(config.daemon.socket)}
            ),
            "codec": config.codec.model_copy(update={"profiles": absolute(config.codec.profiles)}),
            "policies": tuple(absolute(policy) for policy in config.policies),
        }
    )


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
    table = _validated(_PolicyFile, _read(path), path)
    return Policy(
        name=path.stem,
        match=Match(**table.match.model_dump()),
        codec=CodecChoice(**table.codec.model_dump()),
        host=HostTier(**table.tiers.host.model_dump()),
        disk=DiskTier(**table.tiers.disk.model_dump()),
        admit=Admit(**table.admit.model_dump()),
        evict=Evict(**table.evict.model_dump(exclude_none=True)),
        flush=table.stop.flush,
    )


def dump(config: Config) -> str:
    """Write a configuration as TOML that `load` reads back."""
    lines = [f"policies = [{', '.join(_toml(p) for p in config.policies)}]"]
    for section in Config.model_fields:
        table = getattr(config, section)
        if isinstance(table, _Table):
            lines += ["", f"[{section}]"]
            for name, field in type(table).model_fields.items():
                value = getattr(table, name)
                is_size = any(isinstance(m, BeforeValidator) for m in field.metadata)
                lines.append(f"{name} = {_toml(show_bytes(value) if is_size else value)}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, str | Path):
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {os.strerror(error.errno or 0)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(path, "", f"is not TOML: {error}") from None


def _validated(model: type[Any], body: dict[str, Any], path: Path | str) -> Any:  # noqa: ANN401 - of type `model`
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        known = {"extra_forbidden": "is not a known field", "model_type": "is not a table"}
        why = known.get(first["type"], first["msg"])
        raise ConfigError(path, field, why.removeprefix("Value error, ")) from None
