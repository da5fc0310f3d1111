"""Trials that are done, kept beside the file of figures, so that a run that was killed goes on where it was.

One JSON object a line: first what the run is, then for each chunk of a cell's trials its rows. A line that
was cut off does not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtcd import __version__
from kvtcd.lab.ablate.cells import Cell, Row
from kvtcd.lab.ablate.schemes import Scheme


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
        run: what the run is; a file of another one is begun anew.
    """

    def __init__(self, path: Path | None, run: str) -> None:
        self._path = path
        self._done: dict[tuple[str, int], list[Row]] = {}
        if not path:
            return
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        if not lines or lines[0] != run:
            path.write_text(run + "\n", "utf-8")
            return
        for line in lines[1:]:
            try:
                found = json.loads(line)
            except ValueError:  # killed while it was written; what comes next stands on a line of its own
                continue
            self._done[found["cell"], found["first"]] = [_row(row) for row in found["rows"]]

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


def _row(row: dict[str, Any]) -> Row:
    measured = {name: tuple(values) for name, values in row["measured"].items()}
    return Row(row["scheme"], row["budget"], row["bits"], measured)
