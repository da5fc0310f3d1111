"""What an operator says in an engine's JSON, read in one way: what is wrong is named at its start."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from kvtcd.core.errors import BadRequest

T = TypeVar("T")
_KINDS = {
    "str": "text",
    "str | None": "text",
    "bool": "true or false",
    "float": "a number of seconds above 0",
    "int": "a whole number above 0, without quotes or unit",
    "tuple[str, ...]": "a list of folders",
    "Mapping[str, str]": "an object of names and folders",
}
"""What a value has to be, by the annotation of its field."""
_LIKE = 0.8
"""How like one of our keys another program's may be before it is taken for ours, misspelt."""


def read(kind: type[T], given: Mapping[str, Any], *, shared: bool = False) -> T:
    """Return options of a dataclass whose fields are annotated as `_KINDS` says.

    Args:
        kind: the dataclass.
        given: the JSON.
        shared: whether the engine's own keys are there too, which are passed over.

    Raises:
        BadRequest: a key is unknown, or a value is not of its kind.
    """
    kinds = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    for key in sorted(given.keys() - kinds.keys()):
        near = difflib.get_close_matches(str(key), kinds, n=1, cutoff=_LIKE)
        if near or not shared:
            meant = f"did you mean {near[0]}? " if near else ""
            raise BadRequest(str(key), f"is no option of kvtcd; {meant}there are {', '.join(kinds)}")
    ours = {name: given[name] for name in kinds if name in given}
    for name, value in ours.items():
        if not _is(kinds[name], value):
            raise BadRequest(name, f"is {value!r}; it has to be {_KINDS[kinds[name]]}")
    return kind(**{name: tuple(one) if isinstance(one, list) else one for name, one in ours.items()})


def _is(kind: str, value: object) -> bool:
    match kind:
        case "str":
            return isinstance(value, str)
        case "str | None":
            return value is None or isinstance(value, str)
        case "bool":
            return isinstance(value, bool)
        case "float":
            if isinstance(value, bool) or not isinstance(value, int | float):
                return False
            return math.isfinite(value) and value > 0
        case "int":
            return type(value) is int and value > 0
        case "tuple[str, ...]":
            return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
        case "Mapping[str, str]":
            return isinstance(value, Mapping) and all(isinstance(one, str) for one in value.values())
        case _:
            raise AssertionError(kind)
