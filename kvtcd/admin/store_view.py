"""`kvtcd inspect` of a state directory: what lies on disk, in which state, and whether it is what was stored.

Nothing is changed, and no daemon may run on it meanwhile. Names of records are hashes that tell of neither
tokens nor engine keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from kvtcd import terminal
from kvtcd.admin.key_files import kept_key, read_key
from kvtcd.admin.store_contents import Store, date, look
from kvtcd.core.errors import ConfigError, StoreFailed
from kvtcd.core.keys import key_id
from kvtcd.terminal import Table
from kvtcd.tiers.state import at_rest as state_at_rest
from kvtcd.tiers.state_files import StateFiles


def command(path: Path, *, shown: int, verify: bool, key: Path | None, json: Path | None) -> bool:
    """Show a state directory, or the environment of one tenant in it; tell whether all is well.

    What could not be compared with its MAC for want of a key is not well: nobody has looked whether it is
    what was stored, and a daemon would not start.

    Args:
        path: the directory.
        shown: records to list of each tenant.
        verify: read every blob too, and compare it with its MAC and checksums.
        key: file of the master key; None: its own, if it keeps one.
        json: where to write the figures.

    Raises:
        AlreadyRunning: a daemon uses it.
        ConfigError: it is no such directory, or the file of the key cannot be used.
    """
    console = terminal.console()
    state, environments = _located(path)
    given = read_key(key) if key else None
    with ExitStack() as stack:
        stack.enter_context(state_at_rest(state))
        progress = stack.enter_context(terminal.progress(console, transient=True))
        master, lacking = (given, "") if given else kept_key(state)
        begun, stores, unread = StateFiles(state).rekeying(), list[Store](), dict[str, str]()
        named = key_id(master).hex() if master else ""
        aside = begun.others(named) if begun and begun.whole_under(named) else frozenset()
        for each in environments:
            if each.name in aside:
                continue
            try:
                stores.append(look(each, master, shown, progress, verify=verify))
            except StoreFailed as error:
                unread[each.name] = error.code
    for store in stores:
        _show(console, store, lacking, verify=verify)
    for name, why in unread.items():
        console.print(f"tenant {name} cannot be read: {why}", markup=False, soft_wrap=True)
    if begun:
        which = f". The key at hand is {begun.which(named)}" if master else ""
        console.print(
            f"{begun.said}{which}. Run `kvtcd rekey` again to have it ended", markup=False, soft_wrap=True
        )
    if not environments:
        console.print(f"{path}: nothing was stored yet")
    if json:
        from kvtcd.lab.figures import write_json  # noqa: PLC0415 - torch

        figures = {
            "path": str(path),
            "tenants": [_figures(store) for store in stores],
            "unreadable": [{"tenant": name, "why": why} for name, why in unread.items()],
            "rekey": asdict(begun) | {"said": begun.said} if begun else None,
        }
        write_json(json, "inspect", figures)
    return not (unread or begun) and all(_well(store) for store in stores)


def _well(store: Store) -> bool:
    unsound = store.fault or store.damaged or store.misfit or store.set_aside
    return not unsound and (store.authentic or not store.namespaces)


def _located(path: Path) -> tuple[Path, list[Path]]:
    """Return the state directory, and the environments in it that are meant."""
    if (path / "tenants").is_dir():
        files = StateFiles(path)
        return path, [files.tenant(tag) for tag in files.tenants()]
    if path.absolute().parent.name == "tenants":
        return path.absolute().parent.parent, [path]
    raise ConfigError(path, "", "is no state directory (it has no folder `tenants`), nor a tenant's in one")


def _figures(store: Store) -> dict[str, object]:
    held = {
        name: asdict(replace(each, codecs=dict(each.codecs), damaged=dict(each.damaged)))
        for name, each in store.namespaces.items()
    }
    return asdict(replace(store, namespaces={})) | {"namespaces": held}


def _show(console: Console, store: Store, lacking: str, *, verify: bool) -> None:
    where = "" if store.directory == store.tenant else f"\n{store.directory}"
    remarks = "; ".join(_remarks(store, lacking, verify=verify))
    table = Table(title=escape(f"tenant {store.tenant}{where}"), caption=escape(remarks))
    for heading in ("namespace", "blocks", "tokens", "raw MB", "packed MB", "ratio", "stored", "damaged"):
        table.add_column(heading, justify="left" if heading in {"namespace", "damaged"} else "right")
    for name, held in store.namespaces.items():
        by_codec = ", ".join(f"{count:,} {codec}" for codec, count in _often(held.codecs))
        faults = ", ".join(f"{count:,} {kind}" for kind, count in _often(held.damaged))
        stored = f"{date(held.oldest)}\n{date(held.newest)}" if held.blocks else ""
        table.add_row(
            "\n".join(filter(None, (name, held.model, by_codec))), f"{held.blocks:,}", f"{held.tokens:,}",
            f"{held.raw_bytes / 1e6:,.1f}", f"{held.blob_bytes / 1e6:,.1f}",
            f"{held.raw_bytes / held.blob_bytes:.1f}" if held.blob_bytes else "", stored, faults,
        )  # fmt: skip
    console.print(table)
    if store.records:
        listing = Table()
        for heading in store.records[0]:
            listing.add_column(heading)
        for row in store.records:
            listing.add_row(*("" if value is None else str(value) for value in row.values()))
        console.print(listing)


def _remarks(store: Store, lacking: str, *, verify: bool) -> Iterator[str]:
    yield f"left {store.condition}" + (f", and damaged: {store.fault}" if store.fault else "")
    yield f"file of {store.file_bytes / 1e6:,.1f} MB"
    if expired := sum(held.expired for held in store.namespaces.values()):
        yield f"{expired:,} blocks have expired"
    if store.unreadable:
        yield f"{store.unreadable:,} headers of records cannot be read"
    if store.set_aside:
        yield f"set aside as damaged: {', '.join(store.set_aside)}; have it purged, or move it away"
    compared = "envelopes and blobs" if verify else "envelopes"
    if store.authentic:
        yield f"MACs of {compared} compared"
    else:
        why = "the key does not fit this tenant" if store.misfit else lacking or "whose it is cannot be told"
        yield f"{why}: no MAC was compared" + (" (--key FILE names a key)" if lacking else "")


def _often(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])
