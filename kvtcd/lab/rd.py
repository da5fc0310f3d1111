"""`kvtcd eval rd`: how much smaller codecs make a cache, and how far the model then reads from where it did.

A document is a window of context and continuation, the windows spread evenly over each file. For each the
model reads the context once; every codec then packs the same blocks as a daemon would, block by block, and
the model reads the continuation behind what came back. `evaluate` has the measures, `rd_points` the sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvtcd import terminal
from kvtcd.codec.choose import NamespaceCodec
from kvtcd.core.errors import ConfigError
from kvtcd.core.identity import Identity
from kvtcd.lab import evaluate, models, texts
from kvtcd.lab.capture import windows
from kvtcd.lab.codec_spec import Spec, open_codecs, profile_source
from kvtcd.lab.evaluate import Measured, Quality
from kvtcd.lab.figures import write_json
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.phases import Advance, Phases
from kvtcd.lab.rd_points import EqualKl, Noise, Point, equal_kl, noise_of, points
from kvtcd.lab.rd_ranking import Surpassed, surpassed
from kvtcd.lab.rd_report import show
from kvtcd.lab.texts import Text


@dataclass(frozen=True, slots=True)
class Document:
    """A window: index of its file, and its tokens."""

    file: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """What the command finds out; `file_of_documents` are indices of `files`."""

    model: str
    profile: str | None
    files: tuple[str, ...]
    context: int
    continuation: int
    documents: int
    file_of_documents: tuple[int, ...]
    noise: Noise
    points: tuple[Point, ...]
    equal_kl: tuple[EqualKl, ...]
    surpassed: tuple[Surpassed, ...] = ()


def command(
    *,
    model: str,
    profile: Path | None,
    codecs: Sequence[str],
    files: Sequence[Path],
    context: int,
    continuation: int,
    per_file: int,
    threads: int,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Measure codecs on the user's texts, show a table, and write figures and plot if asked.

    Raises:
        ConfigError: a codec or text that cannot be used.
        Corrupt, ProfileMismatch: the profile is damaged, or of another model.
        Unavailable: the model or scipy cannot be had, or matplotlib for a plot.
        UnsupportedCache, UnsupportedRope: the model's cache cannot be stored by prefix.
    """
    specs = [Spec.parse(codec) for codec in codecs]
    sources = texts.read(files)
    torch.set_num_threads(threads)
    console = terminal.console()
    with terminal.progress(console) as progress:
        phases = Phases(progress)
        loaded = models.load(models.resolve(model, progress))
        identity = models.identity(loaded)
        documents = cut(loaded, sources, context, continuation, per_file)
        source = profile_source(loaded, identity, specs, profile, phases)
        opened = open_codecs(identity, specs, source)
        with phases.bar(f"{loaded.folder.name} reads {len(documents)} documents", len(documents)) as advance:
            results, noise = measure(loaded, identity, documents, context, codecs=opened, advance=advance)
    groups = [document.file for document in documents]
    figures = Figures(
        model=loaded.folder.name,
        profile=source.digest,
        files=tuple(source.name for source in sources),
        context=context,
        continuation=continuation,
        documents=len(documents),
        file_of_documents=tuple(groups),
        noise=noise_of(noise, groups),
        points=tuple(points(results, groups, 16 * identity.layout.token_elements)),
        equal_kl=tuple(equal_kl(results, groups)),
        surpassed=tuple(surpassed(results)),
    )
    show(console, figures)
    if plot:
        from kvtcd.lab.rd_plot import draw  # noqa: PLC0415 - loads matplotlib, which not all have

        draw(figures, plot)
    if json:
        write_json(json, "eval rd", asdict(figures))


def cut(
    loaded: LoadedModel, sources: Sequence[Text], context: int, continuation: int, per_file: int
) -> list[Document]:
    """Cut texts into documents, at most `per_file` of each, every one with the model's BOS if it has one.

    Raises:
        ConfigError: a text is shorter than one document.
    """
    start = models.tokenize(loaded, "")
    ids = [models.tokenize(loaded, source.text)[len(start) :] for source in sources]
    length = context + continuation - len(start)
    for source, tokens in zip(sources, ids, strict=True):
        if len(tokens) < length:
            raise ConfigError(
                source.name, "", f"has {len(tokens)} tokens, less than the {length} of one document"
            )
    return [Document(file, (*start, *window)) for file, window in windows(ids, length, per_file)]


def measure(
    loaded: LoadedModel,
    identity: Identity,
    documents: Sequence[Document],
    context: int,
    *,
    codecs: Mapping[Spec, NamespaceCodec],
    advance: Advance,
) -> tuple[dict[Spec, list[Measured]], list[Quality]]:
    """Take every document through every codec; return what was measured, and the noise of each document."""
    results: dict[Spec, list[Measured]] = {spec: [] for spec in codecs}
    noise = []
    for number, document in enumerate(documents):
        read = evaluate.read(loaded, identity, document.tokens, context)
        noise.append(evaluate.noise(loaded, identity, read))
        for spec, codec in codecs.items():
            results[spec].append(evaluate.measure(loaded, identity, read, codec.encoder, codec.decoder))
        advance(number + 1)
    return results, noise
