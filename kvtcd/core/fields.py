"""JSON from outside, read strictly: one object, field by field, each with a message that names it."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from kvtcd.core.errors import BadField, BadRequest
from kvtcd.core.keys import EngineKey, parse_key
from kvtcd.core.place import Tier


def json_object(data: bytes | bytearray) -> dict[str, Any]:
    """Read one JSON object: UTF-8, no name twice, no NaN or infinity.

    Raises:
        BadField: it is something else.
    """
    try:
        value = json.loads(bytes(data).decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadField("JSON", str(error)) from None
    if not isinstance(value, dict):
        raise BadField("JSON", "is not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


_TIERS = {str(tier): tier for tier in Tier}


class Fields:
    """One JSON object; every reader raises `BadRequest` with the name of the field that is wrong.

    Args:
        body: what should be an object.
        what: its name, should it be none.
    """

    __slots__ = ("_body",)

    def __init__(self, body: object, what: str) -> None:
        if not isinstance(body, dict):
            raise BadRequest(what, "is not a JSON object")
        self._body: dict[str, Any] = body

    def __contains__(self, name: str) -> bool:
        """Tell whether a field is there and not null."""
        return self._body.get(name) is not None

    def value(self, name: str) -> object:
        """Return a field of any type."""
        if name not in self._body:
            raise BadRequest(name, "is missing")
        return self._body[name]

    def integer(self, name: str, low: int, high: int) -> int:
        """Return an integer within bounds."""
        value = self.value(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise BadRequest(name, f"is not an integer within {low}..{high}")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        """Return a number within bounds."""
        value = self.value(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise BadRequest(name, f"is not a number within {low:g}..{high:g}")
        return float(value)

    def text(self, name: str) -> str:
        """Return a string."""
        return string(name, self.value(name))

    def optional_text(self, name: str) -> str | None:
        """Return a string, None if the field is absent or null."""
        return self.text(name) if name in self else None

    def choice(self, name: str, choices: Collection[str]) -> str:
        """Return one of a few strings."""
        value = self.text(name)
        if value not in choices:
            raise BadRequest(name, f"is not one of {', '.join(choices)}")
        return value

    def tier(self, name: str) -> Tier:
        """Return a tier."""
        return _TIERS[self.choice(name, _TIERS)]

    def key(self, name: str) -> EngineKey:
        """Return an engine key."""
        return parse_key(self.text(name))

    def keys(self, name: str) -> list[EngineKey]:
        """Return a list of engine keys."""
        return [parse_key(string(name, key)) for key in self.items(name)]

    def integers(self, name: str, low: int, high: int) -> list[int]:
        """Return a list of integers within bounds."""
        values = [value for value in self.items(name) if type(value) is int and low <= value <= high]
        if len(values) != len(self.items(name)):
            raise BadRequest(name, f"are not all integers within {low}..{high}")
        return values

    def tiers(self, name: str) -> list[Tier | None]:
        """Return a list of tiers, and of nulls."""
        try:
            return [None if value is None else _TIERS[value] for value in self.items(name)]  # type: ignore[index]  # whatever is no tier is no key either
        except (KeyError, TypeError):
            raise BadRequest(name, f"are not all null or one of {', '.join(_TIERS)}") from None

    def items(self, name: str) -> Sequence[object]:
        """Return the items of a list."""
        value = self.value(name)
        if not isinstance(value, list):
            raise BadRequest(name, "is not a list")
        return value

    def refuse_others(self, *known: str) -> None:
        """Refuse fields that are not known."""
        if unknown := sorted(set(self._body) - set(known)):
            raise BadRequest(unknown[0], "is not a known field")


def string(name: str, value: object) -> str:
    """Return a value that must be a string."""
    if not isinstance(value, str):
        raise BadRequest(name, "is not a string")
    return value
