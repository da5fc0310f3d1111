"""`kvtcd eval rd`: how much smaller codecs make a cache, and how far the model then reads from where it did.

A document is a window of context and continuation, the windows spread evenly over each file. For each the
model reads the context once; every codec then packs the same blocks as a daemon would, block by block, and
the model reads the continuation behind what came back. `evaluate` has the measures, `rd_points` the sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from json import dumps, loads
from pathlib import Path
from typing import Any

from kvtcd.codec.choose import NamespaceCodec
from kvtcd.core.errors import ConfigError
from kvtcd.core.identity import Identity
from kvtcd.lab import evaluate, models, texts
from kvtcd.lab.capture import windows
from kvtcd.lab.codec_source import open_codecs, profile_source
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.evaluate import Measured, Quality
from kvtcd.lab.figures import write_json
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.opened import opened
from kvtcd.lab.phases import Advance
from kvtcd.lab.rd_points import EqualKl, Means, Point, equal_kl, points
from kvtcd.lab.rd_ranking import Surpassed, surpassed
from kvtcd.lab.rd_report import show
from kvtcd.lab.texts import Text

_DERIVED = {"equal_kl", "surpassed"}


@dataclass(frozen=True, slots=True)
class Document:
    """A window: index of its file, and its tokens."""

    file: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """What the command finds out.

    Attributes:
        noise: what rounding alone does to the same documents; see `evaluate.noise`.
        windows: most documents of a file.
        file_of_documents: indices of `files`.
        digest_of_documents: of their tokens; figures with the same one are of the same documents.
    """

    model: str
    profile: str | None
    files: tuple[str, ...]
    context: int
    continuation: int
    windows: int
    documents: int
    file_of_documents: tuple[int, ...]
    digest_of_documents: str
    noise: Means
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
        UnsupportedCache, UnsupportedModel: the model's cache cannot be stored by prefix.
    """
    specs = [Spec.parse(codec) for codec in codecs]
    sources = texts.read(files)
    with opened(model, threads) as (loaded, identity, phases, console):
        documents = cut(loaded, sources, context, continuation, per_file)
        source = profile_source(loaded, identity, specs, profile, phases)
        ready = open_codecs(identity, specs, source)
        with phases.bar(f"{loaded.folder.name} reads {len(documents)} documents", len(documents)) as advance:
            results, noise = measure(loaded, identity, documents, context, codecs=ready, advance=advance)
    groups = [document.file for document in documents]
    measured = tuple(points(results, groups, 16 * identity.layout.token_elements))
    figures = Figures(
        model=loaded.folder.name,
        profile=source.digest,
        files=tuple(source.name for source in sources),
        context=context,
        continuation=continuation,
        windows=per_file,
        documents=len(documents),
        file_of_documents=tuple(groups),
        digest_of_documents=digest(documents),
        noise=Means.of(noise, groups),
        points=measured,
        equal_kl=tuple(equal_kl(results, groups)),
        surpassed=tuple(surpassed(measured, groups)),
    )
    show(console, figures)
    if json:
        write_json(json, "eval rd", asdict(figures))
    if plot:
        from kvtcd.lab.rd_plot import draw  # noqa: PLC0415 - loads matplotlib, which not all have

        draw(figures, plot)


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


def digest(documents: Sequence[Document]) -> str:
    """Return 64 hex digits that stand for the tokens of documents, in their order."""
    return sha256(dumps([document.tokens for document in documents]).encode()).hexdigest()


def read_figures(path: Path) -> Figures:
    """Read what `--json` wrote; equal ratios and rankings, which follow from the points, are left out.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """
    try:
        found = loads(path.read_text("utf-8"))
        if found["command"] != "eval rd":
            raise ConfigError(path, "", f"is of `kvtcd {found['command']}`, not of `kvtcd eval rd`")
        own = {field.name: found[field.name] for field in fields(Figures) if field.name not in _DERIVED}
        return Figures(
            **own | {
                "files": tuple(own["files"]),
                "file_of_documents": tuple(own["file_of_documents"]),
                "noise": Means(**_numbers(own["noise"])),
                "points": tuple(Point(**_numbers(point)) for point in own["points"]),
            },
            equal_kl=(),
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            path, "", f"is no output of this version's `kvtcd eval rd --json`: {error}"
        ) from error


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON has no word for were written as null."""
    read = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return {name: math.nan if value is None and name != "dial" else value for name, value in read.items()}


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
