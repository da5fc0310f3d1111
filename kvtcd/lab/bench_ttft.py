"""`kvtcd bench ttft`: seconds to the first token behind a prompt that is stored, by where it is stored.

Three daemons keep the same caches: raw in host memory, packed there, and packed on disk. Before each fetch
they are put back into that state; then the model takes one step behind what came. All of it takes turns with
reading the prompt anew, so that what else the machine does falls on all alike. Figures are medians.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from rich.progress import Progress
from transformers import DynamicCache

from kvtcd import terminal
from kvtcd.core.errors import ConfigError
from kvtcd.core.policy import CodecChoice
from kvtcd.lab import models
from kvtcd.lab.calibrate import profile_for
from kvtcd.lab.capture import prefill
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.figures import write_json
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.phases import Phases, timed
from kvtcd.lab.ttft_shelves import STORED, Stored, shelves
from kvtcd.terminal import Table

Source = Literal["recompute", "host-raw", "host-packed", "disk"]


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt from one source; medians of seconds.

    Attributes:
        model: its folder.
        tokens: of the prompt.
        source: recompute, or where it is stored.
        fetch_decode_s: to have the cache of all tokens but the last; None for recompute.
        prefill_s: of reading the prompt, first token included.
        step_s: of one step behind a cache that is there: the floor of all sources.
        ttft_s: until the first token: fetch, decode and one step, or prefill.
        speedup: prefill over fetch and decode; 1 for recompute.
        cpu_s: processor time of fetch and decode, of model and daemon together; of recompute, of prefill.
        cpu_speedup: that of prefill over that of fetch and decode: on a busy machine it says more.
    """

    model: str
    tokens: int
    source: Source
    fetch_decode_s: float | None
    prefill_s: float
    step_s: float
    ttft_s: float
    speedup: float
    cpu_s: float
    cpu_speedup: float


@dataclass(slots=True)
class Times:
    """What was measured of one prompt, a number for each round; seconds, and those of processors."""

    prefill: list[float]
    prefill_cpu: list[float]
    step: list[float]
    fetch: dict[Stored, list[float]]
    fetch_cpu: dict[Stored, list[float]]
    first: dict[Stored, list[float]]

    @classmethod
    def none(cls) -> Times:
        """Return what is known before the first round."""
        fetch, fetch_cpu, first = ({source: list[float]() for source in STORED} for _ in range(3))
        return cls([], [], [], fetch, fetch_cpu, first)

    def rows(self, model: str, tokens: int) -> Iterator[Row]:
        """Yield the figures of every source."""
        prefill_s, cpu_s, step_s = median(self.prefill), median(self.prefill_cpu), median(self.step)
        yield Row(model, tokens, "recompute", None, prefill_s, step_s, prefill_s, 1.0, cpu_s, 1.0)
        for source in STORED:
            fetch_s, fetch_cpu_s = median(self.fetch[source]), median(self.fetch_cpu[source])
            first_s, faster, cheaper = median(self.first[source]), prefill_s / fetch_s, cpu_s / fetch_cpu_s
            yield Row(
                model, tokens, source, fetch_s, prefill_s, step_s, first_s, faster, fetch_cpu_s, cheaper
            )


def command(
    *,
    names: Sequence[str],
    sizes: Sequence[int],
    text: Path | None,
    profiles: Path | None,
    codec: str,
    rounds: int,
    threads: int,
    json: Path | None,
    plot: Path | None,
) -> list[Row]:
    """Measure, show a table, and write figures and a plot if asked.

    Args:
        names: aliases or folders of models.
        sizes: tokens of prompts.
        text: what prompts are made of, again and again from its beginning; a built-in one when None.
        profiles: folder of profiles; None: those of the built-in recipe.
        codec: with its dial, of what is packed.
        rounds: how often each is timed, after a first time.
        threads: of the model.
        json: a file for the figures.
        plot: a file for the picture.

    Raises:
        ConfigError: no such codec, a text that cannot be read, or the profiles have none for the model.
        Unavailable: a model cannot be had, or a daemon does not start.
        UnsupportedCache, UnsupportedModel: the model's cache cannot be stored by prefix.
    """
    spec = Spec.parse(codec)
    if spec.swept:
        raise ConfigError("command line", "--codec", f"{codec!r} has no dial; write for instance kvtc2:16")
    torch.set_num_threads(threads)
    console, rows = terminal.console(), list[Row]()
    with terminal.progress(console, transient=True) as progress:
        for name in names:
            loaded = models.load(models.resolve(name, progress))
            folder = profiles or profile_for(loaded, Phases(progress)).parent
            found = measure(
                loaded, _prompts(loaded, text, sizes),
                profiles=folder, choice=spec.choice(), rounds=rounds, progress=progress,
            )  # fmt: skip
            console.print(table(found))
            rows += found
    if json:
        write_json(
            json, "bench ttft", {"codec": codec, "rounds": rounds, "rows": [asdict(row) for row in rows]}
        )
    if plot:
        from kvtcd.lab.ttft_plot import draw  # noqa: PLC0415 - an extra

        draw(rows, plot)
    return rows


def measure(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    profiles: Path,
    choice: CodecChoice,
    rounds: int,
    progress: Progress,
) -> list[Row]:
    """Measure one model with prompts of several lengths; see `command`."""
    name = loaded.folder.name
    times = [Times.none() for _ in prompts]
    with (
        tempfile.TemporaryDirectory(prefix="kvtcd-") as folder,
        shelves(Path(folder), models.identity(loaded), sum(map(len, prompts)), profiles, choice) as places,
    ):
        task = progress.add_task(f"{name}: reading and storing prompts", total=len(prompts))
        caches = []
        for prompt in prompts:
            caches.append(prefill(loaded, prompt[:-1]))
            for shelf in places.values():
                shelf.store(caches[-1], prompt)
            progress.advance(task)
        for shelf in places.values():
            for prompt in prompts:  # a daemon that has decoded nothing yet has its profile still to read
                shelf.settle(prompt)
                shelf.load(prompt)
        task = progress.add_task(f"{name}: first tokens", total=rounds * len(prompts))
        for _ in range(rounds):
            for prompt, cache, seen in zip(prompts, caches, times, strict=True):
                before = time.process_time()
                seen.prefill.append(timed(partial(prefill, loaded, prompt))[1])
                seen.prefill_cpu.append(time.process_time() - before)
                seen.step.append(_step(loaded, cache, prompt))
                for source, shelf in places.items():
                    shelf.settle(prompt)
                    before = time.process_time() + shelf.cpu_s()
                    known, fetch_s = timed(partial(shelf.load, prompt))
                    seen.fetch_cpu[source].append(time.process_time() + shelf.cpu_s() - before)
                    seen.fetch[source].append(fetch_s)
                    seen.first[source].append(fetch_s + _step(loaded, known, prompt))
                progress.advance(task)
    return [row for prompt, seen in zip(prompts, times, strict=True) for row in seen.rows(name, len(prompt))]


def _prompts(loaded: LoadedModel, text: Path | None, sizes: Sequence[int]) -> list[list[int]]:
    try:
        said = text.read_text("utf-8") if text else _built_in()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(text), "", f"cannot be read as UTF-8 text: {error}") from None
    tokens = models.tokenize(loaded, said)
    if not tokens:
        raise ConfigError(str(text), "", "is empty")
    return [list(islice(cycle(tokens), size)) for size in sizes]


def _built_in() -> str:
    return files("kvtcd.lab.texts").joinpath("reader.txt").read_text("utf-8")


def _step(loaded: LoadedModel, cache: DynamicCache, prompt: Sequence[int]) -> float:
    """Take one step behind a cache of all but the last token; return its seconds, and the cache as it was."""
    with torch.no_grad():
        ids = torch.tensor([prompt[-1:]])
        seconds = timed(lambda: loaded.model(ids, cache=cache, logits_to_keep=1))[1]
    cache.crop(-1)
    return seconds


def table(rows: Sequence[Row]) -> Table:
    """Return the figures of one model as a table."""
    shown = Table(title=f"{rows[0].model}: time to first token, seconds")
    for column in ("source", "tokens", "fetch", "first", "step", "faster", "CPU", "cheaper"):
        shown.add_column(column, justify="left" if column == "source" else "right")
    for row in rows:
        fetch = "" if row.fetch_decode_s is None else f"{row.fetch_decode_s:.2f}"
        faster, cheaper = (f"{times:.1f}" if fetch else "" for times in (row.speedup, row.cpu_speedup))
        shown.add_row(
            row.source, f"{row.tokens:,}", fetch, f"{row.ttft_s:.2f}", f"{row.step_s:.2f}", faster,
            f"{row.cpu_s:.2f}", cheaper, end_section=row.source == STORED[-1],
        )  # fmt: skip
    return shown
