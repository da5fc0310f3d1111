"""`kvtcd compact`: the files of a store as long as what is in them; what is damaged is named.

What was written is read once more and compared with its MACs and checksums, as `kvtcd inspect --verify`
does: a record whose bytes are wrong is copied as it is. A daemon drops it when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from kvtcd import terminal
from kvtcd.admin.key_files import kept_key, read_key
from kvtcd.admin.room import require_room
from kvtcd.admin.store_contents import look
from kvtcd.core.errors import StoreFailed
from kvtcd.engine.namespaces import TENANT_NAME
from kvtcd.terminal import Table
from kvtcd.tiers.disk import UNBOUNDED, Environment
from kvtcd.tiers.state import StateDirectory


@dataclass(frozen=True, slots=True)
class Compacted:
    """What became of one environment.

    Attributes:
        tenant: its name; of one whose tenant has not come again, nothing.
        before, after: bytes of all its files.
        set_aside: what was damaged, now or earlier, and lies beside it, as a daemon would leave it.
        lost: records that were not copied: parts of them were missing.
        damaged: records that were, and are not what was stored, as far as can be told.
        authentic: whether MACs were compared, or there was nothing to compare.
        misfit: whether the key at hand is not this tenant's.
    """

    tenant: str
    before: int
    after: int
    set_aside: tuple[str, ...]
    lost: int
    damaged: int
    authentic: bool
    misfit: bool

    @property
    def well(self) -> bool:
        """Whether nothing of it was damaged, as far as a key that fits can tell."""
        return not (self.set_aside or self.lost or self.damaged or self.misfit)

    def remarks(self) -> Iterator[str]:
        """Yield what is to be said of it."""
        if self.set_aside:
            yield f"damaged, and set aside: {', '.join(self.set_aside)}; have it purged, or move it away"
        if self.lost:
            yield f"{self.lost:,} records of which parts were missing are gone"
        if self.damaged:
            yield f"{self.damaged:,} records are damaged (`kvtcd inspect --verify`); a daemon drops them"
        if not self.authentic:
            yield ("the key does not fit this tenant: " if self.misfit else "") + "no MAC was compared"


def command(path: Path, *, key: Path | None = None) -> bool:
    """Write the environment of every tenant anew, one by one; tell whether all were, and nothing was damaged.

    What was set aside as damaged is named, and stays until somebody has it purged or moves it away: only then
    does a daemon no longer say so. An environment that cannot be read, or for a second copy of which there is
    no room, is as it was, and named.

    Args:
        path: the state directory; no daemon may use it.
        key: file of the master key; None: its own, if it keeps one.

    Raises:
        AlreadyRunning: a daemon uses it.
        ConfigError: it is no state directory, or the file of the key cannot be used.
    """
    table, well, unread = Table(title=f"{path}, MB"), True, False
    for heading in ("tenant", "before", "now", ""):
        table.add_column(heading, justify="right" if heading in {"before", "now"} else "left")
    given = read_key(key) if key else None
    with ExitStack() as stack:
        state = stack.enter_context(closing(StateDirectory.existing(path)))
        master, lacking = (given, "") if given else kept_key(path)
        progress = stack.enter_context(terminal.progress(terminal.console(), transient=True))
        for tag in state.tenants():
            try:
                done = compact(state.tenant(tag), master, progress)
            except StoreFailed as error:
                well = False
                table.add_row(tag, "", "", f"as it was: {error}")
                continue
            well, unread = well and done.well, unread or not done.authentic
            whose = f"{done.tenant}\n{tag}" if done.tenant else tag
            sizes = (f"{each / 1e6:,.1f}" for each in (done.before, done.after))
            table.add_row(whose, *sizes, "; ".join(done.remarks()))
    terminal.console().print(table)
    if unread and lacking:
        said = f"{lacking}: checksums alone were compared (--key FILE names a key)"
        terminal.console().print(said, markup=False, soft_wrap=True)
    return well


def compact(environment: Path, master: bytes | None, progress: Progress) -> Compacted:
    """Write one environment anew, and read what was written.

    Args:
        environment: that no process has open.
        master: the master key; without it, MACs are not compared.
        progress: shows how much was read.

    Raises:
        StoreFailed, StoreFull: it cannot be read, or there is no room for a second copy; it is as it was.
    """
    try:
        before = _bytes(environment)
    except OSError as error:
        raise StoreFailed("open", str(error)) from error
    with closing(Environment(environment, quota=UNBOUNDED)) as opened:
        # a purge makes do with less room and loses blocks; that is not what was asked for here
        require_room("compact", environment, opened.used)
        names, there = opened.namespaces(), _records(opened)
        opened.rewrite(lambda _: True, names)
        aside, lost = opened.set_aside, there - _records(opened)
    tenant = names.get(TENANT_NAME, b"").decode(errors="replace")
    found = look(environment, master, 0, progress, verify=True)
    authentic = found.authentic or not found.namespaces
    return Compacted(
        tenant, before, _bytes(environment), aside, lost, found.damaged, authentic, misfit=found.misfit
    )


def _records(opened: Environment) -> int:
    return sum(len(page.keys) + page.unreadable for page in opened.scan())


def _bytes(environment: Path) -> int:
    return sum(file.stat().st_size for file in environment.rglob("*") if file.is_file())
