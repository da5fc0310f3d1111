"""`kvtcd eval tasks`: what a model can still do behind a cache that went through a codec.

Every item is taken on twice in the same shape: behind the cache as the model made it, and behind what a
daemon with the codec in its policy gives back. Differences are paired over items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from kvtcd.codec.choose import NamespaceCodec
from kvtcd.core.identity import Identity
from kvtcd.lab import models
from kvtcd.lab.codec_source import open_codecs, profile_source
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.evaluate import WINDOW, Size
from kvtcd.lab.figures import write_json
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.opened import opened
from kvtcd.lab.phases import Phases
from kvtcd.lab.tasks.battery import able, chosen
from kvtcd.lab.tasks.item import Order, Reply, Task
from kvtcd.lab.tasks.own import own_task
from kvtcd.lab.tasks.play import play
from kvtcd.lab.tasks.rows import Pair, Row, Scores, show


def command(
    *,
    model: str,
    profile: Path | None,
    codecs: Sequence[str],
    names: Sequence[str],
    own: Path | None,
    metric: str,
    data: Path | None,
    n: int,
    context: int,
    threads: int,
    json: Path | None,
) -> None:
    """Let a model take on tasks, show a table, and write the figures if asked.

    Raises:
        ConfigError: a codec, task or file that cannot be used.
        Corrupt, ProfileMismatch: the profile is damaged, or of another model.
        Unavailable: the model or scipy cannot be had.
        UnsupportedCache, UnsupportedModel: the model's cache cannot be stored by prefix.
    """
    specs = [Spec.parse(codec) for codec in codecs]
    own_tasks = [own_task(own, metric)] if own else []
    tasks, left_out = ([], {}) if own and not names else chosen(names, data)
    with opened(model, threads) as (loaded, identity, phases, console):
        order = Order(n, context, lambda text: len(models.tokenize(loaded, text)), data)
        if not names:
            tasks, guesses = able(tasks, loaded.model.num_parameters())
            left_out |= guesses
        source = profile_source(loaded, identity, specs, profile, phases)
        rows: list[Row] = []
        pairs: list[Pair] = []
        ready = open_codecs(identity, specs, source)
        for task in [*own_tasks, *tasks]:
            found = run(loaded, identity, task, order, codecs=ready, phases=phases)
            rows += found.rows
            pairs += found.pairs
    show(console, loaded.folder.name, rows, pairs, left_out)
    if json:
        figures = {
            "model": loaded.folder.name, "profile": source.digest, "context": context,
            "rows": [asdict(row) for row in rows], "pairs": [asdict(pair) for pair in pairs],
            "left_out": left_out,
        }  # fmt: skip
        write_json(json, "eval tasks", figures)


def run(
    loaded: LoadedModel, identity: Identity, task: Task, order: Order, *,
    codecs: Mapping[Spec, NamespaceCodec], phases: Phases,
) -> Scores:  # fmt: skip
    """Let a model take on one task, without a codec and behind each."""
    items = task.items(order)
    raw: list[Reply] = []
    packed: dict[Spec, list[tuple[Reply, Size]]] = {spec: [] for spec in codecs}
    with phases.bar(f"{task.name}: {len(items)} items", len(items)) as advance:
        for number, item in enumerate(items, start=1):
            untouched, behind = play(loaded, identity, item, codecs, WINDOW)
            raw.append(untouched)
            for spec, found in behind.items():
                packed[spec].append(found)
            advance(number)
    return Scores.of(task, items, raw, packed, 16 * identity.layout.token_elements)
