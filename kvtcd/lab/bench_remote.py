"""`kvtcd bench remote`: how fast the remote tier is, beside the library alone that speaks to the same store.

The same values, as large as records of blocks that do not shrink, go to the store and come back: by the tier,
with its queue, names, MACs and host memory; by the client library as it comes, in batches as large and with
as many at once; and by the client that the tier has, alone. They take turns within each round, and another
begins in the next; figures are medians over rounds. Where other work keeps the cores busy, seconds that pass
say more of the scheduler than of the way: seconds of this process's CPU stand beside.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from kvtcd import terminal
from kvtcd.engine.ports import RemoteStore
from kvtcd.lab.figures import write_json
from kvtcd.lab.remote_rig import WAYS, Rig, Took
from kvtcd.lab.store_libraries import Library
from kvtcd.terminal import Table

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Speed:
    """10⁶ bytes per second, and per second of the process's CPU."""

    mb_s: float
    cpu_mb_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One direction, one size.

    Attributes:
        verb: put or get.
        mib: of a record.
        tier: how fast that is.
        library: the client library as it comes.
        client: the client that the tier has, alone: the most that the tier could do.
        ratio: of the tier to the library, the median of the ratios of rounds.
        cpu_ratio: the same by seconds of CPU.
        client_ratio: of the tier to the client that it has.
    """

    verb: str
    mib: int
    tier: Speed
    library: Speed
    client: Speed
    ratio: float
    cpu_ratio: float
    client_ratio: float


def command(
    *, store: Callable[[], RemoteStore], library: Callable[[], Library], sizes: Sequence[int], blocks: int,
    rounds: int, json: Path | None,
) -> None:  # fmt: skip
    """Measure, show a table, and write the figures if asked.

    Args:
        store: makes a client as the tier has it.
        library: makes the library of the same store as it comes.
        sizes: MiB of records.
        blocks: records of one timing.
        rounds: how often each way is timed.
        json: file for the figures.

    Raises:
        RemoteFailed: the store cannot be asked.
    """
    rows: list[Row] = []
    console = terminal.console()
    with terminal.progress(console, transient=True) as progress:
        for mib in progress.track(sizes, description="records, size by size"):
            with tempfile.TemporaryDirectory(prefix="kvtcd-bench-") as folder:
                measured = measure(store, library, Path(folder), mib=mib, blocks=blocks, rounds=rounds)
                rows += asyncio.run(measured)
    table = Table("verb", "MiB", "tier", "library", "client", "ratio", "by CPU", "to client")
    for row in rows:
        table.add_row(
            row.verb,
            str(row.mib),
            _said(row.tier),
            _said(row.library),
            _said(row.client),
            f"{row.ratio:.2f}",
            f"{row.cpu_ratio:.2f}",
            f"{row.client_ratio:.2f}",
        )
    console.print(table)
    if json:
        write_json(json, "bench remote", {"rows": [asdict(row) for row in rows]})


def _said(speed: Speed) -> str:
    return f"{speed.mb_s:,.0f} ({speed.cpu_mb_s:,.0f})"


async def measure(
    store: Callable[[], RemoteStore], library: Callable[[], Library], folder: Path, *, mib: int, blocks: int,
    rounds: int,
) -> list[Row]:  # fmt: skip
    """Return a row for each direction; the first round warms up and is not counted."""
    rig = Rig(store, library, folder, mib * MIB, blocks)
    taken: dict[tuple[str, str], list[Took]] = {}
    try:
        for number in range(rounds + 1):
            seconds = await rig.round(number)
            for way in seconds if number else ():
                taken.setdefault(way, []).append(seconds[way])
    finally:
        await rig.close()
    size = mib * blocks * MIB / 1e6
    return [_row(verb, mib, size, {way: taken[verb, way] for way in WAYS}) for verb in ("put", "get")]


def _row(verb: str, mib: int, size: float, taken: Mapping[str, Sequence[Took]]) -> Row:
    rounds = [*zip(*(taken[way] for way in WAYS), strict=True)]
    tier, library, client = (
        Speed(size / median(took.seconds for took in way), size / median(took.cpu_s for took in way))
        for way in (taken[name] for name in WAYS)
    )
    return Row(
        verb, mib, tier, library, client,
        ratio=median(library.seconds / tier.seconds for tier, library, _ in rounds),
        cpu_ratio=median(library.cpu_s / tier.cpu_s for tier, library, _ in rounds),
        client_ratio=median(client.seconds / tier.seconds for tier, _, client in rounds),
    )  # fmt: skip
