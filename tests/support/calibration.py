"""A tiny model with a tokenizer, and texts, for tests of calibration. Run as a program it calibrates."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from pathlib import Path

import torch
from support.models import random_model, tiny_llama_config

from kvtcd.core.layout import Dtype
from kvtcd.lab import checkpoint, models
from kvtcd.lab.calibration import Calibration, calibrate
from kvtcd.lab.checkpoint import Checkpoint
from kvtcd.lab.gather import Gathered
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.texts import Text

WINDOW = 32


class Tokenizer:
    """A token a character; begins with `start`."""

    bos_token_id = None

    def __init__(self, start: tuple[int, ...] = ()) -> None:
        self.start = start

    def __call__(self, text: str, **_options: object) -> Tokenizer:
        self.input_ids = [*self.start, *(ord(character) % 64 for character in text)]
        return self


def tiny_model(folder: Path, start: tuple[int, ...] = ()) -> LoadedModel:
    """A float32 llama with 128 features per stream."""
    model = random_model(tiny_llama_config(num_hidden_layers=4, head_dim=16))
    model.save_pretrained(folder)
    return LoadedModel(model, Tokenizer(start), folder)


def text(name: str, characters: int, seed: int) -> Text:
    """Letters in which each depends on the one before."""
    draw = random.Random(seed)
    letters = [0]
    while len(letters) < characters:
        letters.append((letters[-1] * 5 + draw.choice((1, 3, 7))) % 61)
    return Text(name, "own", "".join(chr(64 + letter) for letter in letters))


TEXTS = (text("long", 2000, 1), text("short", 300, 2), text("tiny", WINDOW - 1, 3))


def run(loaded: LoadedModel, checkpoints: Path, **changes: object) -> Calibration:
    """Calibrate on 24 windows of two texts, with a checkpoint after each."""
    options = {"tokens": 24 * WINDOW, "window": WINDOW, "every": 0.0} | changes
    (made,) = calibrate(loaded, models.identity(loaded, Dtype.F32), TEXTS, checkpoints=checkpoints, **options)
    return made


def main(folder: Path, out: Path, killed_in: str, call: int) -> None:
    """Calibrate, and die by SIGKILL just before a call of `Checkpoint.keep` or `Path.replace`.

    Prints the number of windows that an earlier run has read.
    """
    torch.set_num_threads(1)
    checkpoint._SHARE = 1  # windows are read faster here than a file is written
    calls = itertools.count(1)
    owner, name = {"keep": (Checkpoint, "keep"), "replace": (Path, "replace")}.get(killed_in, (None, ""))
    if owner:
        original = getattr(owner, name)

        def mortal(*arguments: object) -> object:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        setattr(owner, name, mortal)
    restore = Checkpoint.restore

    def told(self: Checkpoint, device: torch.device) -> Gathered:
        gathered = restore(self, device)
        print(gathered.read, flush=True)  # noqa: T201 - this is its report
        return gathered

    Checkpoint.restore = told
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    out.write_bytes(run(tiny_model(folder / "model"), checkpoints).data)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
