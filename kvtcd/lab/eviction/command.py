"""`kvtcd eval eviction`: what a model reads behind a cache that lost tokens, beside what codecs did to it."""

from __future__ import annotations

import json as jsonlib
import math
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from kvtcd import terminal
from kvtcd.core.errors import ConfigError, Unavailable
from kvtcd.lab import models, texts
from kvtcd.lab.evaluate import SINKS, WINDOW, Quality, quality
from kvtcd.lab.figures import write_json
from kvtcd.lab.phases import Phases
from kvtcd.lab.rd import Document, Figures, cut, digest, read_figures
from kvtcd.lab.rd_points import Means, Point
from kvtcd.lab.rd_ranking import surpassed
from kvtcd.lab.rd_report import show

WORKER = Path(__file__).with_name("worker.py")
METHODS = ("h2o", "tova")
_INSTALL = "python3 -m venv rivals && rivals/bin/pip install 'kvtcd[rivals]', then --python rivals/bin/python"


@dataclass(frozen=True, slots=True)
class Method:
    """A method, and how many of the tokens that codecs would code it keeps: one in `ratio`."""

    name: str
    ratio: float

    @classmethod
    def parse(cls, text: str) -> Method:
        """Read ``h2o:8`` or ``tova:4``.

        Raises:
            ConfigError: it is none of them, or the ratio is not one or above.
        """
        name, _, dial = text.partition(":")
        try:
            ratio = float(dial)
        except ValueError:
            ratio = 0.0
        if name not in METHODS or not 1 <= ratio < float("inf"):
            raise ConfigError(
                "--method", "", f"{text!r} is not one of {', '.join(METHODS)} with a ratio, as h2o:8"
            )
        return cls(name, ratio)

    def __str__(self) -> str:
        return f"{self.name}:{self.ratio:g}"

    def kept(self, coded: int) -> int:
        """Return how many of `coded` tokens stay, at least one."""
        return max(1, round(coded / self.ratio))


def command(
    *,
    beside: Path,
    model: str,
    methods: Sequence[str],
    files: Sequence[Path],
    python: Path,
    threads: int,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Measure methods on the documents of `eval rd`, show both, and write figures and plot if asked.

    Raises:
        ConfigError: a method, text or figures that cannot be used, or figures of other documents.
        Unavailable: the model, kvpress or scipy cannot be had, or matplotlib for a plot.
    """
    wanted = [Method.parse(method) for method in methods]
    known = read_figures(beside)
    sources = texts.read(files)
    console = terminal.console()
    with terminal.progress(console) as progress:
        phases = Phases(progress)
        loaded = models.load(models.resolve(model, progress))
        token_bits = 16 * models.identity(loaded).layout.token_elements
        folder = loaded.folder
        documents = cut(loaded, sources, known.context, known.continuation, known.windows)
        del loaded  # the other interpreter has it once more
        if digest(documents) != known.digest_of_documents:
            raise ConfigError(
                beside, "", "is of other documents: name the same model and texts, in the same order"
            )
        results: dict[Method, list[Quality]] = {method: [] for method in wanted}
        runs = _runs(python, folder, wanted, documents, context=known.context, threads=threads)
        with (
            phases.bar(f"kvpress reads {len(documents)} documents", len(documents)) as advance,
            closing(runs),
        ):
            for number, logits in enumerate(runs):
                tokens = documents[number].tokens[known.context :]
                for method in wanted:
                    results[method].append(quality(logits["whole"], logits[str(method)], tokens))
                advance(number + 1)
    points = (*known.points, *_points(results, known, token_bits))
    figures = replace(
        known,
        points=points,
        equal_kl=(),
        surpassed=tuple(surpassed(points, known.file_of_documents)),
    )
    show(console, figures)
    if json:
        write_json(json, "eval eviction", asdict(figures))
    if plot:
        from kvtcd.lab.rd_plot import draw  # noqa: PLC0415 - loads matplotlib, which not all have

        draw(figures, plot)


def _points(results: Mapping[Method, Sequence[Quality]], known: Figures, token_bits: int) -> list[Point]:
    """Sum up; a token that is kept takes all its bits, and no index, since keys carry their positions."""
    coded, found = _coded(known.context), []
    for method, documents in results.items():
        kept = method.kept(coded)
        means = Means.of(documents, known.file_of_documents)
        found.append(
            Point(
                codec=method.name,
                dial=method.ratio,
                bits_per_token=token_bits * kept / coded,
                ratio=coded / kept,
                ratio_all=known.context / (known.context - coded + kept),
                kl=means.kl,
                kl_lo=means.kl_lo,
                kl_hi=means.kl_hi,
                dnll=means.dnll,
                top1=means.top1,
                err_k=math.nan,
                err_v=math.nan,
                finer=0,
                refused=0,
                kl_of_documents=tuple(one.kl for one in documents),
            )
        )
    return found


def _coded(context: int) -> int:
    """Tokens of a context that codecs code, and methods choose from."""
    return context - SINKS - WINDOW


def _runs(
    python: Path,
    model: Path,
    methods: Sequence[Method],
    documents: Sequence[Document],
    *,
    context: int,
    threads: int,
) -> Generator[dict[str, Any], None, None]:
    """Let the other interpreter read; yield logits by method, document by document.

    Raises:
        Unavailable: it cannot be started, has no kvpress, or fails.
    """
    with tempfile.TemporaryDirectory(prefix="kvtcd-eviction-") as out:
        job = {
            "model": str(model.resolve()),
            "threads": threads,
            "methods": {str(method): (method.name, method.kept(_coded(context))) for method in methods},
            "first": SINKS,
            "last": WINDOW,
            "context": context,
            "documents": [document.tokens for document in documents],
            "out": out,
        }
        job_file, complaints = Path(out, "job.json"), Path(out, "stderr")
        job_file.write_text(jsonlib.dumps(job), "utf-8")
        with complaints.open("wb") as errors:
            try:
                child = subprocess.Popen(  # noqa: S603 - the user's interpreter, our script
                    [python, WORKER, job_file],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            except OSError as error:
                raise Unavailable(f"{python} cannot be started: {error.strerror}; {_INSTALL}") from error
        with child:
            try:
                assert child.stdout is not None
                done = 0
                for line in child.stdout:
                    logits = Path(out, f"{int(line)}.safetensors")
                    yield load_file(logits)
                    logits.unlink()
                    done += 1
            finally:
                child.kill()
        if done < len(documents):
            said = complaints.read_text("utf-8", "replace").strip().splitlines()[-1:]
            raise Unavailable(f"{python} gave up: {''.join(said) or 'it was killed'}; {_INSTALL}")
