"""`kvtcd compact`: the files of a store as long as what is in them; what was set aside as damaged stays."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvtcd import terminal
from kvtcd.admin.room import require_room
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
    """

    tenant: str
    before: int
    after: int
    set_aside: tuple[str, ...]


def command(path: Path) -> bool:
    """Write the environment of every tenant anew, one after the other; tell whether all of them were.

    What was set aside as damaged is named, and stays until somebody has it purged or moves it away: only then
    does a daemon no longer say so. An environment that cannot be read, or for a second copy of which there is
    no room, is as it was, and named.

    Args:
        path: the state directory; no daemon may use it.

    Raises:
        AlreadyRunning: a daemon uses it.
        ConfigError: it is no state directory.
    """
    table, well = Table(title=f"{path}, MB"), True
    for heading in ("tenant", "before", "now", ""):
        table.add_column(heading, justify="right" if heading in {"before", "now"} else "left")
    with closing(StateDirectory.existing(path)) as state:
        for tag in state.tenants():
            try:
                done = compact(state.tenant(tag))
            except StoreFailed as error:
                well = False
                table.add_row(tag, "", "", f"as it was: {error}")
                continue
            well = well and not done.set_aside
            aside = f"damaged, and set aside: {', '.join(done.set_aside)}; have it purged, or move it away"
            said = aside if done.set_aside else ""
            whose = f"{done.tenant}\n{tag}" if done.tenant else tag
            table.add_row(whose, f"{done.before / 1e6:,.1f}", f"{done.after / 1e6:,.1f}", said)
    terminal.console().print(table)
    return well


def compact(environment: Path) -> Compacted:
    """Write one environment anew.

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
        names = opened.namespaces()
        opened.rewrite(lambda _: True, names)
        tenant = names.get(TENANT_NAME, b"").decode(errors="replace")
        return Compacted(tenant, before, _bytes(environment), opened.set_aside)


def _bytes(environment: Path) -> int:
    return sum(file.stat().st_size for file in environment.rglob("*") if file.is_file())
