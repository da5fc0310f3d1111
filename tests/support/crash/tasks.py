"""What crash children do."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtcd.core.errors import Corrupt
from kvtcd.tiers.disk import Environment
from support.crash import workload
from support.crash.sealed import version_of


def write_until_killed(path: str, log: str, seed: int, first: int) -> None:
    """Write steps from `first` on, one line of the log for each report, until a signal comes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def report(what: str, number: int) -> None:
        os.write(descriptor, f"{what} {number}\n".encode())

    environment = Environment(Path(path), quota=workload.QUOTA)
    report("open", int(environment.quarantined))
    workload.run(environment, seed, itertools.count(first), report)


def inspect(path: str) -> dict[str, Any]:
    """Open and read everything; say what was accepted, refused by its digest, damaged, and set aside."""
    environment = Environment(Path(path), quota=workload.QUOTA)
    seen: dict[str, Any] = {"quarantined": environment.quarantined, "accepted": [], "refused": 0, "corrupt": 0}
    for stored in environment.scan():
        try:
            found = environment.read(stored.key)
        except Corrupt:
            seen["corrupt"] += 1
            continue
        version = found and version_of(stored.key, *found)
        if version is None:
            seen["refused"] += 1
        else:
            seen["accepted"].append([stored.key.hex(), version])
    environment.close()
    return seen


TASKS: dict[str, Callable[..., Any]] = {
    "write_until_killed": write_until_killed,
    "inspect": inspect,
}
