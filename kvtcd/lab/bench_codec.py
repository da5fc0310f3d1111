"""`kvtcd bench codec`: how fast codecs are, and how far from the matrix products that they cannot do without.

For each number of features and each rank a profile and a block are made up (`bench_codec_case`). The codecs
run as a daemon runs them, both halves one after the other, beside the bare products in their fastest form
(`bench_codec_floor`) and beside packers without a transform (`bench_codec_packers`), all in turn and on the
same bytes (`bench_codec_timing`). A figure is that of the run of median time. For a card the same stages are
predicted (`bench_codec_predict`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from rich.progress import Progress

from kvtcd import terminal
from kvtcd.codec.staged import Accelerator
from kvtcd.codec.uniform import InTorch
from kvtcd.core.errors import ConfigError
from kvtcd.lab.accelerator import accelerator_for
from kvtcd.lab.bench_codec_case import TOKENS, Case, check, make
from kvtcd.lab.bench_codec_figures import Figures, Floor, Row, speeds, stages
from kvtcd.lab.bench_codec_floor import Products, products
from kvtcd.lab.bench_codec_packers import CODECS, PEERS, Packer, codec, peer
from kvtcd.lab.bench_codec_predict import CARDS, Predicted, card_named, predict_stages, tables
from kvtcd.lab.bench_codec_timing import Clock, DeviceClock, HostClock, Run, in_turn
from kvtcd.lab.figures import write_json
from kvtcd.terminal import Table

FEATURES = (5760, 14_336, 32_768)
RANKS = (512, 1024, 2048)
_PRODUCTS = "products"

Runs = Mapping[tuple[str, str], Run]
"""By codec, or `_PRODUCTS`, and way: encode or decode."""


def command(
    *,
    features: Sequence[int],
    ranks: Sequence[int],
    codecs: Sequence[str],
    threads: int,
    device: str,
    predict: str,
    kernels: bool,
    graphs: bool,
    seconds: float,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Measure or predict, show tables, and write figures and a plot if asked.

    What is measured on a card of which something is known is predicted as well.

    Args:
        features: of each stream; none: `FEATURES`.
        ranks: of each; none: those of `RANKS` that fit.
        codecs: of `CODECS` and `PEERS`; none: all.
        threads: of the CPU.
        device: where codecs and products run.
        predict: a card of `CARDS`: measure nothing, predict what it takes; empty: measure.
        kernels: round and pack by kernels where a card has them; else by torch's operations.
        graphs: on a card replay what recurs.
        seconds: about how long measuring may take.
        json: file for the figures.
        plot: file for the plot.

    Raises:
        ConfigError: no such codec, shape, rank or card.
        Unavailable: the device is not there, or a library.
    """
    known = (*CODECS, *PEERS)
    if strangers := sorted(set(codecs) - set(known)):
        raise ConfigError("--codec", "", f"{strangers[0]!r} is not one of {', '.join(known)}")
    sizes = [(p, rank) for p in features or FEATURES for rank in ranks or _fitting(p)]
    for p, rank in sizes:
        check(p, rank)
    if predict and predict not in CARDS:
        raise ConfigError("--predict", "", f"{predict!r} is not one of {', '.join(CARDS)}")
    accelerator = None if predict else accelerator_for(device)
    if accelerator and not kernels:
        accelerator = replace(accelerator, arithmetic=InTorch())
    if accelerator and not graphs:
        accelerator = replace(accelerator, graphs=None)
    kernels = kernels and not (accelerator and isinstance(accelerator.arithmetic, InTorch))
    figures = Figures((), ())
    with (
        _threads(threads),
        _launching(accelerator),
        terminal.progress(terminal.console(), transient=True) as progress,
    ):
        if not predict:
            clock = DeviceClock() if accelerator else HostClock(threads)
            bench = Bench(codecs or known, accelerator, clock)
            figures = bench.measure(sizes, seconds, progress)
        card = predict or (card_named(torch.cuda.get_device_name(accelerator.device)) if accelerator else "")
        transformed = [name for name in CODECS if not codecs or name in codecs]
        how = {"kernels": kernels, "graphs": graphs}
        foreseen = _foreseen(sizes, transformed, card, progress, **how) if card else []
        if json:
            stages_ = [{**asdict(one), "seconds": one.seconds} for one in foreseen]
            found = {"tokens": TOKENS, **asdict(figures), "card": card, **how, "predicted": stages_}
            write_json(json, "bench codec", found)
    for table in (*_measured(figures), *(tables(card, foreseen, figures.rows) if card else ())):
        terminal.console().print(table)
    if plot and not predict:
        from kvtcd.lab.bench_codec_plot import draw  # noqa: PLC0415 - an extra

        draw(figures, plot)


def _measured(figures: Figures) -> tuple[Table, ...]:
    return (speeds(figures), *stages(figures)) if figures.rows else ()


def _foreseen(
    sizes: Sequence[tuple[int, int]], codecs: Sequence[str], card: str, progress: Progress, **how: bool
) -> list[Predicted]:
    """Predict all cases, given as features and rank; `how` as of `predict_stages`."""
    found: list[Predicted] = []
    for p, rank in progress.track(sizes, description=f"predicting for {card}"):
        case = make(p, rank)
        for name in codecs:
            found += predict_stages(name, case, CARDS[card], **how)
    return found


def _fitting(p: int) -> list[int]:
    ranks = [rank for rank in RANKS if 2 * rank <= p]
    if not ranks:
        known = ", ".join(map(str, RANKS))
        raise ConfigError("--rank", "", f"no rank of {known} fits {p} features; name one")
    return ranks


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _launching(accelerator: Accelerator | None) -> Iterator[None]:
    """Tell all to the device that was asked for, on a stream: of the default one nothing is replayed."""
    if accelerator is None:
        yield
        return
    device = accelerator.device
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]  # torch says no types
        yield


@dataclass(frozen=True)
class Bench:
    """What is measured, where, and by which clock."""

    codecs: Sequence[str]
    accelerator: Accelerator | None
    clock: Clock

    @property
    def device(self) -> torch.device:
        """Where codecs and products run."""
        return self.accelerator.device if self.accelerator else torch.device("cpu")

    def measure(self, sizes: Sequence[tuple[int, int]], seconds: float, progress: Progress) -> Figures:
        """Measure all cases, given as features and rank; each has its share of the time, by its products."""
        begin = time.monotonic()
        task = progress.add_task("", total=seconds)
        work = list(accumulate(p * rank for p, rank in sizes))
        rows: list[Row] = []
        floors: list[Floor] = []
        for (p, rank), done in zip(sizes, work, strict=True):
            progress.update(task, description=f"{p:,} features, rank {rank:,}")
            case, met = make(p, rank), {row.p for row in rows}
            packers = self._packers(case, peers=p not in met)
            bare = products(TOKENS, p, rank, device=self.device, clock=self.clock)
            calls = {(_PRODUCTS, "encode"): bare.encode, (_PRODUCTS, "decode"): bare.decode}
            for name, packer in packers.items():
                calls |= {(name, "encode"): packer.encode, (name, "decode"): packer.decode}
            runs = in_turn(
                calls, self.clock, begin + seconds * done / work[-1],
                lambda: progress.update(task, completed=min(seconds, time.monotonic() - begin)),
            )  # fmt: skip
            floors.append(_floor(case, bare, runs, self.device))
            rows += [_row(name, packer, case, runs) for name, packer in packers.items()]
        return Figures(tuple(rows), tuple(floors))

    def _packers(self, case: Case, *, peers: bool) -> dict[str, Packer]:
        """What packs the block; peers do not depend on the rank, so they are asked once for each `p`."""
        found = {name: codec(name, case, self.accelerator) for name in CODECS if name in self.codecs}
        if peers:
            found |= {name: peer(name, case.raw, self.device) for name in PEERS if name in self.codecs}
        return found


def _floor(case: Case, bare: Products, runs: Runs, device: torch.device) -> Floor:
    return Floor(
        p=case.p,
        rank=case.rank,
        device=device.type,
        encode_mb_s=_mb_s(case, runs[_PRODUCTS, "encode"]),
        decode_mb_s=_mb_s(case, runs[_PRODUCTS, "decode"]),
        encode_form=bare.encode_form,
        decode_form=bare.decode_form,
    )


def _row(name: str, packer: Packer, case: Case, runs: Runs) -> Row:
    encode, decode = runs[name, "encode"], runs[name, "decode"]
    transformed = name in CODECS
    return Row(
        codec=name,
        p=case.p,
        rank=case.rank if transformed else None,
        device=packer.device,
        ratio=case.raw.nbytes / packer.nbytes,
        encode_mb_s=_mb_s(case, encode),
        decode_mb_s=_mb_s(case, decode),
        encode_over_floor=encode.seconds / runs[_PRODUCTS, "encode"].seconds if transformed else None,
        decode_over_floor=decode.seconds / runs[_PRODUCTS, "decode"].seconds if transformed else None,
        encode_stages=encode.stages if transformed else {},
        decode_stages=decode.stages if transformed else {},
    )


def _mb_s(case: Case, run: Run) -> float:
    return case.raw.nbytes / 1e6 / run.seconds
