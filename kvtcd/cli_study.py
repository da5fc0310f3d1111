"""`kvtcd ablate` and `kvtcd validate`: which codec is right for a cache, by statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer()


@app.command()
def ablate(
    *,
    preset: Annotated[
        Literal["ci", "paper"],
        typer.Option(help="A grid of minutes, or the paper's of a day."),
    ] = "ci",
    dump: Annotated[
        Path | None, typer.Option(help="Caches of your own instead of synthetic ones (`kvtcd eval dump`).")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=6, help="Trials of each cell; default: 40, and 200 for `paper`.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of every random choice.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the products.")] = 1,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures, trials one by one, to this file.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a report in Markdown to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw ratios and curves into this PNG or SVG.")] = None,
) -> None:
    """Take rival codecs apart, factor by factor, and test what each is worth.

    Killed and started again with the same `--json`, it goes on where it was. Ends with 1 if a criterion
    fails.
    """
    from kvtcd.lab.ablate import command as lab  # noqa: PLC0415 - torch

    if not lab.command(
        preset_name=preset,
        dump=dump,
        trials=trials,
        seed=seed,
        threads=threads,
        json=json,
        report=report,
        plot=plot,
    ):
        raise typer.Exit(1)


@app.command()
def validate(
    profile: Annotated[Path, typer.Argument(help="A profile.")],
    *,
    dump: Annotated[
        Path | None, typer.Option(help="Caches that it was not made from (`kvtcd eval dump`).")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Instead: alias or folder of its model, which reads --text.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="A text or JSONL file it was not made from, several allowed.")
    ] = None,
    context: Annotated[int, typer.Option(min=133, help="Tokens of a document.")] = 1024,
    windows: Annotated[int, typer.Option(min=1, help="Documents of each file, spread evenly over it.")] = 4,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the model.")] = 1,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file as JSON.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw energy and tails into this PNG or SVG.")] = None,
) -> None:
    """Say for each stream whether the basis of a profile is safe, `tq` better, or more tokens are needed.

    Ends with 1 if a basis is not safe.
    """
    from kvtcd.lab.validation import command as lab  # noqa: PLC0415 - torch

    if not lab.command(
        profile, dump=dump, model=model, files=text or [], context=context, per_file=windows, threads=threads,
        json=json, plot=plot,
    ):  # fmt: skip
        raise typer.Exit(1)
