"""`kvtcd validate`: whether a profile may be trusted, on caches that it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from kvtcd import terminal
from kvtcd.codec.profile import Profile, load
from kvtcd.core.errors import ConfigError, ProfileMismatch
from kvtcd.lab import dump as dumps
from kvtcd.lab import models
from kvtcd.lab.dump import Dump
from kvtcd.lab.figures import write_json
from kvtcd.lab.phases import Phases
from kvtcd.lab.validation.checks import Check, Seen, of_profile, of_rows
from kvtcd.lab.validation.verdict import Verdict, judge

_SINKS = 4
_ROWS = 4096
"""Rows that are looked at, spread evenly over all documents."""
_NAMES = ("k", "v")


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
) -> bool:
    """Check a profile, print a verdict for each stream, and write figures and plot if asked.

    Returns:
        Whether the eigenbasis is safe for all streams.

    Raises:
        ConfigError: a file cannot be used, or a model comes without texts.
        Corrupt, ProfileMismatch: the profile is damaged, or of another model.
        Unavailable: the model cannot be had, or matplotlib for a plot.
    """
    torch.set_num_threads(threads)
    console = terminal.console()
    try:
        profile = load(file)
    except OSError as error:
        raise ConfigError(file, "", f"cannot be read: {error.strerror}") from error
    if model and not files:
        raise ConfigError("--text", "", "a model needs a text to read that the profile was not made from")
    held: Dump | None = None
    with terminal.progress(console) as progress:
        if dump:
            held = dumps.load(dump)
        elif model:
            loaded = models.load(models.resolve(model, progress))
            profile.check(models.identity(loaded))
            held = dumps.gather(loaded, files, context, 1, per_file, phases=Phases(progress))
        with Phases(progress).bar("checks"):
            streams = examine(profile, held)
    for stream in streams:
        show(console, stream)
    if held is None:
        console.print("Without held-out caches (--dump, or --model with --text) that is all a profile tells.")
    if json:
        write_json(json, "validate", _written(profile, held, streams))
    if plot:
        from kvtcd.lab.validation.plot import draw  # noqa: PLC0415 - loads matplotlib, which not all have

        draw(profile.origin.model, streams, plot)
    return all(stream.verdict.word == "safe" for stream in streams)


def examine(profile: Profile, held: Dump | None) -> list[Stream]:
    """Check every stream.

    Raises:
        ProfileMismatch: the caches are of another shape or RoPE.
    """
    origin = profile.origin
    found = []
    rows = held_out(profile, held) if held else {}
    for stream in origin.streams:
        own = profile.streams[stream.name]
        checks = of_profile(own, origin.layers, stream.heads, origin.tokens)
        seen = of_rows(own, rows[stream.name]) if stream.name in rows else None
        checks += seen.checks if seen else ()
        found.append(Stream(stream.name, judge(checks, origin.tokens), tuple(checks), seen))
    return found


def held_out(profile: Profile, held: Dump) -> dict[str, Tensor]:
    """Return rows of both streams, float32 ``[n, L, H, D]``, RoPE undone, without the first tokens."""
    origin = profile.origin
    shape = tuple(held.documents[0].keys.shape[1:])
    wanted = [(origin.layers, stream.heads, stream.head_dim) for stream in origin.streams]
    if tuple(stream.name for stream in origin.streams) != _NAMES or wanted[0] != shape:
        raise ProfileMismatch("streams", [shape, shape], wanted)
    if held.rope != origin.rope:
        raise ProfileMismatch("rope", held.rope, origin.rope)
    share = -(-_ROWS // len(held.documents))
    parts: dict[str, list[Tensor]] = {name: [] for name in _NAMES}
    for document in held.documents:
        tokens = len(document.keys)
        at = torch.linspace(_SINKS, tokens - 1, min(share, tokens - _SINKS)).round().long()
        parts["k"].append(held.unrotated(document)[at])
        parts["v"].append(document.values[at].to(torch.float32))
    return {name: torch.cat(own) for name, own in parts.items()}


def show(console: Console, stream: Stream) -> None:
    """Print what was found of one stream."""
    colour = "green" if stream.verdict.word == "safe" else "yellow"
    console.print(f"[{colour}]{stream.name}, all layers (kvtc, kvtc2): {stream.verdict.text}[/]")
    console.print(f"{stream.name}, single heads (sq): {stream.verdict.heads}", markup=False, highlight=False)
    for check in stream.checks:
        mark = "  " if check.holds else "! "
        console.print(f"  {mark}{check.meaning}", markup=False, highlight=False)


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
                "checks": [asdict(check) for check in stream.checks],
            }
            for stream in streams
        ],
    }
