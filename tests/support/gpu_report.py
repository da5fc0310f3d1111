"""Says in one table and one file what came of a run of `gpu_check.sh`: ``python -m support.gpu_report OUT``.

Ends with 1 unless all that was to run has run, and nothing has failed.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from rich.console import Console
from support.gpu_run import PARTS, table

if TYPE_CHECKING:
    from collections.abc import Iterator

CODECS = ("codec", "codec-no-kernels", "codec-no-graphs")
GOOD = {"ended", "passed", "left out"}


def report(out: Path) -> bool:
    """Write ``report.json`` beside what was left in a folder, show a table; tell whether all is well."""
    parts = _read(out / "figures.json")
    rows = [*_tests(out / "tests.xml"), *_parts(parts)]
    codecs = {name: _read(out / f"{name}.json") for name in CODECS}
    for name, found in codecs.items():
        rows.append(
            {
                "what": name,
                "state": "ended" if found.get("rows") else "failed",
                "why": "" if found else "left no file",
            }
        )
    # Asks nothing of the device, which may be gone.
    told = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": rows,
        "parts": parts,
        "codecs": codecs,
    }
    (out / "report.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    Console(width=150).print(table("gpu check", rows))
    return all(row["state"] in GOOD for row in rows)


def _parts(found: dict[str, dict[str, object]]) -> Iterator[dict[str, object]]:
    for part in PARTS:
        told = found.get(part, {"state": "not begun"})
        why = "it did not end" if told["state"] == "begun" else told.get("why", "")
        yield {"what": part, "state": told["state"], "seconds": told.get("seconds", ""), "why": why}


def _tests(file: Path) -> Iterator[dict[str, object]]:
    """Say of the tests how many passed, and of each that did not why."""
    try:
        cases = list(ET.parse(file).iter("testcase"))  # noqa: S314 - pytest has written it
    except (OSError, ET.ParseError) as error:
        yield {"what": "tests", "state": "failed", "why": f"they left no report: {error}"}
        return
    other = [(case, each) for case in cases for each in case if each.tag in {"failure", "error", "skipped"}]
    passed = len(cases) - len({id(case) for case, _ in other})
    yield {
        "what": f"{passed} tests",
        "state": "passed" if passed else "failed",
        "why": "" if passed else "none ran",
    }
    for case, each in other:
        state = "left out" if each.tag == "skipped" else "failed"
        yield {
            "what": case.get("name"),
            "state": state,
            "why": (each.get("message") or "").partition("\n")[0],
        }


def _read(file: Path) -> dict[str, dict[str, object]]:
    try:
        found: dict[str, dict[str, object]] = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found


if __name__ == "__main__":
    sys.exit(not report(Path(sys.argv[1])))
