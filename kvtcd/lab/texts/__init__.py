"""Texts to calibrate on and to measure with: the recipe that ships with kvtcd, or the user's own files.

The recipe is fixed, so that a profile made from it is the same everywhere. README.md beside this file names
source and licence of each text, and which parts of the sources were left out to be test texts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from kvtcd.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

RECIPE = ("prose", "chat", "maths", "code")
"""Kinds of text in the recipe, in its order."""

OWN = "own"
"""Kind of a text that the user brought."""

_FIELDS = {("text",): "", ("question", "answer"): "\n", ("input", "output"): " "}
"""Fields of a JSON line that together are its text -> what stands between them."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text: the name of its file, its kind (one of `RECIPE`, or `OWN`), and what it says."""

    name: str
    kind: str
    text: str


def recipe() -> list[Text]:
    """Return the texts of the recipe, always the same ones in the same order."""
    folder = files(__name__)
    return [Text(f"{kind}.txt", kind, folder.joinpath(f"{kind}.txt").read_text("utf-8")) for kind in RECIPE]


def read(paths: Iterable[Path | str]) -> list[Text]:
    """Return the texts in files of the user's own, one a file.

    Args:
        paths: `.txt` files, taken as they are, or `.jsonl` files of rows with the field ``text``, or
            ``question`` and ``answer``, or ``input`` and ``output``; a blank line goes between rows.

    Raises:
        ConfigError: a file that cannot be read, is of another type, holds no text, or has a row without such
            fields.
    """
    return [_read(Path(path)) for path in paths]


def _read(path: Path) -> Text:
    try:
        raw = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(path, "", f"cannot be read as UTF-8 text: {error}") from error
    if path.suffix == ".txt":
        text = raw
    elif path.suffix == ".jsonl":
        lines = raw.split("\n")  # not splitlines: JSON strings may hold other line separators
        text = "\n\n".join(_row(path, n, line) for n, line in enumerate(lines, 1) if line.strip())
    else:
        raise ConfigError(path, "", "is neither .txt nor .jsonl; name it after what it is, or convert it")
    if not text.strip():
        raise ConfigError(path, "", "holds no text")
    return Text(path.name, OWN, text)


def _row(path: Path, number: int, line: str) -> str:
    where = f"line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(path, where, f"is not JSON: {error}") from error
    for fields, between in _FIELDS.items():
        if isinstance(row, dict) and all(isinstance(row.get(field), str) for field in fields):
            return between.join(row[field].strip() for field in fields)
    known = ", or ".join(" and ".join(fields) for fields in _FIELDS)
    raise ConfigError(path, where, f"has no text: a row is a JSON object with strings {known}")
