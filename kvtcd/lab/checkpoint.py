"""What a calibration has gathered, kept on disk, so that one that was killed goes on where it was.

A safetensors file whose name stands for everything that determines the result; metadata hold the number of
windows read and the seconds spent. It replaces its predecessor in one step: a kill leaves one or the other.
Whoever writes one holds a shared lock of the folder (flock), which ends with its process: under an exclusive
one, what is half written there is what killed ones have left.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvtcd.codec.basis import Moments
from kvtcd.codec.profile import SUFFIX
from kvtcd.lab.gather import Gathered
from kvtcd.lab.sensitivity import Sensitivity
from kvtcd.lab.token_weights import Regression

_METADATA = "kvtcd"
_PARTS = tuple(field.name for field in fields(Moments))
_GRAM, _TARGET = "tokens.gram", "tokens.target"
_SHARE = 10
"""Writing takes at most one part in so many of the time."""

_HALF_WRITTEN = ("*.part", ".tmp*")
"""What a writer has open: our name for it, and that which safetensors writes under before it takes ours."""
_DAYS = 30
"""So old, a checkpoint is of a calibration that nobody goes on with."""


def sweep(folder: Path) -> None:
    """Remove what killed writers have left in a folder, and checkpoints of `_DAYS` days.

    While another process writes there, nothing is removed.
    """
    with suppress(BlockingIOError), _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        stale = [path for pattern in _HALF_WRITTEN for path in folder.glob(pattern)]
        oldest = time.time() - _DAYS * 86_400
        stale += [path for path in folder.glob(f"*{SUFFIX}") if path.stat().st_mtime < oldest]
        for path in stale:
            path.unlink(missing_ok=True)


class Checkpoint:
    """The checkpoint of one calibration.

    Args:
        path: file; its folder exists.
        every: seconds between two writings, more where writing is slow.
    """

    def __init__(self, path: Path, every: float = 30.0) -> None:
        self._path = path
        self._every = every
        self._due = time.monotonic() + every

    def restore(self, device: torch.device) -> Gathered:
        """Return what was kept, or an empty beginning when there is nothing that can be read."""
        try:
            with safe_open(self._path, framework="pt", device=str(device)) as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
                metadata = json.loads(file.metadata()[_METADATA])
        except (OSError, SafetensorError):
            return Gathered()
        names = metadata["streams"]
        return Gathered(
            read=metadata["read"],
            moments=_moments(tensors, names, "rows"),
            weighed=_moments(tensors, names, "weighed"),
            samples={name: tensors[f"{name}.sample"] for name in names},
            sensitivities=_sensitivities(tensors, names, "gradients"),
            pilot=_sensitivities(tensors, names, "pilot"),
            tokens=Regression(tensors[_GRAM], tensors[_TARGET]) if _GRAM in tensors else None,
            seconds=metadata["seconds"],
        )

    def keep(self, gathered: Gathered) -> None:
        """Write what was gathered, if it is time to."""
        start = time.monotonic()
        if start < self._due:
            return
        tensors = {f"{name}.sample": sample for name, sample in gathered.samples.items()}
        for kind, moments in (("rows", gathered.moments), ("weighed", gathered.weighed)):
            for name, own in moments.items():
                tensors |= {f"{name}.{kind}.{part}": getattr(own, part) for part in _PARTS}
        for kind, found in (("gradients", gathered.sensitivities), ("pilot", gathered.pilot)):
            for name, sensitivity in found.items():
                tensors[f"{name}.{kind}.count"] = sensitivity.count
                tensors[f"{name}.{kind}.outer"] = sensitivity.outer
        if gathered.tokens:
            tensors |= {_GRAM: gathered.tokens.gram, _TARGET: gathered.tokens.target}
        metadata = {
            "read": gathered.read,
            "seconds": gathered.seconds,
            "streams": list(gathered.samples),
        }
        part = self._path.with_suffix(f".{os.getpid()}.part")
        with _locked(part.parent, fcntl.LOCK_SH):
            save_file(tensors, part, {_METADATA: json.dumps(metadata)})
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(self._path)
        end = time.monotonic()
        self._due = end + max(self._every, (_SHARE - 1) * (end - start))

    def discard(self) -> None:
        """Remove the file: the calibration is done."""
        self._path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """Hold a lock of a folder until the end of the block."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, how)
        yield
    finally:
        os.close(opened)


def _moments(tensors: Mapping[str, Tensor], names: Iterable[str], kind: str) -> dict[str, Moments]:
    return {
        name: Moments(**{part: tensors[f"{name}.{kind}.{part}"] for part in _PARTS})
        for name in names
        if f"{name}.{kind}.{_PARTS[0]}" in tensors
    }


def _sensitivities(tensors: Mapping[str, Tensor], names: Iterable[str], kind: str) -> dict[str, Sensitivity]:
    return {
        name: Sensitivity(tensors[f"{name}.{kind}.count"], tensors[f"{name}.{kind}.outer"])
        for name in names
        if f"{name}.{kind}.count" in tensors
    }
