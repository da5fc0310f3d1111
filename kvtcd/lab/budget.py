"""`kvtcd eval budget`: what calibration tokens buy, in divergence at fixed bytes.

For each budget the built-in recipe is calibrated, or its profile found in the cache folder: killed and
started again, the command goes on with the window it was at. All profiles then see the same documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console

from kvtcd.codec.choose import NamespaceCodec
from kvtcd.core.errors import ConfigError
from kvtcd.core.identity import Identity
from kvtcd.lab import evaluate, texts
from kvtcd.lab.budget_points import Advice, Dimension, Pair, Row, advise, dimensions, rows
from kvtcd.lab.calibrate import profile_for
from kvtcd.lab.codec_source import ProfileSource, open_codecs
from kvtcd.lab.codec_spec import Spec, spelled
from kvtcd.lab.evaluate import Measured
from kvtcd.lab.figures import write_json
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.opened import opened
from kvtcd.lab.phases import Advance
from kvtcd.lab.rd import Document, cut
from kvtcd.lab.rd_report import bounds, fraction, losslessly
from kvtcd.terminal import Table

BUDGETS = tuple(1024 << n for n in range(7))
"""Tokens of calibration that are compared: 1,024 to 65,536."""
_NEXT = 2**0.5
"""Between the two stands of a dial that has any."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What the command finds out; `skipped` says which codec cannot be had at which budget, and why."""

    model: str
    files: tuple[str, ...]
    context: int
    continuation: int
    documents: int
    rows: tuple[Row, ...]
    recommended: tuple[Advice, ...]
    skipped: tuple[str, ...]


def command(
    *,
    model: str,
    codecs: Sequence[str],
    files: Sequence[Path],
    budgets: Sequence[int],
    context: int,
    continuation: int,
    per_file: int,
    threads: int,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Calibrate with each budget, measure, show a table and what it comes to, and write figures if asked.

    Raises:
        ConfigError: a codec or text that cannot be used, or more tokens than the recipe has.
        Unavailable: the model or scipy cannot be had, or matplotlib for a plot.
        UnsupportedCache, UnsupportedModel: the model's cache cannot be stored by prefix.
    """
    specs = [_with_ratio(codec) for codec in codecs]
    sources = texts.read(files)
    with opened(model, threads) as (loaded, identity, phases, console):
        documents = cut(loaded, sources, context, continuation, per_file)
        asked = sorted(set(budgets))
        # The largest first: if the recipe has less, that is said before hours go into the others.
        made = {tokens: profile_for(loaded, phases, tokens=tokens) for tokens in reversed(asked)}
        pairs: dict[tuple[int, Spec], Pair] = {}
        found: dict[tuple[int, Spec], Mapping[str, Dimension]] = {}
        skipped: list[str] = []
        for tokens, path in reversed(made.items()):
            source = ProfileSource(path, identity)
            profile = source.find(identity)
            assert profile, "its path was given"
            ready, reasons = _opened(identity, specs, source)
            skipped += [f"{tokens:,} tokens: {reason}" for reason in reasons]
            with phases.bar(f"documents, calibrated on {tokens:,} tokens", len(documents)) as advance:
                measured = measure(loaded, identity, documents, context, codecs=ready, advance=advance)
            pairs |= {(tokens, spec): pair for spec, pair in measured.items()}
            found |= {(tokens, spec): dimensions(profile, spec) for spec in measured}
    compared = rows(pairs, found, [document.file for document in documents])
    figures = Figures(
        model=loaded.folder.name,
        files=tuple(source.name for source in sources),
        context=context,
        continuation=continuation,
        documents=len(documents),
        rows=tuple(compared),
        recommended=tuple(advise(compared)),
        skipped=tuple(skipped),
    )
    show(console, figures)
    if json:
        write_json(json, "eval budget", asdict(figures))
    if plot:
        from kvtcd.lab.budget_plot import draw  # noqa: PLC0415 - loads matplotlib, which not all have

        draw(figures, plot)


def measure(
    loaded: LoadedModel,
    identity: Identity,
    documents: Sequence[Document],
    context: int,
    *,
    codecs: Mapping[Spec, Sequence[NamespaceCodec]],
    advance: Advance,
) -> dict[Spec, Pair]:
    """Take every document through codecs, each at two stands of its dial."""
    stands: dict[Spec, list[list[Measured]]] = {spec: [[] for _ in own] for spec, own in codecs.items()}
    for number, document in enumerate(documents):
        read = evaluate.read(loaded, identity, document.tokens, context)
        for spec, own in codecs.items():
            for row, codec in zip(stands[spec], own, strict=True):
                row.append(evaluate.measure(loaded, identity, read, codec.encoder, codec.decoder))
        advance(number + 1)
    return {spec: Pair.of(found) for spec, found in stands.items()}


def _opened(
    identity: Identity, specs: Sequence[Spec], source: ProfileSource
) -> tuple[dict[Spec, Sequence[NamespaceCodec]], list[str]]:
    """Return each codec at the two stands of its dial, and why others cannot be had with this profile."""
    opened: dict[Spec, Sequence[NamespaceCodec]] = {}
    reasons = []
    for spec in specs:
        stands = [spec, _beside(spec, source.ratios)]
        try:
            opened[spec] = list(open_codecs(identity, stands, source).values())
        except ConfigError as reason:
            reasons.append(str(reason))
    return opened, reasons


def show(console: Console, figures: Figures) -> None:
    """Print what each budget comes to, and how many tokens do."""
    console.print(
        f"{figures.model}: {figures.documents} documents of {figures.context:,} + "
        f"{figures.continuation:,} tokens"
    )
    for advice in figures.recommended:
        own = [row for row in figures.rows if (row.codec, row.dial) == (advice.codec, advice.dial)]
        console.print(_table(own))
        for row in own:
            if row.reasons:
                name = spelled(row.codec, row.dial)
                console.print(
                    f"{name} calibrated on {row.tokens:,} tokens stored {', '.join(losslessly(row.reasons))}."
                )
    console.print(
        "KL at equal bytes, those of the largest budget; times: that of the largest. coded: components; "
        "dim.: participation ratio of their variances."
    )
    for reason in figures.skipped:
        console.print(f"Left out: {reason}", highlight=False)
    for advice in figures.recommended:
        console.print(_words(advice, figures.rows))


def _table(own: Sequence[Row]) -> Table:
    """Return the rows of one codec."""
    streams = " ".join(own[0].dimension)
    title = f"{spelled(own[0].codec, own[0].dial)} at ratio {own[0].ratio:.1f}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("tokens", "KL", "95 %", "times", "95 %", f"coded {streams}", f"dim. {streams}"):
        table.add_column(heading, justify="right")
    for row in own:
        found = row.dimension.values()
        table.add_row(
            f"{row.tokens:,}", fraction(row.kl, 4), bounds(row.kl_lo, row.kl_hi, 4),
            fraction(row.times, 2), bounds(row.times_lo, row.times_hi, 2),
            " ".join(f"{each.coded:,}" for each in found),
            " ".join(f"{each.participation:.0f}" for each in found),
        )  # fmt: skip
    return table


def _words(advice: Advice, found: Sequence[Row]) -> str:
    own = {row.tokens: row for row in found if (row.codec, row.dial) == (advice.codec, advice.dial)}
    name, largest = spelled(advice.codec, advice.dial), own[max(own)]
    if advice.tokens is None:
        why = "it stored blocks losslessly" if largest.reasons else "one document tells no interval"
        return f"{name}: how many tokens do cannot be told: with {largest.tokens:,} {why}."
    chosen = own[advice.tokens]
    if chosen is largest:
        return f"{name}: more tokens still help; no smaller budget comes near {largest.tokens:,}."
    return (
        f"{name}: {chosen.tokens:,} tokens do. KL {fraction(chosen.kl, 4)} at ratio {chosen.ratio:.1f} is "
        f"within the interval of {largest.tokens:,} tokens, {bounds(largest.kl_lo, largest.kl_hi, 4)}."
    )


def _with_ratio(text: str) -> Spec:
    """Read a codec that has bytes to fix."""
    spec = Spec.parse(text)
    if spec.dial is None or spec.dial < 1:
        raise ConfigError("--codec", "", f"{text!r}: budgets are compared at a ratio, for instance kvtc2:32")
    return spec


def _beside(spec: Spec, planned: Sequence[int]) -> Spec:
    """Return the other stand: the next plan above, or the last but one; else half an octave further."""
    assert spec.dial is not None, "`_with_ratio` looked"
    if spec.name != "kvtc":
        return replace(spec, dial=round(spec.dial * _NEXT, 1))
    above = [ratio for ratio in planned if ratio > spec.dial]
    return replace(spec, dial=above[0] if above else max(ratio for ratio in planned if ratio < spec.dial))
