"""`kvtcd ablate`, `validate` and `profile`: which codec is right, by statistics; `kvtcd lab scale`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvtcd.cli_options import (
    MODEL,
    BenchOption,
    CodecsOption,
    ContextOption,
    ContinueOption,
    JsonOption,
    ModelOption,
    OverheadOption,
    PlotOption,
    PolicyOption,
    PrefillOption,
    ProfileArgument,
    ReuseOption,
    TextsOption,
    ThreadsOption,
    TokenBytesOption,
    TraceOption,
    WindowsOption,
    input_option,
    number_option,
    output_option,
    refuse_idle,
)

app = typer.Typer()
lab = typer.Typer(help="Studies.", no_args_is_help=True)
app.add_typer(lab, name="lab")
profiles = typer.Typer(help="Profiles made by `kvtcd calibrate`.", no_args_is_help=True)
app.add_typer(profiles, name="profile")


_OUTCOMES = {"safe": 0, "not safe": 1, "not judged": 3}
"""How `validate` ends."""


@app.command()
def ablate(
    called: typer.Context,
    *,
    preset: Annotated[
        Literal["ci", "paper"],
        typer.Option(help="A grid of minutes, or the paper's of hours."),
    ] = "ci",
    dump: Annotated[
        Path | None,
        input_option("--dump", help="Caches of your own instead of synthetic ones (`kvtcd eval dump`)."),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=6, help="Trials of each cell; default: 40, and 200 for `paper`.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of every random choice.")] = 0,
    threads: ThreadsOption = 1,
    json: JsonOption = None,
    report: Annotated[
        Path | None, output_option("--report", help="Write a report in Markdown to this file.")
    ] = None,
    plot: PlotOption = None,
) -> None:
    """Take rival codecs apart, factor by factor, and test what each is worth.

    Killed and started again with the same `--json`, it goes on where it was. Ends with 1 if a criterion
    fails.
    """
    if dump:
        refuse_idle(called, "with --dump: each document to test is a trial", "trials")
    from kvtcd.lab.ablate import command as study  # noqa: PLC0415 - torch

    if not study.command(
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
    called: typer.Context,
    profile: ProfileArgument,
    *,
    dump: Annotated[
        Path | None, input_option("--dump", help="Caches that it was not made from (`kvtcd eval dump`).")
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"{MODEL}; instead of caches, to read --text.")] = None,
    text: Annotated[
        list[Path] | None,
        input_option("--text", help="A text or JSONL file it was not made from, several allowed."),
    ] = None,
    context: ContextOption = 1024,
    windows: WindowsOption = 4,
    threads: ThreadsOption = 1,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Say for each stream whether the basis of a profile is safe, `tq` better, or more tokens are needed.

    Ends with 1 if a basis is not safe, and with 3 if there is nothing, or too little, to judge it by.
    """
    if not model:
        refuse_idle(called, "without --model", "context", "windows")
    from kvtcd.lab.validation import command as study  # noqa: PLC0415 - torch

    outcome = study.command(
        profile, dump=dump, model=model, files=text or [], context=context, per_file=windows, threads=threads,
        json=json, plot=plot,
    )  # fmt: skip
    raise typer.Exit(_OUTCOMES[outcome])


@lab.command()
def scale(
    called: typer.Context,
    *,
    trace: TraceOption,
    hosts: Annotated[
        list[int] | None,
        typer.Option(min=1, help="How many serve it, several allowed; default: 1, 2, 4, 8, 16."),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        number_option(min=1, help="Of what is packed, end to end, several allowed; default: 1 and 16."),
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Raw blocks in a host's own cache, such as 3000blocks or 64GiB.")
    ] = "64GiB",
    store_budget: Annotated[
        str | None, typer.Option(help="The same for the store; default: room for all.")
    ] = None,
    link: Annotated[float, number_option(min=0.001, help="Gbit/s of a host's link.")] = 25.0,
    store: Annotated[float, number_option(min=0.001, help="Gbit/s out of the store, for all hosts.")] = 100.0,
    latency_ms: Annotated[float, number_option(min=0, help="Until the store's first byte comes.")] = 2.0,
    routing: Annotated[
        Literal["spread", "first-token"],
        typer.Option(help="Requests go to hosts in turn, or to where the first token comes earliest."),
    ] = "spread",
    policy: PolicyOption = None,
    bytes_per_token: TokenBytesOption = None,
    bench: BenchOption = None,
    prefill: PrefillOption = None,
    reuse: ReuseOption = None,
    overhead_ms: OverheadOption = 5.0,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Say what a store that hosts share is worth: by a trace, and from which length of a prefix on."""
    if bench or not prefill:
        refuse_idle(called, "without --prefill and --reuse", "overhead_ms")
    from kvtcd.lab.scale import command as study  # noqa: PLC0415 - torch

    study.command(
        trace=trace, hosts=hosts or [1, 2, 4, 8, 16], ratios=ratio or [1.0, 16.0], budget=budget,
        store_budget=store_budget, link_gbit_s=link, store_gbit_s=store, latency_ms=latency_ms,
        routing=routing, policy=policy, bytes_per_token=bytes_per_token, bench=bench, prefill=prefill,
        reuse=reuse, overhead_ms=overhead_ms, json=json, plot=plot,
    )  # fmt: skip


@profiles.command("show")
def profile_show(
    file: ProfileArgument,
    *,
    plot: PlotOption = None,
    json: JsonOption = None,
) -> None:
    """Show spectrum, plans, ratios and the rate-quality curve of a profile."""
    from kvtcd.lab import profile_view  # noqa: PLC0415 - torch

    profile_view.command(file, plot=plot, json=json)


@profiles.command("choose")
def profile_choose(
    file: ProfileArgument,
    *,
    model: ModelOption,
    text: TextsOption,
    ratio: Annotated[
        list[float] | None,
        number_option(min=1.0, help="To choose for, several allowed; default: 4, 8, 16, 32."),
    ] = None,
    codec: CodecsOption = [],  # noqa: B006 - typer copies it
    context: ContextOption = 1024,
    continuation: ContinueOption = 128,
    windows: WindowsOption = 8,
    threads: ThreadsOption = 1,
    out: Annotated[
        Path, typer.Option(help="Folder that the profile with its choices is written to.")
    ] = Path(),
    json: JsonOption = None,
) -> None:
    """Choose what `auto` stands for at each ratio: of codecs not told apart from the best, the smallest.

    It takes six documents of all texts together. Without --codec those are compared that may win.
    """
    from kvtcd.lab import choose  # noqa: PLC0415 - torch and transformers

    choose.command(
        file, model=model, files=text, ratios=ratio or [], codecs=codec or [], context=context,
        continuation=continuation, per_file=windows, threads=threads, out=out, json=json,
    )  # fmt: skip
