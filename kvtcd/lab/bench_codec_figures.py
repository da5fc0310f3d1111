"""What `bench codec` has measured, and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD

from kvtcd.lab.bench_codec_floor import Form
from kvtcd.lab.bench_codec_timing import OTHER
from kvtcd.terminal import Table

STAGES = (
    "graph", "product", "rotate", "classify", "quantise", "dequantise", "pack", "unpack", "deflate",
    "inflate", "copy", OTHER,
)  # fmt: skip
"""Of all codecs, both ways: what is replayed, then the products."""


@dataclass(frozen=True, slots=True)
class Row:
    """One codec in one case.

    Attributes:
        p: features of each of the two streams.
        rank: components of each; None where there are none.
        ratio: of the raw bytes to the packed ones.
        encode_mb_s, decode_mb_s: raw bytes a second, in millions.
        encode_over_floor, decode_over_floor: time over that of the bare products; None without products.
        encode_stages, decode_stages: seconds of one block, which add up to the whole; empty without products.
    """

    codec: str
    p: int
    rank: int | None
    device: str
    ratio: float
    encode_mb_s: float
    decode_mb_s: float
    encode_over_floor: float | None
    decode_over_floor: float | None
    encode_stages: Mapping[str, float]
    decode_stages: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Floor:
    """The bare products of both streams of one case, in their fastest forms; speeds as in `Row`."""

    p: int
    rank: int
    device: str
    encode_mb_s: float
    decode_mb_s: float
    encode_form: Form
    decode_form: Form


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured, in the order of the cases."""

    rows: tuple[Row, ...]
    floors: tuple[Floor, ...]


def speeds(figures: Figures) -> Table:
    """Return speeds and times over the floor, by case."""
    shown = Table(
        title="Codecs and the bare products: raw MB/s, and time over that of the products",
        caption="ratio: of blocks that are made up here; it says nothing of a model's",
    )
    for column in ("p", "rank", "codec", "ratio", "encode", "over", "decode", "over"):
        shown.add_column(column, justify="left" if column == "codec" else "right")
    for floor in figures.floors:
        shown.add_row(
            f"{floor.p:,}", f"{floor.rank:,}", f"products, {floor.encode_form.dtype}", "",
            f"{floor.encode_mb_s:,.0f}", "1.00", f"{floor.decode_mb_s:,.0f}", "1.00", style="dim",
        )  # fmt: skip
        for row in figures.rows:
            if (row.p, row.rank) == (floor.p, floor.rank):
                _add(shown, row)
    for row in figures.rows:
        if row.rank is None:
            _add(shown, row)
    return shown


def _add(shown: Table, row: Row) -> None:
    over = [
        "" if ratio is None else f"{ratio:.2f}" for ratio in (row.encode_over_floor, row.decode_over_floor)
    ]
    shown.add_row(
        f"{row.p:,}", "" if row.rank is None else f"{row.rank:,}", row.codec, f"{row.ratio:.1f}",
        f"{row.encode_mb_s:,.0f}", over[0], f"{row.decode_mb_s:,.0f}", over[1],
    )  # fmt: skip


def stages(figures: Figures) -> tuple[Table, ...]:
    """Return what the stages of encoding and of decoding take, in milliseconds of a block."""
    coded = [row for row in figures.rows if row.rank is not None]
    return (
        _stages("Encoding", [(row, row.encode_stages) for row in coded]),
        _stages("Decoding", [(row, row.decode_stages) for row in coded]),
    )


def _stages(what: str, rows: list[tuple[Row, Mapping[str, float]]]) -> Table:
    names = [name for name in STAGES if any(name in found for _, found in rows)]
    shown = Table(
        title=f"{what} by stage, ms a block", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
    )
    for column in ("p", "rank", "codec", *names):
        shown.add_column(column, justify="left" if column == "codec" else "right")
    for row, found in rows:
        times = (f"{1000 * found[name]:.1f}" if name in found else "" for name in names)
        shown.add_row(f"{row.p:,}", f"{row.rank:,}", row.codec, *times)
    return shown
