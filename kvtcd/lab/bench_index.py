"""What a million blocks cost: memory, time to match, time to start. Measured on a real daemon.

For each size a state directory is filled with so many small blocks (`many_blocks`), and a daemon starts on it
as after a clean end. Its resident memory over that of a daemon without blocks, by block, is the first figure:
the catalog with chains and replacement, and whatever else is kept. Pages of the file that are mapped are not
counted (`RssAnon`): the kernel takes them back.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtcd import terminal
from kvtcd.client import Client
from kvtcd.core.catalog import Catalog
from kvtcd.core.events import Found, Govern, Recovered
from kvtcd.core.keys import EngineKey, TenantKeys
from kvtcd.core.policy import Policy
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings
from kvtcd.engine.matching import Matcher
from kvtcd.lab.daemon import Daemon
from kvtcd.lab.figures import write_json
from kvtcd.lab.many_blocks import CHAIN, IDENTITY, NAME, QUOTA, engine_key, fill
from kvtcd.terminal import Table

ASKED = 512
"""Keys of one match: of several chains, all of them there."""
ROUNDS = 30


@dataclass(frozen=True, slots=True)
class Row:
    """One size.

    Attributes:
        blocks: on disk.
        bytes_per_block: of memory, each.
        match_ms: of `ASKED` keys, in the catalog; the median.
        match_http_ms: the same by the client over the Unix socket.
        match_http_cpu_ms: processor time of client and daemon together for one of these; the mean.
        restart_s: from starting the program until it is ready, after a clean end.
        restart_cpu_s: processor time that this took: about what is left of it on an idle machine.
    """

    blocks: int
    bytes_per_block: float
    match_ms: float
    match_http_ms: float
    match_http_cpu_ms: float
    restart_s: float
    restart_cpu_s: float


def command(*, sizes: Sequence[int], json: Path | None, plot: Path | None) -> None:
    """Measure, show a table, and write figures and a plot if asked."""
    rows: list[Row] = []
    with (
        terminal.progress(terminal.console(), transient=True) as progress,
        tempfile.TemporaryDirectory(prefix="kvtcd-") as folder,
    ):
        with _daemon(Path(folder) / "0", 1) as empty:
            base = resident(empty.pid)
        for blocks in sizes:
            task = progress.add_task(f"{blocks:,} blocks", total=blocks)

            def written(count: int, task: int = task) -> None:
                progress.advance(task, count)  # type: ignore[arg-type]  # a TaskID is an int

            rows.append(measure(Path(folder) / str(blocks), blocks, base, written))
    growth = {"memory": memory_growth(rows), "restart": restart_growth(rows)}
    terminal.console().print(table(rows))
    for name, law in growth.items():
        if law is not None:
            terminal.console().print(
                f"{name} grows with the {law.exponent:.2f}th power of the number of blocks"
            )
    if json:
        exponents = {name: law and law.exponent for name, law in growth.items()}
        write_json(json, "bench index", {"rows": [asdict(row) for row in rows], "growth": exponents})
    if plot:
        from kvtcd.lab.index_plot import draw  # noqa: PLC0415 - an extra

        draw(rows, plot)


def _daemon(folder: Path, blocks: int) -> Daemon:
    return Daemon(folder, host=16 << 20, disk=blocks * QUOTA, profiles=folder / "profiles")


def measure(folder: Path, blocks: int, base: int, written: Callable[[int], None]) -> Row:
    """Measure one size.

    Args:
        folder: for the state directory.
        blocks: how many.
        base: resident bytes of a daemon without blocks.
        written: told of records as they are written.
    """
    fill(folder / "state", blocks, written)
    daemon = _daemon(folder, blocks)
    restart_s = daemon.start()
    try:
        restart_cpu_s = cpu_s(daemon.pid)
        grown = resident(daemon.pid) - base
        with daemon.client() as client:
            asked = questions(blocks)
            busy = cpu_s(daemon.pid) + time.process_time()
            http_ms = 1000 * statistics.median(_times(lambda keys: _ask(client, keys), asked))
            http_cpu_ms = 1000 * (cpu_s(daemon.pid) + time.process_time() - busy) / ROUNDS
    finally:
        daemon.stop()
    return Row(blocks, grown / blocks, match_ms(blocks), http_ms, http_cpu_ms, restart_s, restart_cpu_s)


def _ask(client: Client, keys: list[EngineKey]) -> None:
    assert len(client.match(NAME, keys).prefix) == len(keys), "every key that is asked for is there"


def match_ms(blocks: int) -> float:
    """Return the milliseconds of a match in a catalog of so many blocks; the median."""
    policy, sightings = Policy("bench"), Sightings()
    catalog = Catalog(shelves(policy, sightings, host=1 << 24, disk=blocks * QUOTA), int, sightings)
    catalog.handle(Govern(1, "bench", policy))
    record_key = TenantKeys.derive(bytes(32), "bench").record_keys(IDENTITY.digest, b"")
    tokens = IDENTITY.block_tokens
    found: list[Found] = []
    for number in range(blocks):
        key = record_key(engine_key(number))
        above = found[-1].key if number % CHAIN else None
        found.append(Found(key, 1, tokens, IDENTITY.layout.nbytes(tokens), QUOTA // 2, above))
    catalog.handle(Recovered(tuple(found)))
    matcher = Matcher(catalog, IDENTITY.digest, record_key, IDENTITY.block_tokens)
    return 1000 * statistics.median(
        _times(lambda keys: matcher.by_keys(keys, matcher.record_keys(keys)), questions(blocks))
    )


def questions(blocks: int) -> list[list[EngineKey]]:
    """Return the keys of several matches, each of other blocks where there are enough."""
    firsts = [number * (blocks // ROUNDS) for number in range(ROUNDS)]
    return [[engine_key((first + n) % blocks) for n in range(ASKED)] for first in firsts]


def _times(match: Callable[[list[EngineKey]], object], asked: Sequence[list[EngineKey]]) -> list[float]:
    """Return the seconds of several matches."""
    times = []
    for keys in asked:
        begin = time.perf_counter()
        match(keys)
        times.append(time.perf_counter() - begin)
    return times


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has taken, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Return the resident bytes of a process that belong to it alone."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None, "Linux says so since 4.5"
    return 1024 * int(found[1])


class Law(NamedTuple):
    """``factor · blocks^exponent``."""

    factor: float
    exponent: float

    def at(self, blocks: int) -> float:
        """Return what it says of so many blocks."""
        return float(self.factor * blocks**self.exponent)


def memory_growth(rows: Sequence[Row]) -> Law | None:
    """Return the law that memory in bytes follows, beyond that of the smallest size; None if nothing is.

    What any number of blocks costs once, such as the sketch of sightings, would bend the law.
    """
    return _fitted(rows, memory_more(rows))


def memory_more(rows: Sequence[Row]) -> list[float]:
    """Return the bytes of memory that each size takes more than the smallest."""
    return _more([row.bytes_per_block * row.blocks for row in rows])


def restart_growth(rows: Sequence[Row]) -> Law | None:
    """Return the law that processor time of a start in seconds follows, beyond that of the smallest size."""
    return _fitted(rows, restart_more(rows))


def restart_more(rows: Sequence[Row]) -> list[float]:
    """Return the seconds of processor time that each start takes more than the shortest."""
    return _more([row.restart_cpu_s for row in rows])


def _more(values: Sequence[float]) -> list[float]:
    least = min(values)
    return [value - least for value in values]


def _fitted(rows: Sequence[Row], values: Sequence[float]) -> Law | None:
    """Fit a law by least squares of logarithms, to what is above 0."""
    above = [(row.blocks, value) for row, value in zip(rows, values, strict=True) if value > 0]
    if len(above) < 2:
        return None
    x, y = np.log(np.array(above)).T
    exponent, factor = np.polyfit(x, y, 1)
    return Law(float(np.exp(factor)), float(exponent))


def table(rows: Sequence[Row]) -> Table:
    """Return the figures as a table."""
    shown = Table(title="What blocks cost")
    for column in (
        "blocks",
        "memory, B each",
        f"match {ASKED}, ms",
        "over HTTP, ms",
        "CPU, ms",
        "start, s",
        "CPU, s",
    ):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(
            f"{row.blocks:,}", f"{row.bytes_per_block:,.0f}", f"{row.match_ms:.2f}",
            f"{row.match_http_ms:.2f}", f"{row.match_http_cpu_ms:.2f}", f"{row.restart_s:.2f}",
            f"{row.restart_cpu_s:.2f}",
        )  # fmt: skip
    return shown
