"""The model that a command measures with, opened under the command's progress display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from rich.console import Console

from kvtcd import terminal
from kvtcd.core.identity import Identity
from kvtcd.lab import models
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.phases import Phases


class Opened(NamedTuple):
    """A model at work.

    Attributes:
        identity: of its caches.
        phases: of the command, shown until the block ends.
        console: for what the command says after.
    """

    loaded: LoadedModel
    identity: Identity
    phases: Phases
    console: Console


@contextmanager
def opened(model: str, threads: int) -> Iterator[Opened]:
    """Load a model, by alias or folder, for work with so many threads.

    Raises:
        Unavailable: it cannot be had.
        UnsupportedCache, UnsupportedModel: its cache cannot be stored by prefix.
    """
    torch.set_num_threads(threads)
    console = terminal.console()
    with terminal.progress(console) as progress:
        loaded = models.load(models.resolve(model, progress))
        yield Opened(loaded, models.identity(loaded), Phases(progress), console)
