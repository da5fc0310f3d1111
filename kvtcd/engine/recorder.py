"""Writes what is asked of the daemon into a file, a JSON object on each line: the trace of its own work.

::

    {"kvtcd_recording": 1, "time": 1732912345.123}
    {"namespace": 1, "block_tokens": 256, "token_bytes": 23040}
    {"t": 1732912346.001, "op": "match", "namespace": 1, "keys": ["5e1d…", …]}
    {"t": 1732912346.004, "op": "get", "namespace": 1, "keys": ["5e1d…", …]}
    {"t": 1732912349.712, "op": "put", "namespace": 1, "keys": ["a03b…"], "parent": "5e1d…", "tokens": 256,
     "bytes": 5898240}
    {"op": "gap", "lines": 17}

The first line has the version, and comes again wherever a daemon opened the file; numbers of namespaces begin
anew there. Times are seconds since
1970. Keys are record keys, so a recording gives away neither texts nor the keys of the engines. A `match` has
all keys of the prompt, those after the first miss too. What the disk does not take in time is left out, and a
`gap` says how many lines that were.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from kvtcd.core.errors import ConfigError
from kvtcd.core.keys import RecordKey
from kvtcd.engine.lanes import Lane
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Namespace

VERSION = 1
QUEUE = 1 << 18
"""Keys that wait to be written, in all lines together."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Line:
    """One reference to blocks; `parent`, `tokens` and `nbytes` are those of a block that is put."""

    op: Literal["match", "get", "put"]
    namespace: Namespace
    keys: Sequence[RecordKey]
    parent: RecordKey | None = None
    tokens: int | None = None
    nbytes: int | None = None


class Recorder:
    """Writes on a thread of its own. `note`, `reopen` and `close` belong to the loop and never block it.

    Args:
        path: of the file; what is there already stays.
        lane: writes.
        metrics: told of lines that are written or left out.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, lane: Lane, metrics: Metrics) -> None:
        self._path, self._lane, self._metrics = path, lane, metrics
        self._waiting: list[tuple[float, Line]] = []
        self._keys = self._lost = 0
        self._news = asyncio.Event()
        self._ended = self._failing = False
        self._task: asyncio.Task[None] | None = None
        # of the thread
        self._file: BinaryIO | None = None
        self._described: set[int] = set()
        try:
            self._open()
        except OSError as error:
            why = f"cannot be written: {os.strerror(error.errno or 0)}"
            raise ConfigError(path, "", why) from None

    def note(self, line: Line) -> None:
        """Have a line written; while too many wait, it is left out and counted."""
        if line.namespace.trial:
            return
        if self._keys + len(line.keys) > QUEUE:
            self._lost += 1
            self._metrics.unrecorded.inc()
        else:
            self._keys += len(line.keys)
            self._waiting.append((time.time(), line))
        self._news.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="kvtcd-record")

    async def reopen(self) -> None:
        """Write into a new file, if the old one was moved away."""
        try:
            await self._lane.run(self._reopen)
        except OSError as error:
            self._failed(error)

    async def close(self) -> None:
        """Write what waits, and close the file."""
        self._ended = True
        self._news.set()
        if self._task:
            await self._task
        await self._lane.run(self._close)

    async def _run(self) -> None:
        while not self._ended or self._waiting:
            await self._news.wait()
            self._news.clear()
            lines, self._waiting = self._waiting, []
            lost, self._keys, self._lost = self._lost, 0, 0
            if not lines and not lost:
                continue
            try:
                await self._lane.run(self._write, lines, lost)
            except OSError as error:
                self._lost += lost + len(lines)
                self._metrics.unrecorded.inc(len(lines))
                self._failed(error)
            else:
                self._metrics.recorded.inc(len(lines))
                self._failing = False

    def _failed(self, error: OSError) -> None:
        if not self._failing:
            _log.warning("cannot record to %s: %s", self._path, os.strerror(error.errno or 0))
        self._failing = True

    def _reopen(self) -> None:
        self._close()
        self._open()

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._described = set()
        if self._file.tell():
            with self._path.open("rb") as old:
                old.seek(-1, os.SEEK_END)
                if old.read(1) != b"\n":  # its writer was killed, or the disk was full
                    self._file.write(b"\n")
        self._put([{"kvtcd_recording": VERSION, "time": round(time.time(), 3)}])

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, lines: Sequence[tuple[float, Line]], lost: int) -> None:
        if self._file is None:
            self._open()
        rows: list[dict[str, object]] = [{"op": "gap", "lines": lost}] if lost else []
        described = set(self._described)
        for at, line in lines:
            number, identity = line.namespace.number, line.namespace.identity
            if number not in described:
                described.add(number)
                rows.append(
                    {
                        "namespace": number,
                        "block_tokens": identity.block_tokens,
                        "token_bytes": identity.layout.token_bytes,
                    }
                )
            rows.append(_row(at, line))
        self._put(rows)
        self._described = described

    def _put(self, rows: Sequence[dict[str, object]]) -> None:
        assert self._file is not None, "it is open"
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        data = memoryview(text.encode())
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self._close()  # a line may be torn: what comes next begins anew
            raise


def _row(at: float, line: Line) -> dict[str, object]:
    row: dict[str, object] = {"t": round(at, 3), "op": line.op, "namespace": line.namespace.number}
    row["keys"] = [key.hex() for key in line.keys]
    if line.op == "put":
        row["parent"] = line.parent.hex() if line.parent else None
        row |= {"tokens": line.tokens, "bytes": line.nbytes}
    return row
