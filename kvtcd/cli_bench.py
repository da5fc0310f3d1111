"""`kvtcd bench`: what this machine makes of the program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtcd.cli_options import (
    MODEL,
    CodecOption,
    JsonOption,
    PlotOption,
    ThreadsOption,
    device_option,
    input_option,
    number_option,
    output_option,
)

app = typer.Typer(help="Measurements on this machine.", no_args_is_help=True)


@app.command("overlap")
def overlap(
    *,
    groups: Annotated[
        list[int] | None, typer.Option(min=2, help="Blocks that move at once, several allowed; default: 8.")
    ] = None,
    disk_ms: Annotated[
        float, number_option(min=0, help="Milliseconds that each record makes the disk wait.")
    ] = 50,
    device: Annotated[str, device_option(help="Where blocks are packed")] = "cpu",
    trace: Annotated[
        Path | None,
        output_option("--trace", help="Write the timeline to this file, for chrome://tracing or Perfetto."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Show how a slow disk and the codec hide each other when several blocks move."""
    from kvtcd.lab import bench_overlap as lab  # noqa: PLC0415 - torch

    lab.command(groups=groups or [8], disk_ms=disk_ms, device=device, trace=trace, json=json)


@app.command("codec")
def codec(
    *,
    p: Annotated[
        list[int] | None,
        typer.Option(
            "--p", min=64, help="Features of a stream, several allowed; default: 5760, 14336, 32768."
        ),
    ] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(min=16, help="Components of a stream, several allowed; default: 512, 1024, 2048."),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(help="kvtc, kvtc2, zlib (6), zstd (1), int4, several allowed; default: all."),
    ] = None,
    threads: ThreadsOption = 1,
    device: Annotated[str, device_option(help="Where codecs and products run")] = "cpu",
    predict: Annotated[
        str, typer.Option(help="Measure nothing, predict what a GPU takes: h100, h200.", metavar="CARD")
    ] = "",
    kernels: Annotated[
        bool, typer.Option(help="On a GPU: round and pack codes by kernels, not by torch's operations.")
    ] = True,
    graphs: Annotated[
        bool, typer.Option(help="On a GPU: replay what recurs, instead of telling it operation by operation.")
    ] = True,
    seconds: Annotated[float, number_option(min=0, help="About how long to measure, all in all.")] = 240,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Show how fast codecs are, by stage, beside the fastest bare matrix products of this machine."""
    from kvtcd.lab import bench_codec as lab  # noqa: PLC0415 - torch

    lab.command(
        features=p or [], ranks=rank or [], codecs=codec or [], threads=threads, device=device,
        predict=predict, kernels=kernels, graphs=graphs, seconds=seconds, json=json, plot=plot,
    )  # fmt: skip


@app.command("index")
def index(
    *,
    blocks: Annotated[
        list[int] | None,
        typer.Option(min=1000, help="Sizes, several allowed; default: 1000, 10000 and 100000."),
    ] = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Show what blocks cost: memory, time to match, time to start. A million take 8 GB of disk."""
    from kvtcd.lab import bench_index as lab  # noqa: PLC0415 - torch

    lab.command(sizes=blocks or [1000, 10_000, 100_000], json=json, plot=plot)


@app.command("data-plane")
def data_plane(
    *,
    mib: Annotated[
        list[int] | None, typer.Option(min=1, help="Sizes of blocks, several allowed; default: 1, 4, 16, 64.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is timed, after a first time.")] = 5,
    json: JsonOption = None,
) -> None:
    """Show what moving blocks costs: by HTTP, through shared memory, and what they compare to."""
    from kvtcd.lab import bench_data_plane as lab  # noqa: PLC0415 - torch

    lab.command(sizes=mib or [1, 4, 16, 64], rounds=rounds, json=json)


@app.command("ttft")
def ttft(
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"{MODEL}; several allowed, default: smollm2."),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=256, help="Lengths of prompts, several allowed; default: 512, 1024, 2048, 4096."),
    ] = None,
    text: Annotated[
        Path | None, input_option("--text", help="What prompts are made of; default: a built-in text.")
    ] = None,
    profiles: Annotated[
        Path | None, typer.Option(help="Folder of profiles; default: calibrated once and cached.")
    ] = None,
    codec: CodecOption = "kvtc2:16",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is timed.")] = 3,
    threads: ThreadsOption = 1,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Show the time to the first token: recomputed, or fetched, raw or packed, from memory or disk."""
    from kvtcd.lab import bench_ttft as lab  # noqa: PLC0415 - torch and transformers

    lab.command(
        names=model or ["smollm2"], sizes=tokens or [512, 1024, 2048, 4096], text=text, profiles=profiles,
        codec=codec, rounds=rounds, threads=threads, json=json, plot=plot,
    )  # fmt: skip


@app.command("remote")
def remote(
    *,
    url: Annotated[str, typer.Option(help="As [remote] url of config.toml; what is written is removed.")],
    endpoint: Annotated[str, typer.Option(help="As [remote] endpoint.")] = "",
    credentials: Annotated[str, typer.Option(help="As [remote] credentials.")] = "",
    mib: Annotated[
        list[int] | None, typer.Option(min=1, help="Sizes of records, several allowed; default: 1 and 4.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Records of one timing.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is timed, after a first time.")] = 7,
    json: JsonOption = None,
) -> None:
    """Show how fast a shared store is by the remote tier, and by its client library alone."""
    from kvtcd import shared_store  # noqa: PLC0415 - torch
    from kvtcd.config import Config, load_credentials  # noqa: PLC0415 - pydantic
    from kvtcd.lab import bench_remote as lab  # noqa: PLC0415 - torch
    from kvtcd.lab.store_libraries import library  # noqa: PLC0415 - clients of stores

    said = {"url": url, "endpoint": endpoint, "credentials": credentials, "timeout": 60.0}
    config = Config.model_validate({"remote": said})
    entry = load_credentials(credentials)
    lab.command(
        store=lambda: shared_store.client(config, entry),
        library=lambda: library(config, entry),
        sizes=mib or [1, 4],
        blocks=blocks,
        rounds=rounds,
        json=json,
    )
