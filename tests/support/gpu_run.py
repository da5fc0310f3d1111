"""Runs parts of what is measured of a GPU, and keeps what comes of each, as it comes.

``python -m support.gpu_run FILE PART...`` writes JSON: by part its `state` (``begun``, ``ended``, ``failed``
with `why`, ``left out``), `seconds`, and what it `found`. A part that does not end is left ``begun``. Shows a
table of each, and ends with 1 if one has failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from support import gpu_figures, gpu_versions
from support.gpu_nvcomp import Wrong
from support.gpu_ready import LEAVE_OUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PARTS: dict[str, Callable[[torch.device], object]] = {
    "versions": gpu_versions.versions,
    "copies": gpu_figures.copies,
    "kernels": gpu_figures.kernels,
    "wheels": gpu_versions.wheels,
    "exchanged": gpu_figures.exchanged,
    "refused": gpu_figures.refused,
    "manners": gpu_figures.manners,
    "entropy": gpu_figures.entropy,
    "lossless": gpu_figures.lossless,
    "overlap": gpu_figures.overlap,
    "straight": gpu_figures.straight,
    "speeds": gpu_figures.speeds,
}
OF_NVCOMP = {"wheels", "exchanged", "manners", "entropy", "speeds"}


def run(file: Path, parts: Sequence[str], device: torch.device) -> bool:
    """Run parts, one after the other, whatever becomes of each; tell whether none has failed."""
    fine = True
    for part in parts:
        if part in OF_NVCOMP and os.environ.get(LEAVE_OUT) == "no":
            note(file, part, {"state": "left out"})
            continue
        note(file, part, {"state": "begun"})
        begin = time.monotonic()
        told: dict[str, object]
        try:
            told = {"state": "ended", "found": PARTS[part](device)}
        except Wrong as wrong:
            told = {"state": "failed", "why": str(wrong), "found": wrong.found}
        except Exception as error:  # noqa: BLE001 - the other parts are to run
            traceback.print_exc()
            told = {"state": "failed", "why": f"{type(error).__name__}: {error}"}
        note(file, part, told | {"seconds": round(time.monotonic() - begin, 2)})
        show(part, told)
        fine = fine and told["state"] == "ended"
    return fine


def note(file: Path, part: str, told: Mapping[str, object]) -> None:
    """Write what there is to say of a part; of the others the file says what it said before."""
    found = json.loads(file.read_text("utf-8")) if file.exists() else {}
    new = file.with_suffix(".new")
    new.write_text(json.dumps(found | {part: told}, indent=1, default=str) + "\n", "utf-8")
    new.replace(file)


def show(part: str, told: Mapping[str, object]) -> None:
    """Show what came of a part."""
    console, found = Console(width=150), told.get("found")
    if isinstance(found, dict):
        found = [{"what": name, "found": value} for name, value in found.items()]
    if found:
        console.print(table(part, found))
    if told["state"] == "failed":
        console.print(f"{part} failed: {told['why']}", markup=False, highlight=False)


def table(title: str, rows: Sequence[Mapping[str, object]]) -> Table:
    """Return rows as a table; what a row does not say is left empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = Table(title=title)
    for name in names:
        shown.add_column(name, justify="right")
    for row in rows:
        values = (row.get(name, "") for name in names)
        shown.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in values))
    return shown


if __name__ == "__main__":
    sys.exit(not run(Path(sys.argv[1]), sys.argv[2:], torch.device("cuda", 0)))
