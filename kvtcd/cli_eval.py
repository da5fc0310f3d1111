"""`kvtcd eval`: what codecs cost and save, on a model of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtcd.cli_options import (
    CALIBRATION_TOKENS,
    CodecOption,
    CodecsOption,
    ContextOption,
    ContinueOption,
    JsonOption,
    ModelOption,
    PlotOption,
    ProfileOption,
    TextsOption,
    ThreadsOption,
    WindowsOption,
    input_option,
    output_option,
    refuse_idle,
)

app = typer.Typer(help="Codecs measured on a model and texts of your own.", no_args_is_help=True)


@app.command("rd")
def rate_distortion(
    *,
    model: ModelOption,
    codec: CodecsOption,
    text: TextsOption,
    profile: ProfileOption = None,
    context: ContextOption = 1024,
    continuation: ContinueOption = 128,
    windows: WindowsOption = 8,
    threads: ThreadsOption = 1,
    plot: PlotOption = None,
    json: JsonOption = None,
) -> None:
    """Show ratio and divergence of codecs, and their ratios at equal divergence.

    All codecs see the same documents; the codec named first is what the others are held against.
    """
    from kvtcd.lab import rd as lab  # noqa: PLC0415 - torch and transformers

    lab.command(
        model=model, profile=profile, codecs=codec, files=text, context=context, continuation=continuation,
        per_file=windows, threads=threads, json=json, plot=plot,
    )  # fmt: skip


@app.command("eviction")
def eviction(
    *,
    beside: Annotated[
        Path,
        typer.Argument(help="Figures of `kvtcd eval rd --json`: their documents are measured once more."),
    ],
    model: ModelOption,
    method: Annotated[list[str], typer.Option("--method", help="h2o:RATIO or tova:RATIO, several allowed.")],
    text: Annotated[
        list[Path], input_option("--text", help="The texts of those figures, in the same order.")
    ],
    python: Annotated[
        Path, typer.Option(envvar="KVTCD_RIVALS", help="Interpreter of an environment with kvpress.")
    ],
    threads: ThreadsOption = 1,
    plot: PlotOption = None,
    json: JsonOption = None,
) -> None:
    """Show what dropping tokens costs (H2O and TOVA, by kvpress), beside codecs on the same documents.

    They are dropped before the model sees what follows; the first and last are kept, as with codecs.
    """
    from kvtcd.lab.eviction import command as lab  # noqa: PLC0415 - torch and transformers

    lab.command(
        beside=beside, model=model, methods=method, files=text, python=python, threads=threads, json=json,
        plot=plot,
    )  # fmt: skip


@app.command("budget")
def budget(
    *,
    model: ModelOption,
    codec: CodecsOption,
    text: TextsOption,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=CALIBRATION_TOKENS, help="Tokens to calibrate on, several allowed; default: 1024 to 65536."
        ),
    ] = None,
    context: ContextOption = 1024,
    continuation: ContinueOption = 128,
    windows: WindowsOption = 8,
    threads: ThreadsOption = 1,
    plot: PlotOption = None,
    json: JsonOption = None,
) -> None:
    """Show what calibration tokens buy: divergence at equal bytes by budget, and how many tokens do.

    Profiles are kept; killed and started again, the command goes on where it was.
    """
    from kvtcd.lab import budget as lab  # noqa: PLC0415 - torch and transformers

    lab.command(
        model=model, codecs=codec, files=text, budgets=tokens or lab.BUDGETS, context=context,
        continuation=continuation, per_file=windows, threads=threads, json=json, plot=plot,
    )  # fmt: skip


@app.command("guard")
def guard(
    *,
    model: ModelOption,
    codec: CodecOption,
    text: TextsOption,
    profile: ProfileOption = None,
    context: ContextOption = 1024,
    continuation: ContinueOption = 128,
    windows: WindowsOption = 4,
    threads: ThreadsOption = 1,
    json: JsonOption = None,
) -> None:
    """Show what the guard of kvtc2 does with foreign texts, random tokens and corrupted caches.

    The codec is kvtc2 with a dial, such as kvtc2:64; caches of the first text are corrupted.
    """
    from kvtcd.lab import guard as lab  # noqa: PLC0415 - torch and transformers

    lab.command(
        model=model, profile=profile, codec=codec, files=text, context=context, continuation=continuation,
        per_file=windows, threads=threads, json=json,
    )  # fmt: skip


@app.command("tasks")
def tasks(
    called: typer.Context,
    *,
    model: ModelOption,
    codec: CodecsOption,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="gsm8k, humaneval, lambada, mmlu, key-value, xquad, chat, passkey, variables, common-words; "
            "several allowed; default: all that can be had."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="KVTCD_DATA", help="Folder of the files of published sets.")
    ] = None,
    file: Annotated[
        Path | None, input_option("--file", help="A set of your own, JSONL: context, question, answers.")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="Of your own set: exact, f1, or code, which runs what the model writes.")
    ] = "exact",
    n: Annotated[int, typer.Option("--n", min=2, help="Items of each task, spread evenly over it.")] = 25,
    context: ContextOption = 1024,
    profile: ProfileOption = None,
    threads: ThreadsOption = 1,
    json: JsonOption = None,
) -> None:
    """Show what a model can do behind a packed cache, against what it can do without one."""
    if not file:
        refuse_idle(called, "without --file", "metric")
    elif not task:
        refuse_idle(called, "with --file alone", "data")
    from kvtcd.lab.tasks import command as lab  # noqa: PLC0415 - torch and transformers

    lab.command(
        model=model, profile=profile, codecs=codec, names=task or [], own=file, metric=metric, data=data, n=n,
        context=context, threads=threads, json=json,
    )  # fmt: skip


@app.command("dump")
def dump(
    *,
    model: ModelOption,
    text: TextsOption,
    out: Annotated[Path, output_option("--out", help="Write the caches to this file, safetensors.")],
    context: ContextOption = 512,
    queries: Annotated[int, typer.Option(min=1, help="Tokens behind them whose queries are kept.")] = 8,
    windows: WindowsOption = 24,
    threads: ThreadsOption = 1,
) -> None:
    """Write the caches of documents into a file, for `kvtcd ablate --dump` and `kvtcd validate --dump`."""
    from kvtcd.lab import dump_model as lab  # noqa: PLC0415 - torch and transformers

    lab.command(
        model=model, files=text, context=context, queries=queries, per_file=windows, threads=threads, out=out
    )
