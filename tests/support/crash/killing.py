"""Children that are killed: at any time, or at the n-th change they make."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import lmdb
from support.crash import workload

from kvtcd.admin import rekey
from kvtcd.core.errors import StoreFull
from kvtcd.tiers.disk import Environment
from kvtcd.tiers.disk import environment as environment_module
from kvtcd.tiers.disk.generation import Generation
from kvtcd.tiers.state import StateDirectory

Arm = Callable[[], None]


def write_until_killed(path: str, log: str, seed: int, first: int) -> None:
    """Write steps from `first` on, one line of the log for each report, until a signal comes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def report(what: str, number: int) -> None:
        os.write(descriptor, f"{what} {number}\n".encode())

    environment = Environment(Path(path), quota=workload.QUOTA)
    report("quarantined" if environment.quarantined else "open", first)
    workload.run(environment, seed, itertools.count(first), report)


def die_at(call: int, operation: str, path: str) -> str:
    """Do one of `OPERATIONS` on an environment, and die by SIGKILL just before its `call`-th change."""
    calls = itertools.count(1)

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return wrapper

    def arm() -> None:
        for owner, names in _CHANGES:
            for name in names:
                setattr(owner, name, mortal(getattr(owner, name)))

    OPERATIONS[operation](Path(path), arm)
    return "survived"


def kept(envelope: bytes) -> bool:
    """Whether a record survives the rewrites of these tests: about half of them do."""
    return bool(envelope[0] & 1)


_CHANGES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (os, ("open", "mkdir", "rename", "fsync", "pwrite", "unlink", "rmdir")),
    (lmdb, ("open",)),
    (Generation, ("write", "put_namespaces", "sync", "close")),
)


def _open(path: Path, arm: Arm) -> None:
    arm()
    Environment(path, quota=workload.QUOTA)


def _close(path: Path, arm: Arm) -> None:
    environment = Environment(path, quota=workload.QUOTA)
    arm()
    environment.close()


def _rewrite(path: Path, arm: Arm) -> None:
    environment = Environment(path, quota=workload.QUOTA)
    arm()
    environment.rewrite(kept, {"kept": b"identity"})


def _rewrite_without_room(path: Path, arm: Arm) -> None:
    environment = Environment(path, quota=workload.QUOTA)

    def full(*_: object) -> NoReturn:
        raise StoreFull("rewrite", "ENOSPC")

    environment_module.copied = full
    arm()
    environment.rewrite(kept, {"kept": b"identity"})


def _drop_set_aside(path: Path, arm: Arm) -> None:
    environment = Environment(path, quota=workload.QUOTA)
    arm()
    environment.drop_set_aside()


def _rekey(path: Path, arm: Arm) -> None:
    arm()
    with contextlib.redirect_stdout(io.StringIO()):  # the protocol's
        rekey.command(path, old=None, new=None)


def _rekey_by_files(path: Path, arm: Arm) -> None:
    arm()
    with contextlib.redirect_stdout(io.StringIO()):
        rekey.command(path, old=path.with_name("old"), new=path.with_name("new"))


def _master_key(path: Path, arm: Arm) -> None:
    state = StateDirectory(path)
    arm()
    state.master_key()


OPERATIONS: dict[str, Callable[[Path, Arm], None]] = {
    "open": _open,
    "close": _close,
    "rewrite": _rewrite,
    "rewrite without room": _rewrite_without_room,
    "drop what was set aside": _drop_set_aside,
    "master_key": _master_key,
    "rekey": _rekey,
    "rekey to a key of one's own": _rekey_by_files,
}
