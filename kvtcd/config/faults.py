"""Why a value of a file is refused, in words of the file: what was found, and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

Path = tuple[int | str, ...]

_WANTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda _: "a whole number",
    "int_from_float": lambda _: "a whole number",
    "int_parsing": lambda _: "a whole number",
    "int_parsing_size": lambda _: "a whole number of 64 bits",
    "float_type": lambda _: "a number",
    "float_parsing": lambda _: "a number",
    "bool_type": lambda _: "true or false",
    "string_type": lambda _: "text in quotes",
    "path_type": lambda _: "a path in quotes",
    "tuple_type": lambda _: "a list in [brackets]",
    "literal_error": lambda limits: limits["expected"],
    "enum": lambda limits: limits["expected"],
    "greater_than": lambda limits: f"above {limits['gt']:g}",
    "greater_than_equal": lambda limits: f"at least {limits['ge']:g}",
    "less_than": lambda limits: f"below {limits['lt']:g}",
    "less_than_equal": lambda limits: f"at most {limits['le']:g}",
}
"""What has to stand there, by pydantic's type of an error."""
_SHOWN_BITS = 256
_WORDS = {"literal_error", "enum"}
"""Here text is shown as it was found; elsewhere it might be a secret that was put into the wrong place."""


def reason(model: type[BaseModel], error: ErrorDetails) -> str:
    """Return what is wrong with a field of a file that `model` reads."""
    kind, limits = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"is not a known field; known are {', '.join(_siblings(model, error['loc']))}"
    if kind == "missing":
        return "is missing"
    if kind == "model_type":
        return f"is not a table but {_shown(error['input'], text=False)}"
    if kind == "too_short":
        return "must not be empty"
    if kind in _WANTED:
        return f"must be {_WANTED[kind](limits)}, not {_shown(error['input'], text=kind in _WORDS)}"
    return error["msg"].removeprefix("Value error, ")  # those of our own validators


def _siblings(model: type[BaseModel], where: Path) -> list[str]:
    """Return the names of the fields of the table in which a field was found."""
    table: Any = model
    for part in where[:-1]:
        if isinstance(part, str):
            table = table.model_fields[part].annotation
            table = next(iter(get_args(table)), table)  # a list of tables
    return sorted(table.model_fields)


def _shown(value: object, *, text: bool) -> str:
    """Write a value as TOML has it, or say what it is."""
    match value:
        case bool():
            return str(value).lower()
        case int() if value.bit_length() > _SHOWN_BITS:
            return "a number of more digits"
        case int() | float():
            return str(value)
        case str():
            return repr(value if len(value) <= 40 else f"{value[:40]}…") if text else "text"
        case list():
            return "a list"
        case dict():
            return "a table"
        case _:
            return f"a {type(value).__name__}"
