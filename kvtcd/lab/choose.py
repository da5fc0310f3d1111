"""`kvtcd profile choose`: which codec `auto` stands for, measured on texts that a profile was not made from.

For each ratio, of every codec the finest stand of its dial that stores no more, over all documents, is
measured (a tenth is allowed, since ratios of `kvtc2` are those of other texts); `winner` chooses among them.
The weighted error of each stream, half of the squared error under the sensitivities of the profile, is kept
beside that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from operator import add
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console

from kvtcd import outputs
from kvtcd.codec.choices import Choice
from kvtcd.codec.choose import NamespaceCodec
from kvtcd.codec.profile import Profile, build, load, store
from kvtcd.core.dials import DIALS
from kvtcd.core.errors import ConfigError
from kvtcd.core.identity import Identity
from kvtcd.lab import evaluate, held_out, texts
from kvtcd.lab.codec_source import ProfileSource, open_codecs
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.evaluate import Block, Document
from kvtcd.lab.figures import write_json
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.opened import opened
from kvtcd.lab.phases import Advance
from kvtcd.lab.rd import cut
from kvtcd.lab.winner import Sample, choose
from kvtcd.terminal import Table

RATIOS = (4.0, 8.0, 16.0, 32.0)
CODECS = ("kvtc2", "kvtc", "tq,mean,norm", "sq,norm", "kivi", "cachegen", "fp8")
ALLOWED = 0.9
"""Of a ratio, what a codec has to have at least."""
_FINER = (1.0, 1.25)
"""Times a ratio, where dials that are ratios are put: what comes of them is not quite what is asked for."""
_LEAST = 6
"""Documents; four can tell no codec from another (`simultaneous.reachable`), five hardly any."""


def command(
    file: Path,
    *,
    model: str,
    files: Sequence[Path],
    ratios: Sequence[float],
    codecs: Sequence[str],
    context: int,
    continuation: int,
    per_file: int,
    threads: int,
    out: Path,
    json: Path | None,
) -> Path:
    """Measure, choose, show it, and write the profile with its choices into a folder; return the new file.

    Raises:
        ConfigError: a file cannot be used or is none that is held out, there are too few documents, or no
            codec stores so little.
        Corrupt, ProfileMismatch: the profile is damaged, or of another model.
        Unavailable: the model or scipy cannot be had.
    """
    asked = [Spec.parse(codec) for codec in codecs or CODECS]
    outputs.check_folder(out)
    sources = texts.read(files)
    _require_enough(per_file * len(sources))
    profile = load(file)
    known = [held_out.source(text) for text in sources]
    held_out.check(known, profile.origin.texts)
    with opened(model, threads) as (loaded, identity, phases, console):
        source = ProfileSource(file, identity)
        windows = cut(loaded, sources, context, continuation, per_file)
        _require_enough(len(windows))
        with phases.bar("documents", len(windows)) as advance:
            documents = _read(loaded, identity, [window.tokens for window in windows], context, advance)
        ready = open_codecs(identity, stands(asked, ratios or RATIOS, profile), source)
        with phases("what each codec stores"):
            caches = [document.blocks for document in documents]
            pools = eligible(ready, caches, identity, ratios or RATIOS)
        wanted = list(dict.fromkeys(spec for pool in pools.values() for spec in pool))
        with phases.bar("codecs", len(wanted)) as advance:
            samples = {}
            for number, spec in enumerate(wanted):
                samples[spec] = [
                    sample(loaded, identity, profile, document, ready[spec]) for document in documents
                ]
                advance(number + 1)
    groups = [window.file for window in windows]
    made = tuple(
        choose(ratio, {spec: samples[spec] for spec in pool}, groups) for ratio, pool in pools.items()
    )
    out.mkdir(parents=True, exist_ok=True)
    written = store(with_choices(profile, made), out)
    show(console, loaded.folder.name, made)
    console.print(
        f"{written}: the profile with its choices. Blocks packed with {file.name} need that file still."
    )
    if json:
        write_json(
            json, "profile choose",
            {"model": loaded.folder.name, "profile": profile.digest.hex(), "written": written.stem,
             "texts": [{"name": own.name, "sha256": own.sha256} for own in known],
             "choices": [asdict(choice) for choice in made]},
        )  # fmt: skip
    return written


def _require_enough(documents: int) -> None:
    if documents < _LEAST:
        raise ConfigError(
            "--windows", "", f"{documents} documents of all texts are too few; it takes {_LEAST}"
        )


def _read(
    loaded: LoadedModel, identity: Identity, windows: Sequence[Sequence[int]], context: int, advance: Advance
) -> list[Document]:
    found = []
    for number, tokens in enumerate(windows):
        found.append(evaluate.read(loaded, identity, tokens, context))
        advance(number + 1)
    return found


def stands(asked: Sequence[Spec], ratios: Sequence[float], profile: Profile) -> list[Spec]:
    """Return where dials are put: a ratio near each wanted, every plan, every number of bits, every level."""
    found: list[Spec] = []
    for spec in asked:
        dial = DIALS[spec.name]
        if not spec.swept:
            found.append(spec)
        elif spec.name == "kvtc":
            found += [replace(spec, dial=ratio) for ratio in profile.ratios]
        elif dial.highest:
            found += [replace(spec, dial=bits) for bits in range(dial.lowest, dial.highest + 1)]
        else:
            curve = profile.curve if spec.name == "kvtc2" else None
            most = (curve.points[0].ratio, curve.points[-1].ratio) if curve else (1.0, 1e4)
            near = {ratio * finer for ratio in ratios for finer in _FINER} | {math.ceil(most[0])}
            found += [replace(spec, dial=ratio) for ratio in sorted(near) if most[0] <= ratio <= most[1]]
    return list(dict.fromkeys(found))


def eligible(
    codecs: Mapping[Spec, NamespaceCodec],
    caches: Sequence[Sequence[Block]],
    identity: Identity,
    ratios: Sequence[float],
) -> dict[float, list[Spec]]:
    """Return, by ratio, the finest stand of each codec that stores all documents together in so little.

    Raises:
        ConfigError: no codec does.
    """
    had = {}
    for spec, codec in codecs.items():
        sizes = (
            evaluate.size(identity.layout, blocks, evaluate.encode(codec.encoder, blocks))
            for blocks in caches
        )
        had[spec] = reduce(add, sizes).ratio
    found = {}
    for ratio in ratios:
        small = sorted((spec for spec, own in had.items() if own >= ALLOWED * ratio), key=had.__getitem__)
        if not small:
            raise ConfigError("--ratio", "", f"no codec stores these documents at a ratio of {ratio:g}")
        found[ratio] = list({spec.codec: spec for spec in reversed(small)}.values())
    return found


def sample(
    loaded: LoadedModel, identity: Identity, profile: Profile, document: Document, codec: NamespaceCodec
) -> Sample:
    """Take a document through a codec and let the model read on."""
    encoded = evaluate.encode(codec.encoder, document.blocks)
    decoded = evaluate.decode(codec.decoder, document.blocks, encoded)
    logits = evaluate.continue_behind(loaded, decoded, identity.layout, document.continuation)
    return Sample(
        evaluate.size(identity.layout, document.blocks, encoded),
        evaluate.quality(document.logits, logits, document.continuation).kl,
        weighted_errors(identity, profile, document.blocks, decoded),
    )


def weighted_errors(
    identity: Identity, profile: Profile, blocks: Sequence[Block], decoded: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Return half of the squared error of a coded token under a profile's sensitivities, by stream, nats.

    Without sensitivities all errors weigh alike, and there is no unit.
    """
    found = {}
    for index, stream in enumerate(identity.layout.streams):
        weighted = profile.weighted.get(stream.name)
        total, tokens = 0.0, 0
        for block, raw in zip(blocks, decoded, strict=True):
            if not evaluate.coded_tokens(block):
                continue
            want, got = (evaluate.coded_rows(identity, block, either, index) for either in (block.raw, raw))
            error = (got - want).view(len(want), identity.layout.layers, stream.heads, stream.head_dim)
            if weighted:
                error = torch.einsum("lhij,tlhj->tlhi", weighted.root.to(error.device), error)
            total += 0.5 * float(error.square().sum(dtype=torch.float64))
            tokens += len(want)
        found[stream.name] = total / max(tokens, 1)
    return found


def with_choices(profile: Profile, choices: Sequence[Choice]) -> bytes:
    """Return the bytes of a profile with other choices, all else as it was."""
    origin = replace(profile.origin, choices=tuple(choice.to_json() for choice in choices))
    return build(origin, profile.streams, profile.weighted)[1]


def show(console: Console, model: str, choices: Sequence[Choice]) -> None:
    """Print what was chosen, and from what."""
    for choice in choices:
        title = f"{model}, ratio {choice.ratio:g}: auto is {choice.chosen.name}"
        table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("codec", "ratio", "KL", "95 %", "times", "95 %", "error"):
            table.add_column(name, justify="left" if name == "codec" else "right")
        for one in choice.candidates:
            least = {name for name in one.errors if choice.best_of(name) is one}
            errors = ", ".join(
                f"{name} {value:.2g}{'*' if name in least else ''}" for name, value in one.errors.items()
            )
            table.add_row(
                one.name, f"{one.ratio:.1f}", f"{one.kl:.4f}",
                f"{one.kl_lo:.4f} to {one.kl_hi:.4f}" if one.kl_lo < one.kl_hi else "—",
                f"{one.times:.2f}", f"{one.times_lo:.2f} to {one.times_hi:.2f}", errors,
            )  # fmt: skip
        console.print(table)
    console.print(
        "Chosen: of those not told apart from the best, what stores least. Times: over that one, so what is "
        "below 1 had less divergence in more bytes, and not surely. Error: weighted, nats of a token; * the "
        "least of a stream."
    )
