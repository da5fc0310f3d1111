"""Sizes, durations and shares in TOML, and errors that name file, field and reason."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvtcd.config.faults import reason
from kvtcd.core.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([KMGT]iB|B?)")
_MOST = 64 << 40
_LONGEST = 100 * 365 * 86400
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]{1,12}) ?([smhd])")
_MOST_TEXT = 4 << 20
"""Bytes of a file that people write; one that is larger is something else."""


def _bytes(value: object) -> int:
    """Read a size: a whole number of bytes, or text such as ``"8 GiB"``."""
    if isinstance(value, str) and (found := _SIZE.fullmatch(value)):
        return int(float(found[1]) * _UNITS[found[2]])
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    units = ", ".join(filter(None, _UNITS))
    raise ValueError(f'{value!r} is not a size; write for instance "8 GiB" (units are {units})')


def _addressable(value: int) -> int:
    """Refuse what no process can map; the disk tier maps twice its capacity."""
    if value > _MOST:
        shown = show_bytes(value) if value < _MOST << 32 else "this"
        raise ValueError(f"{shown} is more than a process can address; at most {show_bytes(_MOST)}")
    return value


def at_least(nbytes: int) -> AfterValidator:
    """Return what refuses a smaller size."""

    def check(value: int) -> int:
        if value < nbytes:
            raise ValueError(f"{show_bytes(value)} is too little; at least {show_bytes(nbytes)}")
        return value

    return AfterValidator(check)


def like(pattern: str, example: str, text: str) -> str:
    """Refuse text that does not match."""
    if not re.fullmatch(pattern, text):
        raise ValueError(f"{text!r} is not {example}")
    return text


def show_bytes(nbytes: int) -> str:
    """Write a size as text that reads back to the same number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]} {unit}"
    return f"{nbytes} B"


def seconds(value: object) -> int:
    """Read a duration: text such as ``"7d"``.

    Raises:
        ValueError: it is none.
    """
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if not found:
        missing = "is not a duration" if isinstance(value, str) else "has no unit"
        raise ValueError(f'{value!r} {missing}; write for instance "90s", "5m", "12h" or "7d"')
    length = int(found[1]) * _SECONDS[found[2]]
    if not 1 <= length <= _LONGEST:
        raise ValueError(f"{value!r} is out of range; at least 1s, at most {_LONGEST // 86400}d")
    return length


_NO_PART = '{!r} is neither a share above 0 and up to 1, nor a size; write 0.5 or "200 GiB"'


def _amount(value: object) -> object:
    """Read what somebody may have of a tier: a share such as ``0.5``, or a size such as ``"200 GiB"``."""
    if isinstance(value, str):
        if not _SIZE.fullmatch(value):
            raise ValueError(_NO_PART.format(value))
        nbytes = size(value)
        if not nbytes:
            raise ValueError(
                f"{value!r} is nothing, and nothing could be stored; leave it out for all of the tier"
            )
        return nbytes
    if isinstance(value, float) and 0 < value <= 1:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value == 1:
        return 1.0
    raise ValueError(_NO_PART.format(value))


def size(value: object) -> int:
    """Read a size that a process can address.

    Raises:
        ValueError: it is none.
    """
    return _addressable(_bytes(value))


def usable(path: Path) -> Path:
    """Return a path whose ``~`` stands for the home directory that is meant.

    Raises:
        ValueError: no file can be called so, or there is no such user.
    """
    if "\0" in str(path):
        raise ValueError("is no path: it has a zero byte")
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"{str(path)!r} is of a user that this host does not have") from None


FilePath = Annotated[Path, Field(strict=False), AfterValidator(usable)]
Size = Annotated[int, BeforeValidator(size)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Duration = Annotated[int, BeforeValidator(seconds)]
Part = Annotated[float | int, BeforeValidator(_amount)]
"""A share of a tier as a float, or bytes as an int."""


class Table(BaseModel):
    """A table of a file: frozen, of exactly these fields and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


T = TypeVar("T", bound=Table)


def read(path: Path) -> dict[str, Any]:
    """Read a file.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_TEXT + 1)
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {os.strerror(error.errno or 0)}") from None
    if len(content) > _MOST_TEXT:
        raise ConfigError(path, "", f"has more than {show_bytes(_MOST_TEXT)}; is it another file?")
    return parsed(content, path)


def parsed(content: bytes, path: Path | str) -> dict[str, Any]:
    """Return what a file says.

    Raises:
        ConfigError: it is not TOML.
    """
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(path, "", f"is not TOML: {error}") from None
    except ValueError:
        raise ConfigError(path, "", "has a number of thousands of digits") from None
    except RecursionError:
        raise ConfigError(path, "", "is nested too deeply") from None


def _shown(part: int | str) -> str:
    """Write a part of a field's name as TOML has it."""
    return str(part) if re.fullmatch(r"[\w-]{1,64}", str(part)) else repr(str(part)[:64])


def validated(model: type[T], body: dict[str, Any], path: Path | str) -> T:
    """Return the table that a file holds.

    Raises:
        ConfigError: a field is unknown, of the wrong type or out of range.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(_shown, first["loc"]))
        raise ConfigError(path, field, reason(model, first)) from None
