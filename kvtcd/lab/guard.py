"""`kvtcd eval guard`: what the guard of `kvtc2` does with what calibration did not see.

Texts of the user's own, tokens drawn at random, base64, and caches of the first text that were corrupted
behind the model's back: how large the weighted error is that the guard looks at, what it then stores, and how
far the model is from where it was behind the very cache that was to be stored; and all that without a guard.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console

from kvtcd.codec.choose import NamespaceCodec
from kvtcd.codec.kvtc2 import GUARD
from kvtcd.codec.ports import BlobDecoder, Encoder
from kvtcd.codec.profile import Profile
from kvtcd.codec.stepped import Stepped
from kvtcd.core.errors import ConfigError
from kvtcd.core.identity import Identity
from kvtcd.lab import evaluate, models, texts
from kvtcd.lab.capture import prefill
from kvtcd.lab.codec_source import open_codecs, profile_source
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.corruption import CORRUPTIONS
from kvtcd.lab.dial import weighted_errors
from kvtcd.lab.evaluate import SINKS, WINDOW
from kvtcd.lab.figures import write_json
from kvtcd.lab.guard_points import Case, Point, Rank, points, rank
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.opened import opened
from kvtcd.lab.rd import cut
from kvtcd.lab.rd_report import bounds, fraction
from kvtcd.terminal import Table

_SEED = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """What the command finds out; `bound` is a multiple of what calibration measured."""

    model: str
    profile: str | None
    codec: str
    dial: float
    bound: float
    context: int
    continuation: int
    rows: tuple[Point, ...]
    rank_of_texts: Rank
    rank_of_all: Rank


@dataclass(frozen=True, slots=True)
class Guarded:
    """The codec under test, and the same without a guard.

    Attributes:
        encoder, decoder: as a daemon has them.
        bare: the same encoder without its guard.
        coder: tells weighted errors.
        step: of the quantiser.
        calibrated: the weighted error that calibration measured at this step.
    """

    encoder: Encoder
    decoder: BlobDecoder
    bare: Encoder
    coder: Stepped
    step: float
    calibrated: float

    @classmethod
    def of(
        cls, identity: Identity, profile: Profile, spec: Spec, codecs: Mapping[Spec, NamespaceCodec]
    ) -> Guarded:
        """Put together a codec and, among `codecs`, the same without a guard."""
        curve = profile.curve
        assert curve, "the codec was opened"
        choice = spec.choice()
        step = curve.step_for(ratio=choice.ratio, max_kl=choice.max_kl)
        opened, bare = codecs[spec], codecs[_unguarded(spec)]
        coder = Stepped(identity.layout, identity.rope, profile)
        return cls(opened.encoder, opened.decoder, bare.encoder, coder, step, curve.at(step).error)


def _unguarded(spec: Spec) -> Spec:
    return replace(spec, options=tuple(dict.fromkeys((*spec.options, "no-guard"))))


def command(
    *,
    model: str,
    profile: Path | None,
    codec: str,
    files: Sequence[Path],
    context: int,
    continuation: int,
    per_file: int,
    threads: int,
    json: Path | None,
) -> None:
    """Try the guard on the user's texts and what is made up here, show a table, and write figures if asked.

    Raises:
        ConfigError: a codec without a guard or a dial, or a text that cannot be used.
        Corrupt, ProfileMismatch: the profile is damaged, or of another model.
        Unavailable: the model or scipy cannot be had.
        UnsupportedCache, UnsupportedModel: the model's cache cannot be stored by prefix.
    """
    spec = Spec.parse(codec)
    if spec.name != "kvtc2" or spec.dial is None:
        raise ConfigError("--codec", "", f"{codec!r}: only kvtc2 has a guard; say for instance kvtc2:64")
    sources = texts.read(files)
    with opened(model, threads) as (loaded, identity, phases, console):
        documents = [
            (sources[document.file].name, document.tokens)
            for document in cut(loaded, sources, context, continuation, per_file)
        ]
        documents += made_up(loaded, context + continuation, per_file)
        source = profile_source(loaded, identity, [spec], profile, phases)
        codecs = open_codecs(identity, [spec, _unguarded(spec)], source)
        found = source.find(identity)
        assert found, "the codec was opened"
        guarded = Guarded.of(identity, found, spec, codecs)
        cases: list[Case] = []
        with phases.bar(f"{loaded.folder.name} reads {len(documents)} documents", len(documents)) as advance:
            for number, (name, tokens) in enumerate(documents):
                cases.append(measure(loaded, identity, tokens, context, guarded=guarded, name=name))
                if name == documents[0][0]:
                    cases += [
                        measure(loaded, identity, tokens, context, guarded=guarded, name=fault)
                        for fault in CORRUPTIONS
                    ]
                advance(number + 1)
    figures = Figures(
        model=loaded.folder.name,
        profile=source.digest,
        codec=spec.name,
        dial=spec.dial,
        bound=GUARD,
        context=context,
        continuation=continuation,
        rows=tuple(points(cases)),
        rank_of_texts=rank([case for case in cases if case.name not in CORRUPTIONS]),
        rank_of_all=rank(cases),
    )
    show(console, figures)
    if json:
        write_json(json, "eval guard", asdict(figures))


def made_up(loaded: LoadedModel, length: int, count: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return documents that no text is like: tokens drawn evenly, and base64 of bytes drawn evenly."""
    draw = np.random.default_rng(_SEED)
    start = models.tokenize(loaded, "")
    drawn = draw.integers(int(loaded.model.config.vocab_size), size=(count, length - len(start))).tolist()
    found = [("random tokens", (*start, *row)) for row in drawn]
    for _ in range(count):
        coded = base64.b64encode(draw.bytes(4 * length)).decode()
        found.append(("base64", tuple(models.tokenize(loaded, coded)[:length])))
    return found


def measure(
    loaded: LoadedModel,
    identity: Identity,
    tokens: Sequence[int],
    context: int,
    *,
    guarded: Guarded,
    name: str,
) -> Case:
    """Take a document, corrupted if `name` is a corruption's, through the codec, guarded and not."""
    cache = prefill(loaded, tokens[:context])
    if name in CORRUPTIONS:
        coded = slice(SINKS, context - WINDOW)
        layers = [(keys[0, :, coded], values[0, :, coded]) for keys, values, *_ in cache]
        CORRUPTIONS[name](layers, torch.Generator().manual_seed(_SEED))
    blocks = evaluate.cut(cache, identity)
    document = evaluate.Document(
        context=tuple(tokens[:context]),
        blocks=blocks,
        continuation=tuple(tokens[context:]),
        logits=evaluate.continue_behind(
            loaded, [block.raw for block in blocks], identity.layout, tokens[context:]
        ),
    )
    stored = evaluate.measure(loaded, identity, document, guarded.encoder, guarded.decoder)
    bare = evaluate.measure(loaded, identity, document, guarded.bare, guarded.decoder)
    errors = list(_errors(document, guarded))
    return Case(
        name=name,
        blocks=len(errors),
        finer=stored.finer,
        refused=stored.refused,
        error=float(torch.cat(errors).mean()) / guarded.calibrated,
        ratio=stored.size.ratio,
        kl=stored.quality.kl,
        kl_bare=bare.quality.kl,
    )


def _errors(document: evaluate.Document, guarded: Guarded) -> Iterator[torch.Tensor]:
    for block in document.blocks:
        if len(found := weighted_errors(guarded.coder, block, guarded.step, WINDOW)):
            yield found


def show(console: Console, figures: Figures) -> None:
    """Print what became of each kind of document."""
    title = f"{figures.model}, {figures.codec}:{figures.dial:g}: contexts of {figures.context:,} tokens"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "blocks", "finer", "lossless", "error", "ratio", "KL", "most", "without"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in figures.rows:
        table.add_row(
            row.name, *map(str, (row.blocks, row.finer, row.refused)), f"{row.error:.3g}", f"{row.ratio:.1f}",
            fraction(row.kl, 4), fraction(row.kl_most, 4), fraction(row.kl_bare, 4),
        )  # fmt: skip
    console.print(table)
    console.print(
        f"error: weighted, over that of calibration; above {figures.bound:g} a block is stored finer. KL: "
        "behind what was stored, from behind the cache itself; without: had it been stored as asked."
    )
    for what, found in (("texts", figures.rank_of_texts), ("all", figures.rank_of_all)):
        console.print(
            f"Rank correlation of error and KL without a guard over {found.documents} documents ({what}): "
            f"{fraction(found.value, 2)} ({bounds(found.lo, found.hi, 2)})."
        )
