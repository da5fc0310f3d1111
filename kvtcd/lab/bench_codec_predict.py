"""How long the stages of a codec take on a card, from what they do and what the card can: before measuring.

A stage takes what the slower of two takes: the host, which tells the device one thing after the other and
sometimes waits for it, and the device, which works at the rates of its units. What crosses the bus is added,
although one part of a block does so while the next is decoded. Chunks of DEFLATE are a core's unless there
are enough of them (`codec.nvcomp.worthwhile`). nvCOMP works on all that find room on the device at once, and
on each of them slowly, so a few take as long as thousands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from rich.box import SIMPLE_HEAD

from kvtcd.codec.nvcomp import worthwhile
from kvtcd.core.blob import CHUNK_BYTES
from kvtcd.lab.bench_codec_case import Case
from kvtcd.lab.bench_codec_figures import STAGES, Row
from kvtcd.lab.bench_codec_work import Work, counted
from kvtcd.terminal import Table

BUS = 55e9
"""Bytes a second to or from pinned memory: PCIe 5.0 with sixteen lanes, 64 GB/s with headers of packets."""
LAUNCH, WAIT = 5e-6, 20e-6
"""Seconds that a host needs to tell of one operation or recording, through Python and torch; and from the end
of work on the device until it has told it of more."""
RUN = 2e-6
"""Seconds that an operation takes on the device beside its work, however small: a guess."""
AT_ONCE = 16 * 132
"""Chunks on a Hopper card at once: sixteen on each multiprocessor, a guess."""


class Entropy(NamedTuple):
    """Raw bytes a second, of one core of a CPU and of one chunk on a device."""

    core: float
    chunk: float


ENTROPY = {
    "deflate": Entropy(0.19e9, 4.7 * 2**30 / AT_ONCE),
    "inflate": Entropy(0.55e9, 9.3 * 2**30 / AT_ONCE),
}
"""By stage. Of a core as zlib-ng and isal were measured; of all chunks together as follows from table 5 of
the paper (arXiv 2511.01815), an H100."""


class Card(NamedTuple):
    """What a device can do in a second: operations of bfloat16 products, and bytes of its memory."""

    flop: float
    memory: float


CARDS = {"h100": Card(0.7 * 989e12, 0.85 * 3.35e12), "h200": Card(0.7 * 989e12, 0.85 * 4.8e12)}
"""By a part of the name that CUDA has for them. Of what data sheets say, large products reach seven tenths
and plain copies 85 %."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """One stage of one block.

    Attributes:
        raw: bytes of the block.
        work: what the stage does.
        host, device, bus: seconds of each; for chunks the host is one core, and the device nvCOMP.
    """

    codec: str
    p: int
    rank: int
    raw: int
    way: str
    stage: str
    work: Work
    host: float
    device: float
    bus: float

    @property
    def seconds(self) -> float:
        """How long the stage takes."""
        return max(self.host, self.device) + self.bus


def card_named(name: str) -> str:
    """Return which of `CARDS` CUDA calls so; empty if it is none of them."""
    return next((card for card in CARDS if card in name.lower()), "")


def predict_stages(
    codec: str, case: Case, card: Card, *, kernels: bool = True, graphs: bool = True
) -> list[Predicted]:
    """Predict every stage of a codec for the block of a case, encoding first, in the order of `STAGES`.

    `kernels`, `graphs`: as of `counted`.
    """
    return [
        Predicted(
            codec,
            case.p,
            case.rank,
            case.raw.nbytes,
            way,
            stage,
            found[stage],
            *_seconds(stage, found[stage], card),
        )
        for way, found in counted(codec, case, kernels=kernels, graphs=graphs).items()
        for stage in sorted(found, key=STAGES.index)
    ]


def _seconds(stage: str, work: Work, card: Card) -> tuple[float, float, float]:
    """Return the seconds of host, device and bus."""
    if not work.chunks:
        host = work.launches * LAUNCH + work.waits * WAIT
        products = max(work.flop / card.flop, work.products / card.memory)
        device = products + (work.memory - work.products) / card.memory + work.runs * RUN
        return host, device, work.bus / BUS
    rates = ENTROPY[stage]
    if not worthwhile(work.chunks):
        return work.codes / rates.core, 0.0, 0.0
    return 0.0, math.ceil(work.chunks / AT_ONCE) * CHUNK_BYTES / rates.chunk, work.codes / BUS


def tables(card: str, predicted: Iterable[Predicted], measured: Iterable[Row] = ()) -> list[Table]:
    """Return predictions: of every way by stage, beside what was measured of it, and then speeds of all."""
    found = {(row.codec, row.p, row.rank): row for row in measured}
    speeds = _table(
        f"Predicted for {card}: raw GB/s of one block, of a pipeline, and if nothing else took time",
        ("p", "rank", "codec", "way", "block", "pipeline", "host", "device", "bus", "entropy"),
    )
    shown: list[Table] = []
    for (p, rank, codec, way), grouped in groupby(
        predicted, lambda one: (one.p, one.rank, one.codec, one.way)
    ):
        stages, row = list(grouped), found.get((codec, p, rank))
        took = {} if row is None else {"encode": row.encode_stages, "decode": row.decode_stages}.get(way, {})
        title = f"{codec}, {way}, p = {p:,}, rank {rank:,}, predicted for {card}: work, and milliseconds"
        shown.append(_by_stage(title, stages, took))
        speeds.add_row(f"{p:,}", f"{rank:,}", codec, way, *(f"{each / 1e9:.1f}" for each in _speeds(stages)))
    return [*shown, speeds]


def _by_stage(title: str, stages: Iterable[Predicted], measured: Mapping[str, float]) -> Table:
    columns = ("stage", "launches", "runs", "waits", "GFLOP", "MB", "chunks", "host", "device", "bus", "all")
    shown = _table(title, (*columns, *(["measured"] if measured else [])))
    for one in stages:
        work = one.work
        counts = (
            work.launches,
            work.runs,
            work.waits,
            f"{work.flop / 1e9:.1f}",
            f"{work.memory / 1e6:.1f}",
            work.chunks,
        )
        took = [one.host, one.device, one.bus, one.seconds]
        if measured:
            took.append(measured.get(one.stage, 0.0))
        shown.add_row(one.stage, *map(str, counts), *(f"{1000 * each:.3f}" for each in took))
    return shown


def _speeds(stages: Sequence[Predicted]) -> Iterator[float]:
    """Return bytes a second of one block, of a pipeline whose entropy stage overlaps, and of the parts."""
    others = [one for one in stages if not one.work.chunks]
    whole = sum(one.seconds for one in stages)
    entropy = whole - sum(one.seconds for one in others)
    parts = (sum(getattr(one, part) for one in others) for part in ("host", "device", "bus"))
    for took in (whole, max(entropy, whole - entropy), *parts, entropy):
        yield stages[0].raw / took


def _table(title: str, columns: Iterable[str]) -> Table:
    shown = Table(title=title, box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        shown.add_column(column, justify="left" if column in {"stage", "codec", "way"} else "right")
    return shown
