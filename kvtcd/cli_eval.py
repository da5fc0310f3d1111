"""`kvtcd eval`: what codecs cost and save, on a model of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Codecs measured on a model and texts of your own.", no_args_is_help=True)

ModelOption = Annotated[
    str, typer.Option("--model", help="Alias (smollm2, qwen05, qwen15) or folder of a transformers model.")
]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", help="A profile; default: calibrated once and cached.")
]
CodecOption = Annotated[
    list[str],
    typer.Option("--codec", help="NAME, or NAME:ratio, several allowed; without a ratio it is swept."),
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="Threads of the model.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as JSON.")]


@app.command("rd")
def rate_distortion(
    *,
    model: ModelOption,
    codec: CodecOption,
    text: Annotated[list[Path], typer.Option(help="A text or JSONL file to measure on, several allowed.")],
    profile: ProfileOption = None,
    context: Annotated[int, typer.Option(min=133, help="Tokens of a document that are stored.")] = 1024,
    continuation: Annotated[
        int, typer.Option("--continue", min=2, help="Tokens of it that are read behind them.")
    ] = 128,
    windows: Annotated[int, typer.Option(min=1, help="Documents of each file, spread evenly over it.")] = 8,
    threads: ThreadsOption = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this PNG or SVG.")] = None,
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
