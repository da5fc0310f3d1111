"""The command line.

Exit codes: 0 ok, 1 failure, 2 usage, configuration or a model that is not supported,
3 not judged (`validate`), 69 not available, 70 device lost, 75 already running.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvtcd import __version__, cli_admin, cli_bench, cli_engines, cli_eval, cli_study, config, logs
from kvtcd.cli_options import (
    CALIBRATION_TOKENS,
    TRACE,
    BenchOption,
    CodecOption,
    JsonOption,
    ModelOption,
    OverheadOption,
    PlotOption,
    PolicyOption,
    PrefillOption,
    ProfileOption,
    ReuseOption,
    ThreadsOption,
    TokenBytesOption,
    TraceOption,
    device_option,
    input_option,
    number_option,
    refuse_idle,
)
from kvtcd.core.errors import (
    AlreadyRunning,
    BadRequest,
    ConfigError,
    DeviceLost,
    KvtcdError,
    Unavailable,
    UnsupportedCache,
    UnsupportedModel,
)

app = typer.Typer(
    name="kvtcd",
    help="Keep language-model KV cache in tiers, compressed by a calibrated transform codec.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
policies = typer.Typer(help="Policy files.", no_args_is_help=True)
app.add_typer(policies, name="policy")
app.add_typer(cli_admin.app)
app.add_typer(cli_bench.app, name="bench")
app.add_typer(cli_eval.app, name="eval")
app.add_typer(cli_study.app)
app.add_typer(cli_engines.llamacpp, name="llamacpp")
app.command()(cli_engines.chat)

EXIT_CODES = {
    BadRequest: 2, ConfigError: 2, UnsupportedCache: 2, UnsupportedModel: 2,
    Unavailable: 69, DeviceLost: 70, AlreadyRunning: 75,
}  # fmt: skip

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="config.toml; without it, the defaults.")
]


def _version(*, show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    *, version: Annotated[bool, typer.Option("--version", callback=lambda show: _version(show=show))] = False
) -> None:
    del version  # answered by its callback


@app.command()
def serve(
    path: ConfigOption = None,
    *,
    record: Annotated[
        Path | None,
        typer.Option(help="Append what is asked of the daemon to this file, a trace for `policy simulate`."),
    ] = None,
) -> None:
    """Run the daemon until SIGTERM."""
    settings = config.load(path)
    logs.begin(settings.daemon.log_level, settings.daemon.log_format, os.environ, sys.stderr)
    faulthandler.enable()  # a watchdog ends the process with SIGABRT: the log then says what every thread did
    from kvtcd import serve as daemon  # noqa: PLC0415 - torch is loaded for the commands that need it

    asyncio.run(daemon.serve(settings, record, path))


@app.command()
def check(path: ConfigOption = None) -> None:
    """Print the configuration in effect, and refuse what `serve` would refuse; nothing is begun or left."""
    settings = config.load(path)
    from kvtcd import check as preflight  # noqa: PLC0415 - torch

    notes = list(preflight.examine(settings))
    typer.echo(config.dump(settings), nl=False)
    for note in notes:
        typer.echo(f"\n# {note}", nl=False)
    typer.echo()


@policies.command("check")
def policy_check(file: Annotated[Path, typer.Argument(help="A policy file.")]) -> None:
    """Check one policy file."""
    policy = config.load_policy(file)
    typer.echo(f"{file}: ok ({policy.codec.name}, disk written {policy.disk.write})")


@policies.command("simulate")
def policy_simulate(
    *,
    trace: TraceOption,
    policy: Annotated[list[Path], input_option("--policy", help="A policy file, several allowed.")],
    budget: Annotated[
        list[str], typer.Option(help="Room for raw blocks, 3000blocks or 64GiB, several allowed.")
    ],
    ratio: Annotated[
        list[float] | None,
        number_option(min=1, help="How much smaller stored blocks are, several allowed; default: 1."),
    ] = None,
    bytes_per_token: TokenBytesOption = None,
    plot: PlotOption = None,
    json: JsonOption = None,
) -> None:
    """Replay a trace and show what each policy finds in a budget, between LRU and the optimum."""
    from kvtcd.lab import simulate as lab  # noqa: PLC0415 - rich, and matplotlib or torch where asked for

    lab.command(
        trace=trace, policies=policy, budgets=budget, ratios=ratio or [1.0], bytes_per_token=bytes_per_token,
        json=json, plot=plot,
    )  # fmt: skip


@app.command()
def calibrate(
    called: typer.Context,
    *,
    model: ModelOption,
    text: Annotated[
        list[Path] | None,
        input_option("--text", help="Text or JSONL file, several allowed; without any, the built-in mix."),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            min=CALIBRATION_TOKENS,
            help="Tokens to read; an eighth or more is held out, the others are fitted to.",
        ),
    ] = 65_536,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    rank: Annotated[int, typer.Option(min=1, help="Most components to keep of each stream.")] = 10_000,
    sensitivity: Annotated[
        Literal["fisher", "attention", "none"],
        typer.Option(help="How kvtc2 weighs errors: by gradients, by attention alone, or all alike."),
    ] = "fisher",
    low_memory: Annotated[
        bool, typer.Option("--low-memory", help="Shorter windows and at most 2,048 components.")
    ] = False,
    split: Annotated[
        str | None,
        typer.Option(help="A profile for each rank of a split model: tp4, pp2 or pp2-tp4."),
    ] = None,
    stage_layers: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Layers of each stage (pp), in order; default: equally many."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of model and fit; default: all cores.")
    ] = None,
    device: Annotated[str, device_option(help="Where the model runs")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="File or folder for the profile; default: the cache folder.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Fit the transform of a model on texts and write its profile.

    Killed and started again with the same options, it goes on where it was.
    """
    if not split:
        refuse_idle(called, "without --split", "stage_layers")
    from kvtcd.lab import calibrate as lab  # noqa: PLC0415 - torch and transformers

    lab.command(
        model=model, files=text or [], tokens=tokens, seed=seed, rank=rank, sensitivity=sensitivity,
        low_memory=low_memory, split=split, stage_layers=stage_layers or [], threads=threads, device=device,
        out=out, json=json,
    )  # fmt: skip


@app.command()
def plan(
    called: typer.Context,
    *,
    profile: Annotated[Path | None, input_option("--profile", help="The model's profile.")] = None,
    bytes_per_token: TokenBytesOption = None,
    ratio: Annotated[
        float | None,
        number_option(min=1, help="Of whole prefixes, where the profile's curve does not say it."),
    ] = None,
    policy: PolicyOption = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a prefix; default: the trace's mean, else 4,096.")
    ] = None,
    budget: Annotated[
        list[str] | None, typer.Option(help="Room for stored blocks, such as 64GiB, several allowed.")
    ] = None,
    trace: Annotated[Path | None, TRACE] = None,
    bench: BenchOption = None,
    prefill: PrefillOption = None,
    reuse: ReuseOption = None,
    overhead_ms: OverheadOption = 5.0,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Say what a model's cache takes, what a budget holds and finds, and from which length on it pays."""
    if bench or not prefill:
        refuse_idle(called, "without --prefill and --reuse", "overhead_ms")
    from kvtcd.lab import plan as lab  # noqa: PLC0415 - torch

    lab.command(
        profile=profile, bytes_per_token=bytes_per_token, ratio=ratio, policy=policy, tokens=tokens,
        budgets=budget or [], trace=trace, bench=bench, prefill=prefill, reuse=reuse,
        overhead_ms=overhead_ms, json=json, plot=plot,
    )  # fmt: skip


@app.command()
def demo(
    *,
    model: ModelOption = "smollm2",
    document: Annotated[
        Path | None, input_option("--document", help="A text to read; default: a built-in one.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=256, help="Read only so many tokens of it.")] = None,
    profile: ProfileOption = None,
    codec: CodecOption = "kvtc2:16",
    threads: ThreadsOption = 1,
    json: JsonOption = None,
) -> None:
    """Show the whole way on a real model: read, store, restart, fetch, answer, continue."""
    from kvtcd.lab import demo as lab  # noqa: PLC0415 - torch and transformers

    lab.command(
        model=model,
        document=document,
        tokens=tokens,
        profile=profile,
        codec=codec,
        threads=threads,
        json=json,
    )


def main() -> None:
    """Run the command line; an error of ours is one line on stderr."""
    # Before torch loads OpenMP: threads that wait for each other sleep instead of spinning. On cores shared
    # with anything else, two spinning threads took fifty times as long as one for an eigendecomposition.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except KvtcdError as error:
        typer.echo(f"kvtcd: {error}", err=True)
        sys.exit(next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1))
