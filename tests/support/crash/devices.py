"""Children whose device is full or fails."""

from __future__ import annotations

import ctypes
import errno
import functools
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.crash import workload
from support.crash.sealed import key_of, seal, version_of

from kvtcd.core.errors import StoreFailed, StoreFull
from kvtcd.tiers.disk import Environment, environment

_RECORD_BYTES = 700_000


def fill_device(path: str, file_limit: int) -> dict[str, Any]:
    """Write until nothing more fits, then read, drop and write again; with 0, the device is the limit."""
    store = Environment(Path(path), quota=1 << 30)
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    written = 0
    refused = ""
    while not refused and written < 1000:
        try:
            store.write([seal(key_of(written), written, _RECORD_BYTES)], [])
            written += 1
        except StoreFull as error:
            refused = str(error)
    readable = [_version(store, index) for index in range(written)]
    store.close()
    store = Environment(Path(path), quota=1 << 30)
    lost = store.recovered or store.quarantined
    store.write([], [key_of(index) for index in range(4)])
    store.write([], [key_of(4)])
    again = [1000 + index for index in range(3)]
    for index in again:
        store.write([seal(key_of(index), index, _RECORD_BYTES)], [])
    rewritten = [_version(store, index) for index in again]
    store.close()
    return {"refused": refused, "readable": readable, "lost": lost, "rewritten": rewritten, "again": again}


def fail_call(path: str, seed: int, kind: str, after: int, code: int) -> dict[str, Any]:
    """Let one call on the data file fail, `after` others of its kind in shim.c; tell what was refused.

    Returns:
        reached: the call was made; refused: (step, error class) of each, -1 for closing; right: what is there
        is what the accepted steps made.
    """
    store = Environment(Path(path), quota=workload.QUOTA)
    shim = _shim()
    shim.shim_fail(kind.encode(), after, code)
    refused: list[list[Any]] = []
    state: workload.State = {}
    for number in range(12):
        step = workload.step(seed, number)
        try:
            store.write(step.records(), [key_of(index) for index in step.drops])
        except StoreFailed as error:
            refused.append([number, type(error).__name__])
        else:
            state = step.applied(state)
    right = workload.observed(store) == state and store.used == workload.footprint_of(state)
    try:
        store.close()
    except StoreFailed as error:
        refused.append([-1, type(error).__name__])
    reached = shim.shim_left() < 0
    shim.shim_fail(kind.encode(), -1, 0)
    store = Environment(Path(path), quota=workload.QUOTA)
    right = right and not store.quarantined and workload.observed(store) == state
    store.close()
    return {"reached": reached, "refused": refused, "right": right}


def break_twice(path: str, window: float) -> list[str]:
    """Let two syncs fail, the second after recovering from the first; return what each call said."""
    environment.RECOVERY_WINDOW = window
    shim = _shim()
    store = Environment(Path(path), quota=workload.QUOTA)
    said = []

    def attempt(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except StoreFailed as error:
            said.append(f"{name}: {type(error).__name__}")
        else:
            said.append(f"{name}: ok")

    for version in range(2):
        shim.shim_fail(b"s", 0, errno.EIO)
        attempt("write", functools.partial(store.write, [seal(key_of(0), version, 5000)], []))
        attempt("read", lambda: store.read(key_of(0)))
    attempt("write", lambda: store.write([seal(key_of(0), 2, 5000)], []))
    attempt("scan", lambda: list(store.scan()))
    store.close()
    return [*said, "failed" if store.failed else "works"]


def _version(store: Environment, index: int) -> int | None:
    found = store.read(key_of(index))
    return found and version_of(key_of(index), *found)


def _shim() -> ctypes.CDLL:
    shim = ctypes.CDLL(None)
    shim.shim_fail.argtypes = (ctypes.c_char, ctypes.c_long, ctypes.c_int)
    shim.shim_left.restype = ctypes.c_long
    return shim
