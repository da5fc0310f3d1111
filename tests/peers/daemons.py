"""Daemons that frameworks store in, and waiting for what they hold: much is stored behind an answer."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from support.patience import PATIENCE_S

from kvtcd.client import Notice, What
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable

LOSSLESS = """
[match]
[codec]
name = "lossless"
"""
REFUSING = LOSSLESS + "[admit]\non_sight = 15\n"
"""Nothing new is taken until it was asked for so often."""
BOUND = 0.02
"""Nats of divergence that `KVTC2` allows a token, on average."""
KVTC2 = f"""
[match]
[codec]
name = "kvtc2"
max_kl = {BOUND}
"""


def new_daemon(
    folder: Path, *, host: int = 128 << 20, profiles: Path | None = None, policy: str | None = None
) -> Daemon:
    """Return a daemon that lies in a folder, and runs as long as it is used as a context."""
    folder.mkdir(exist_ok=True)
    if policy is not None:
        (folder / "policy.toml").write_text(policy)
    return Daemon(
        folder, host=host, disk=1 << 30, profiles=profiles or folder / "profiles",
        policy=folder / "policy.toml" if policy is not None else None,
    )  # fmt: skip


def until(is_so: Callable[[], object], say: Callable[[], object] = str) -> None:
    """Return once something is so; `say` is asked how things stand where it never is."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, say()
        time.sleep(0.1)


def holds(daemon: Daemon, blocks: int) -> None:
    """Wait until the daemon has so many blocks."""
    with daemon.client() as client:
        until(lambda: client.stats()["blocks"] == blocks, client.stats)


def settled(daemon: Daemon) -> None:
    """Wait until everything is on disk."""
    with daemon.client() as client:
        for namespace in client.namespaces():
            client.flush(namespace.name, deadline=PATIENCE_S)


def told(daemon: Daemon, policy: str) -> None:
    """Have a daemon of `new_daemon` read another policy."""
    (daemon.socket.parent / "policy.toml").write_text(policy)
    with daemon.client() as client:
        client.reload_policies()


def purged(daemon: Daemon) -> None:
    """Purge every namespace."""
    with daemon.client() as client:
        for namespace in client.namespaces():
            client.purge(namespace.name)


def emptied(daemon: Daemon) -> None:
    """Have a daemon come back with nothing, under another master key."""
    daemon.stop()
    shutil.rmtree(daemon.socket.parent / "state")
    daemon.start()


def listen(daemon: Daemon) -> str:
    """Have the daemon remember what it tells from now on; return the place where that begins."""
    with daemon.client() as client, closing(client.events(after="nowhere")) as told:
        first = next(told)
    assert first.what is What.OVERFLOW  # nobody knows the place that was asked for
    assert first.id is not None
    return first.id


def stored(daemon: Daemon, since: str, count: int) -> list[Notice]:
    """Return what was told of so many new blocks since a place."""
    found: list[Notice] = []
    with daemon.client() as client, closing(client.events(after=since)) as told:
        while len(found) < count:
            notice = next(told)
            if notice.what is What.STORED:
                found.append(notice)
    return found
