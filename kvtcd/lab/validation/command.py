"""`kvtcd validate`: whether a profile may be trusted, on caches that it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from kvtcd import terminal
from kvtcd.codec.profile import Profile, load
from kvtcd.core.errors import ConfigError
from kvtcd.lab import dump as dumps
from kvtcd.lab import dump_model, models, texts
from kvtcd.lab.dump import Dump
from kvtcd.lab.figures import write_json
from kvtcd.lab.held_out import check as check_texts
from kvtcd.lab.held_out import source
from kvtcd.lab.phases import Phases
from kvtcd.lab.validation.check import Check, Seen
from kvtcd.lab.validation.checks import of_profile, of_rows
from kvtcd.lab.validation.rows import check, looked_at, missing
from kvtcd.lab.validation.verdict import Verdict, judge

Outcome = Literal["safe", "not safe", "not judged"]
_NOTHING = "give --dump, or --model with --text, of texts that the profile was not made from"


@dataclass(frozen=True, eq=False)
class Stream:
    """What was found of one stream; `seen` is None where there were no held-out rows."""

    name: str
    verdict: Verdict
    checks: tuple[Check, ...]
    seen: Seen | None


def command(
    file: Path,
    *,
    dump: Path | None,
    model: str | None,
    files: Sequence[Path],
    context: int,
    per_file: int,
    threads: int,
    json: Path | None,
    plot: Path | None,
) -> Outcome:
    """Check a profile, print a verdict for each stream, and write figures and plot if asked.

    Returns:
        Whether the eigenbasis is safe for all streams, as far as there was something to judge by.

    Raises:
        ConfigError: a file cannot be used, or is no held-out one; or a model comes without texts, texts
            without a model, both caches and a model, or a plot without either.
        Corrupt, ProfileMismatch: the profile is damaged, or of another model.
        Unavailable: the model cannot be had, or matplotlib for a plot.
    """
    _refuse(dump, model, files, plot)
    torch.set_num_threads(threads)
    console = terminal.console()
    try:
        profile = load(file)
    except OSError as error:
        raise ConfigError(file, "", f"cannot be read: {error.strerror}") from error
    held: Dump | None = None
    with terminal.progress(console) as progress:
        if dump:
            held = dumps.load(dump)
        elif model:
            check_texts([source(text) for text in texts.read(files)], profile.origin.texts)
            loaded = models.load(models.resolve(model, progress))
            profile.check(models.identity(loaded))
            held = dump_model.gather(loaded, files, context, 1, per_file, phases=Phases(progress))
        with Phases(progress).bar("checks"):
            streams = examine(profile, held)
    for stream in streams:
        show(console, stream)
    if json:
        write_json(json, "validate", _written(profile, held, streams))
    if plot and any(stream.seen for stream in streams):
        from kvtcd.lab.validation.plot import draw  # noqa: PLC0415 - loads matplotlib, which not all have

        draw(profile.origin.model, streams, plot)
    return outcome(streams)


def outcome(streams: Sequence[Stream]) -> Outcome:
    """Return the verdict on all streams together."""
    words = {stream.verdict.word for stream in streams}
    if words & {"tq", "collect"}:
        return "not safe"
    return "not judged" if "not judged" in words else "safe"


def examine(profile: Profile, held: Dump | None) -> list[Stream]:
    """Check every stream.

    Raises:
        ConfigError: the caches do not say of which model, or are of texts that the profile was made from.
        ProfileMismatch: they are of another model, shape or RoPE.
    """
    origin = profile.origin
    lacking = _NOTHING
    if held:
        check(profile, held)
        lacking = missing(held)
    rows = looked_at(held) if held and not lacking else {}
    found = []
    for stream in origin.streams:
        own = profile.streams[stream.name]
        checks = of_profile(own, origin.layers, stream.heads, origin.tokens)
        seen = of_rows(own, rows[stream.name]) if rows else None
        checks += seen.checks if seen else ()
        found.append(Stream(stream.name, judge(checks, origin.tokens, lacking), tuple(checks), seen))
    return found


def show(console: Console, stream: Stream) -> None:
    """Print what was found of one stream."""
    colour = "green" if stream.verdict.word == "safe" else "yellow"
    told = f"{stream.name}, all layers (kvtc, kvtc2): {stream.verdict.text}"
    console.print(told, style=colour, markup=False, highlight=False)
    console.print(f"{stream.name}, single heads (sq): {stream.verdict.heads}", markup=False, highlight=False)
    for one in stream.checks:
        mark = "  " if one.holds or one.kind == "note" else "! "
        console.print(f"  {mark}{one.meaning}", markup=False, highlight=False)


def _refuse(dump: Path | None, model: str | None, files: Sequence[Path], plot: Path | None) -> None:
    """Refuse options that would have no effect beside, or without, others."""
    if dump and model:
        raise ConfigError("--dump", "", "are caches already; leave out --model, or --dump")
    if files and not model:
        raise ConfigError("--text", "", "is not read without --model")
    if model and not files:
        raise ConfigError("--text", "", "a model needs a text to read that the profile was not made from")
    if plot and not (dump or model):
        raise ConfigError("--plot", "", "draws held-out caches; give --dump, or --model with --text")


def _written(profile: Profile, held: Dump | None, streams: Sequence[Stream]) -> dict[str, object]:
    return {
        "model": profile.origin.model,
        "profile": profile.digest.hex(),
        "tokens": profile.origin.tokens,
        "documents": len(held.documents) if held else 0,
        "streams": [
            {
                "name": stream.name,
                "verdict": stream.verdict.word,
                "text": stream.verdict.text,
                "heads": stream.verdict.heads,
                "checks": [asdict(one) for one in stream.checks],
            }
            for stream in streams
        ],
    }
