"""JSON forms of single values: how they are read, written, and described to others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, TypeVar

from kvtcd.core.errors import BadRequest
from kvtcd.core.keys import MAX_KEY, EngineKey, parse_key

T = TypeVar("T")
Schema = dict[str, Any]
"""JSON Schema 2020-12. That of a message has its name as `title`."""


@dataclass(frozen=True, slots=True, eq=False)
class Form(Generic[T]):
    """How the values of one type look in JSON.

    Attributes:
        schema: for those who have never seen this program.
        read: takes the name of a field and a JSON value; raises `BadRequest` for one that breaks the schema.
        write: returns the JSON value.
    """

    schema: Schema
    read: Callable[[str, Any], T]
    write: Callable[[T], object] = field(default=lambda value: value)


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, both within."""

    low: float
    high: float = inf


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a string must look like, whole; `shown` says so to people."""

    regex: str
    shown: str = ""


def integer(bounds: Range) -> Form[int]:
    """Return the form of an integer within bounds."""
    low, high = bounds.low, bounds.high
    shown = f"is not an integer within {low}..{high}" if high < inf else f"is not an integer from {low} up"

    def read(name: str, value: Any) -> int:  # noqa: ANN401 - any JSON value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise BadRequest(name, shown)
        return value

    return Form(_bounded({"type": "integer"}, bounds), read)


def number(bounds: Range) -> Form[float]:
    """Return the form of a number within bounds."""

    def read(name: str, value: Any) -> float:  # noqa: ANN401 - any JSON value
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if not right or not bounds.low <= value <= bounds.high:
            raise BadRequest(name, f"is not a number within {bounds.low:g}..{bounds.high:g}")
        return float(value)

    return Form(_bounded({"type": "number"}, bounds), read)


def text(pattern: Pattern | None = None) -> Form[str]:
    """Return the form of a string."""

    def read(name: str, value: Any) -> str:  # noqa: ANN401 - any JSON value
        if not isinstance(value, str):
            raise BadRequest(name, "is not a string")
        if pattern and not re.fullmatch(pattern.regex, value):
            raise BadRequest(name, f"is not {pattern.shown or pattern.regex}")
        return value

    return Form({"type": "string"} | ({"pattern": f"^({pattern.regex})$"} if pattern else {}), read)


def choice(values: Mapping[str, T]) -> Form[T]:
    """Return the form of one of a few values, by their names."""
    shown = f"is not one of {', '.join(values)}"

    def read(name: str, value: Any) -> T:  # noqa: ANN401 - any JSON value
        if not isinstance(value, str) or value not in values:
            raise BadRequest(name, shown)
        return values[value]

    return Form({"type": "string", "enum": list(values)}, read, str)


def nullable(inner: Form[T]) -> Form[T | None]:
    """Return the form of what may be null."""
    return Form(
        {"anyOf": [inner.schema, {"type": "null"}]},
        lambda name, value: None if value is None else inner.read(name, value),
        lambda value: None if value is None else inner.write(value),
    )


def sequence(inner: Form[T], size: Range = Range(0)) -> Form[tuple[T, ...]]:
    """Return the form of a list of so many items."""

    def read(name: str, value: Any) -> tuple[T, ...]:  # noqa: ANN401 - any JSON value
        if not isinstance(value, list):
            raise BadRequest(name, "is not a list")
        if not size.low <= len(value) <= size.high:
            raise BadRequest(name, f"{len(value)} of them; {size.low:g} to {size.high:g} are supported")
        return tuple(inner.read(name, item) for item in value)

    schema: Schema = {"type": "array", "items": inner.schema}
    schema |= ({"minItems": size.low} if size.low else {}) | (
        {"maxItems": size.high} if size.high < inf else {}
    )
    return Form(schema, read, lambda value: list(map(inner.write, value)))


def table(inner: Form[T]) -> Form[dict[str, T]]:
    """Return the form of an object with names of any kind."""

    def read(name: str, value: Any) -> dict[str, T]:  # noqa: ANN401 - any JSON value
        if not isinstance(value, dict):
            raise BadRequest(name, "is not a JSON object")
        return {key: inner.read(f"{name}.{key}", item) for key, item in value.items()}

    return Form(
        {"type": "object", "additionalProperties": inner.schema},
        read,
        lambda value: {key: inner.write(item) for key, item in value.items()},
    )


def _key(name: str, value: Any) -> EngineKey:  # noqa: ANN401 - any JSON value
    if type(value) is not str:
        raise BadRequest(name, "is not a string")
    return parse_key(value)


KEY: Form[EngineKey] = Form(
    {"type": "string", "pattern": f"^([0-9a-f]{{2}}){{1,{MAX_KEY}}}$"}, _key, bytes.hex
)  # fmt: skip


def _bit(name: str, value: Any) -> bool:  # noqa: ANN401 - any JSON value
    if type(value) is not int or value not in (0, 1):
        raise BadRequest(name, "is neither 0 nor 1")
    return bool(value)


BIT: Form[bool] = Form({"type": "integer", "enum": [0, 1]}, _bit, int)
"""Where a hash is taken of the JSON form, which every writer must spell alike."""


_DECIMAL = Pattern(r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?", "a number written as a string")
DECIMAL: Form[float] = Form(
    text(_DECIMAL).schema, lambda name, value: float(text(_DECIMAL).read(name, value)), repr
)
"""The same for floats: Python's `repr` of one that is not negative."""

BOOL: Form[bool] = Form({"type": "boolean"}, lambda _name, value: bool(value))


def _bounded(schema: Schema, bounds: Range) -> Schema:
    low = {"minimum": bounds.low} if bounds.low > -inf else {}
    return schema | low | ({"maximum": bounds.high} if bounds.high < inf else {})
