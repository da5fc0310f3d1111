"""Children that write under the recorder, and children that open what a power loss may have left."""

from __future__ import annotations

import ctypes
import functools
import random
import shutil
from pathlib import Path

import lmdb
from support.crash import workload
from support.crash.replay import Event, events, image
from support.crash.sealed import key_of, seal, version_of

from kvtcd.core.errors import Corrupt, StoreFailed
from kvtcd.tiers.disk import Environment


def write_recorded(path: str, seed: int, first: int, last: int, *, synced: bool) -> None:
    """Write steps under the recorder; without `synced`, LMDB is told to leave syncing to `sync`."""
    if not synced:
        lmdb.open = functools.partial(lmdb.open, sync=False)  # type: ignore[assignment] # as intended
    shim = ctypes.CDLL(None)

    def report(what: str, number: int) -> None:
        shim.shim_mark(f"{what} {number}".encode())

    environment = Environment(Path(path), quota=workload.QUOTA)
    workload.run(environment, seed, iter(range(first, last)), report)


def open_image(
    *, base: str, scratch: str, recording: str, seed: int, first: int, last: int, draw: int, lost: int
) -> str:
    """Cut the recording somewhere, make a disk of it, and say what an environment there is like.

    Args:
        base: an environment as it was at step `first`.
        scratch: a directory to make the image in.
        recording: made by `write_recorded`.
        seed: of the workload.
        first: number of the first recorded step.
        last: number after the last one.
        draw: decides cut and losses.
        lost: how many acknowledged steps after the last sync may be missing.

    Returns:
        `exact`, `lost` (fewer steps than acknowledged, as allowed), or what is wrong.
    """
    chance = random.Random(draw)
    recorded = list(events(Path(recording).read_bytes()))
    history = recorded[: chance.randrange(len(recorded) + 1)]
    path = Path(scratch) / f"image-{draw}"
    shutil.copytree(base, path)
    try:
        [data] = path.glob("*/data.mdb")
        data.write_bytes(image(data.read_bytes(), history, chance))
        (data.parent / "condition").write_bytes(b"open")
        begun = _reached(history, "begin", first)
        acknowledged = _reached(history, "ack", first)
        least = max(_reached(history, "sync", first), acknowledged - lost)
        *_, start = workload.states(seed, {}, 0, first)
        passed = list(workload.states(seed, start, first, last))
        return _verdict(path, dict(enumerate(passed[: begun - first + 1], first)), least, acknowledged)
    finally:
        shutil.rmtree(path)


def _verdict(path: Path, passed: dict[int, workload.State], least: int, acknowledged: int) -> str:
    environment = Environment(path, quota=workload.QUOTA)
    if environment.quarantined:
        return "set aside as damaged"
    try:
        found = workload.observed(environment)
    except (Corrupt, StoreFailed) as error:
        return f"unreadable: {error}"
    matching = [number for number, state in passed.items() if state == found]
    if not matching:
        return f"not a state it ever had: {found}"
    if max(matching) < least:
        return f"lost too much: at step {max(matching)}, acknowledged {acknowledged}, promised {least}"
    if environment.used != workload.footprint_of(found) or environment.drop_orphans():
        return "accounting is wrong"
    again = seal(key_of(0), 1 << 40, 300_000)
    environment.write([again], [])
    after = environment.read(again.key)
    if after is None or version_of(again.key, *after) != 1 << 40:
        return "not writable"
    environment.close()
    return "lost" if max(matching) < acknowledged else "exact"


def _reached(history: list[Event], what: str, first: int) -> int:
    """Return the number after the last step of which `what` was said."""
    said = [event.data.decode().split() for event in history if event.kind == "m"]
    return max((int(number) + 1 for word, number in said if word == what), default=first)
