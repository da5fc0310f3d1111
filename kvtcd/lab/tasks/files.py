"""Rows of data files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from kvtcd.core.errors import ConfigError

Row = dict[str, Any]


def read_json(path: Path) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Read a JSON file.

    Raises:
        ConfigError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(_text(path))
    except ValueError as error:
        raise ConfigError(path, "", f"is not JSON: {error}") from error


def read_rows(path: Path, *fields: str) -> list[Row]:
    """Read a JSONL file, perhaps gzipped, whose rows are objects with certain fields.

    Raises:
        ConfigError: it cannot be read, a row is no such object, or there is none.
    """
    rows = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(path, f"line {number}", f"is not JSON: {error}") from error
        missing = [field for field in fields if not isinstance(row, dict) or field not in row]
        if missing:
            raise ConfigError(path, f"line {number}", f"has no {', '.join(missing)}")
        rows.append(row)
    if not rows:
        raise ConfigError(path, "", "holds no row")
    return rows


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(path, "", f"cannot be read as UTF-8 text: {error}") from error
