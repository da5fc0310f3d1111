"""Trials that are done, kept beside the file of figures, so that a run that was killed goes on where it was.

First a line of what the run is, then a JSON object a line: for each chunk of a cell's trials its rows. A line
that was cut off does not count. A file of another run, or a damaged one, is refused and left as it is: it may
be hours of work.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtcd import __version__
from kvtcd.core.errors import ConfigError
from kvtcd.lab.ablate.cells import Cell, Row
from kvtcd.lab.ablate.measures import MEASURES
from kvtcd.lab.ablate.schemes import Scheme

_RUN = re.compile(r"[0-9a-f]{64}")


def run_of(cells: Sequence[Cell], trials: int, seed: int, schemes: dict[str, Scheme], source: str) -> str:
    """Return what a run is, 64 hex digits: every figure follows from it.

    Args:
        cells: of the grid.
        trials: of each cell.
        seed: of everything.
        schemes: by name.
        source: digest of the caches that are measured; empty for problems that are drawn.
    """
    whole = [[asdict(cell) for cell in cells], trials, seed, _names(schemes), source, __version__]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _names(schemes: dict[str, Scheme]) -> dict[str, Any]:
    return {name: asdict(scheme) for name, scheme in schemes.items()}


class Journal:
    """The file.

    Args:
        path: of it; None: nothing is kept.
        run: what the run is.

    Raises:
        ConfigError: the file cannot be read or written, is of another run or of something else, or damaged.
    """

    def __init__(self, path: Path | None, run: str) -> None:
        self._path = path
        self._done: dict[tuple[str, int], list[Row]] = {}
        if not path:
            return
        try:
            text = path.read_text("utf-8") if path.exists() else ""
            if (run + "\n").startswith(text):  # nothing yet, or killed while it was begun
                path.write_text(run + "\n", "utf-8")
                return
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(path, "", f"cannot be gone on with: {error}") from None
        self._done = _read(path, text, run)

    @property
    def chunks(self) -> int:
        """So many are done."""
        return len(self._done)

    def get(self, cell: Cell, first: int) -> list[Row] | None:
        """Return the rows of a chunk, if it is done."""
        return self._done.get((cell.name, first))

    def put(self, cell: Cell, first: int, rows: Sequence[Row]) -> None:
        """Keep the rows of a chunk."""
        if self._path:
            line = json.dumps({"cell": cell.name, "first": first, "rows": [asdict(row) for row in rows]})
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + line + "\n")

    def close(self) -> None:
        """Remove the file: the run is done, and its figures are written."""
        if self._path:
            self._path.unlink(missing_ok=True)


def _read(path: Path, text: str, run: str) -> dict[tuple[str, int], list[Row]]:
    """Return what is done.

    Raises:
        ConfigError: the file is of another run or of something else, or is damaged.
    """
    first, *lines = text.split("\n")
    if first != run:
        of = "another run (other options, caches or release)" if _RUN.fullmatch(first) else "something else"
        raise ConfigError(
            path,
            "",
            f"is of {of}. It is left as it is: go on as it was begun, give another --json, or remove it",
        )
    done = {}
    for number, line in enumerate(lines, 2):
        if not line:
            continue
        try:
            found = json.loads(line)
            done[str(found["cell"]), int(found["first"])] = [_row(row) for row in found["rows"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            # Killed while it was written, a line has no end: what came next begins the next one.
            whole = number - 2 < len(lines) - 1 and not lines[number - 1]
            if whole:
                raise ConfigError(
                    path, f"line {number}", "is damaged; remove the line, and its trials are measured again"
                ) from None
    return done


def _row(row: dict[str, Any]) -> Row:
    measured = {str(name): tuple(map(float, values)) for name, values in row["measured"].items()}
    if set(measured) != set(MEASURES):
        raise ValueError("has not all measures")
    return Row(str(row["scheme"]), int(row["budget"]), float(row["bits"]), measured)
