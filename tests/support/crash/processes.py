"""Children that share what must not be shared, with other processes and between threads."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from support.crash import workload
from support.crash.killing import kept
from support.crash.sealed import key_of, seal, version_of

from kvtcd.core.errors import AlreadyRunning, StoreFailed
from kvtcd.tiers.disk import Environment
from kvtcd.tiers.state import StateDirectory


def open_state(path: str) -> str:
    """Try to hold the state directory."""
    try:
        StateDirectory(Path(path))
    except AlreadyRunning:
        return "already running"
    return "held"


def hold_state(path: str, told: str) -> None:
    """Hold the state directory until killed; `told` appears when it is held."""
    StateDirectory(Path(path))
    Path(told).touch()
    signal.pause()


def create_with_umask(path: str, umask: int) -> None:
    """Make a state directory with a key, an environment and a generation that was set aside."""
    os.umask(umask)
    state = StateDirectory(Path(path))
    state.master_key()
    environment = Environment(state.tenant("ab" * 16), quota=workload.QUOTA)
    environment.write([seal(key_of(index), 0, 1000) for index in range(4)], [])
    environment.rewrite(kept, {})
    environment.close()
    [data] = state.tenant("ab" * 16).glob("*/data.mdb")
    os.truncate(data, 100)
    Environment(state.tenant("ab" * 16), quota=workload.QUOTA).close()


def close_under_load(path: str, rounds: int) -> dict[str, int]:
    """Rewrite and close while threads read; return how many reads were right and how many were not."""
    seen = {"right": 0, "wrong": 0}

    def read(environment: Environment) -> None:
        while True:
            for index in range(workload.RECORDS):
                try:
                    found = environment.read(key_of(index))
                except StoreFailed:
                    return
                if found is not None:
                    right = version_of(key_of(index), *found) is not None
                    seen["right" if right else "wrong"] += 1

    for _ in range(rounds):
        environment = Environment(Path(path), quota=workload.QUOTA)
        readers = [threading.Thread(target=read, args=(environment,)) for _ in range(3)]
        for reader in readers:
            reader.start()
        environment.rewrite(lambda _: True, {})
        environment.close()
        for reader in readers:
            reader.join()
    return seen


def use_after_fork(path: str) -> list[str]:
    """Use an environment in a forked child; return what each call said there, and how the parent goes on."""
    environment = Environment(Path(path), quota=workload.QUOTA)
    environment.write([seal(key_of(0), 0, 5000)], [])
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: environment.read(key_of(0)),
        "write": lambda: environment.write([], [key_of(0)]),
        "scan": lambda: list(environment.scan()),
        "sync": environment.sync,
        "close": environment.close,
    }
    reading, writing = os.pipe()
    if os.fork() == 0:
        said = []
        for name, call in calls.items():
            try:
                call()
                said.append(f"{name}: ok")
            except StoreFailed:
                said.append(f"{name}: refused")
        os.write(writing, "\n".join(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read().splitlines()
    os.wait()
    found = environment.read(key_of(0))
    environment.write([seal(key_of(1), 0, 5000)], [])
    environment.close()
    return [*said, "parent: ok" if found is not None else "parent: lost its record"]
