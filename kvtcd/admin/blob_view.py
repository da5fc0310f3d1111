"""`kvtcd inspect` of a blob: what its header says, and what each section takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from kvtcd import terminal
from kvtcd.admin.export_file import named
from kvtcd.core.blob import ALL_STREAMS, MAGIC, BasisId, Blob, Section, parse
from kvtcd.terminal import Table


@dataclass(frozen=True, slots=True)
class Row:
    """Sections of one kind, part and stream; `raw_bytes` before entropy coding, `nbytes` after."""

    kind: str
    stream: int | None
    part: int
    tokens: tuple[int, int]
    raw_bytes: int
    nbytes: int
    chunks: int
    stored: int


def is_blob(file: Path) -> bool:
    """Tell whether a file says that it is one."""
    with named(file), file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def command(file: Path, *, json: Path | None) -> None:
    """Show a blob, every checksum of which is compared.

    Raises:
        Corrupt: it is no blob, or damaged.
        ConfigError: it cannot be read.
    """
    with named(file):
        blob = parse(memoryview(file.read_bytes()))
        for section in blob.sections:
            blob.payload(section)
    rows = [_row(section) for section in blob.sections]
    _show(terminal.console(), blob, rows)
    if json:
        from kvtcd.lab.figures import write_json  # noqa: PLC0415 - torch

        write_json(json, "inspect", {"header": _header(blob), "sections": [asdict(row) for row in rows]})


def _header(blob: Blob) -> dict[str, object]:
    header = blob.header
    return {
        "codec": header.codec.name.lower().replace("_", "-"),
        "codec_version": header.codec_version,
        "dtype": header.dtype.value,
        "layout": header.layout.hex(),
        "profile": header.profile.hex() if any(header.profile) else None,
        "basis": header.basis.name.lower() if header.basis is not BasisId.NONE else None,
        "plan": header.plan or None,
        "step": header.step or None,
        "token_classes": header.token_classes or None,
        "first_token": header.first_token,
        "tokens": header.tokens,
        "raw_bytes": header.raw_bytes,
        "blob_bytes": len(blob.data),
        "ratio": header.raw_bytes / len(blob.data),
    }


def _row(section: Section) -> Row:
    return Row(
        section.kind.name.lower(), None if section.stream == ALL_STREAMS else section.stream, section.part,
        (section.token_start, section.token_start + section.token_count), section.raw_bytes, section.nbytes,
        len(section.chunks), sum(stored for _, stored in section.chunks),
    )  # fmt: skip


def _show(console: Console, blob: Blob, rows: list[Row]) -> None:
    about = Table(title="Blob", show_header=False)
    for name, value in _header(blob).items():
        if value is not None:
            about.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(about)
    table = Table(
        title="Sections", caption="bytes before and after DEFLATE; chunks, of them stored as they are"
    )
    for heading in ("kind", "stream", "part", "tokens", "before", "after", "chunks", "as they are"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in rows:
        start, end = row.tokens
        table.add_row(
            row.kind, "all" if row.stream is None else str(row.stream), str(row.part), f"{start}..{end - 1}",
            f"{row.raw_bytes:,}", f"{row.nbytes:,}", f"{row.chunks:,}", f"{row.stored:,}",
        )  # fmt: skip
    console.print(table)
