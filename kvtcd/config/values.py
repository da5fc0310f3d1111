"""Sizes, durations and shares in TOML, and errors that name file, field and reason."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvtcd.core.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]iB|B?)")
_MOST = 64 << 40
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+) ?([smhd])")


def _bytes(value: object) -> Any:  # noqa: ANN401 - what is no text is left for the field to judge
    """Read a size: a whole number of bytes, or text such as ``"8 GiB"``."""
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if not found:
            raise ValueError(f'{value!r} is not a size; write for instance "8 GiB"')
        return int(float(found[1]) * _UNITS[found[2]])
    return value


def _addressable(value: int) -> int:
    """Refuse what no process can map; the disk tier maps twice its capacity."""
    if value > _MOST:
        raise ValueError(
            f"{show_bytes(value)} is more than a process can address; at most {show_bytes(_MOST)}"
        )
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


def _amount(value: object) -> object:
    """Read what somebody may have of a tier: a share such as ``0.5``, or a size such as ``"200 GiB"``."""
    if isinstance(value, str):
        nbytes = _addressable(_bytes(value))
        if not nbytes:
            raise ValueError(
                f"{value!r} is nothing, and nothing could be stored; leave it out for all of the tier"
            )
        return nbytes
    if isinstance(value, float) and 0 < value <= 1:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value == 1:
        return 1.0
    raise ValueError(f'{value!r} is neither a share above 0 and up to 1, nor a size; write 0.5 or "200 GiB"')


Size = Annotated[int, BeforeValidator(_bytes), Field(ge=0), AfterValidator(_addressable)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Duration = Annotated[int, BeforeValidator(_seconds), Field(ge=1, le=100 * 365 * 86400)]
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
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {os.strerror(error.errno or 0)}") from None
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


def validated(model: type[T], body: dict[str, Any], path: Path | str) -> T:
    """Return the table that a file holds.

    Raises:
        ConfigError: a field is unknown, of the wrong type or out of range.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        known = {"extra_forbidden": "is not a known field", "model_type": "is not a table"}
        why = known.get(first["type"], first["msg"])
        raise ConfigError(path, field, why.removeprefix("Value error, ")) from None
