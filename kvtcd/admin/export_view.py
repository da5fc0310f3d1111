"""`kvtcd inspect` of an export: what its header says, and with its key all that is in it, found authentic."""

from __future__ import annotations

from pathlib import Path

from kvtcd import terminal
from kvtcd.admin.export_file import Survey, named, survey
from kvtcd.admin.key_files import read_key
from kvtcd.admin.store_contents import date
from kvtcd.core import archive


def is_export(file: Path) -> bool:
    """Tell whether a file says that it is one."""
    with named(file), file.open("rb") as opened:
        return opened.read(len(archive.MAGIC)) == archive.MAGIC


def command(file: Path, *, key: Path | None, json: Path | None) -> None:
    """Show an export.

    Args:
        file: that `kvtcd export` wrote.
        key: file of the key that it was written with; None: nothing but its header can be said.
        json: where to write the figures.

    Raises:
        ConfigError: a file cannot be read or written.
        Corrupt: it is of another release, of another key, damaged, or cut short.
    """
    console = terminal.console()
    with named(file), file.open("rb") as opened:
        version, salt = archive.header(opened.read(archive.HEADER_BYTES))
    rows: dict[str, object] = {
        "format": f"export, version {version}", "salt": salt.hex(), "file_bytes": file.stat().st_size
    }  # fmt: skip
    if key is None:
        rows["authentic"] = "not looked at: what is in it can be read with its key alone (--key FILE)"
    else:
        with terminal.progress(console, transient=True) as progress:
            rows |= _contents(survey(file, read_key(key), progress, "checking"))
        rows["authentic"] = "every frame from the first to the end, and the checksums of every blob"
    table = terminal.Table(title=f"Export {file}", show_header=False)
    for name, value in rows.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    console.print(table)
    if json:
        from kvtcd.lab.figures import write_json  # noqa: PLC0415 - torch

        write_json(json, "inspect", {"export": rows})


def _contents(found: Survey) -> dict[str, object]:
    ratio = found.raw_bytes / found.blob_bytes if found.blob_bytes else 0.0
    return {
        "namespace": found.namespace.name, "tenant": found.namespace.tenant,
        "model": found.namespace.identity.model, "blocks": found.blocks, "tokens": found.tokens,
        "raw_bytes": found.raw_bytes, "blob_bytes": found.blob_bytes, "ratio": f"{ratio:.1f}",
        "codecs": ", ".join(f"{count:,} {codec}" for codec, count in found.codecs.most_common()),
        "stored": f"{date(found.oldest)} to {date(found.newest)}" if found.blocks else "",
        "profiles": ", ".join(digest.hex() for digest in found.profiles),
    }  # fmt: skip
