"""Options that several commands have."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtcd import outputs
from kvtcd.core.devices import DEVICE
from kvtcd.core.errors import ConfigError
from kvtcd.lab import picture
from kvtcd.lab.codec_spec import Spec


def output_option(*names: str, help: str) -> Any:  # noqa: A002, ANN401 - both as in typer
    """Return an option for a file to write, which is refused at once if it cannot be, or is one to read."""
    return typer.Option(*names, help=help, parser=_output, metavar="FILE", callback=_written)


def input_option(*names: str, help: str) -> Any:  # noqa: A002, ANN401 - both as in typer
    """Return an option for a file to read, which is refused at once if it is not there."""
    return typer.Option(*names, help=help, exists=True, dir_okay=False, readable=True, callback=_read)


def device_option(*, help: str) -> Any:  # noqa: A002, ANN401 - both as in typer
    """Return an option for where something runs."""
    return typer.Option(help=f"{help}: cpu, cuda, cuda:N.", parser=_device, metavar="DEVICE")


def number_option(*names: str, help: str, min: float) -> Any:  # noqa: A002, ANN401 - all as in typer
    """Return an option for a number, or several, none of them infinite, which no lower bound refuses."""
    return typer.Option(*names, help=help, min=min, callback=_finite)


def refuse_idle(context: typer.Context, why: str, *names: str) -> None:
    """Refuse options that were given and have no effect.

    Args:
        context: of the command.
        why: they have none: beside which other option, or without which.
        names: of the command's parameters.

    Raises:
        ConfigError: one was given.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        # By its name: typer has a click of its own or not, as its release has it.
        if parameter.name in names and source and source.name == "COMMANDLINE":
            raise ConfigError(parameter.opts[0], "", f"has no effect {why}; leave it out")


def _finite(parameter: typer.CallbackParam, said: Any) -> Any:  # noqa: ANN401 - as in typer
    for number in said if isinstance(said, Sequence) else [said]:
        if number is not None and not math.isfinite(number):
            raise ConfigError(parameter.opts[0], "", f"{number} is no number that means anything here")
    return said


def _device(said: str) -> str:
    if not re.fullmatch(DEVICE.regex, said):
        raise ConfigError("--device", "", f"{said!r} is neither cpu nor cuda nor cuda:N")
    return said


def _output(said: str) -> Path:
    outputs.check(path := Path(said))
    return path


def _picture(said: str) -> Path:
    picture.check(path := _output(said))
    return path


_FILES = "kvtcd.files"
"""Of the context: what was named so far, as (written or read, path, option)."""


def _written(context: typer.Context, parameter: typer.CallbackParam, said: Any) -> Any:  # noqa: ANN401 - as in typer
    return _apart(context, parameter, said, written=True)


def _read(context: typer.Context, parameter: typer.CallbackParam, said: Any) -> Any:  # noqa: ANN401 - as in typer
    return _apart(context, parameter, said, written=False)


def _apart(
    context: typer.Context,
    parameter: typer.CallbackParam,
    said: Any,  # noqa: ANN401 - a path, several, or none
    *,
    written: bool,
) -> Any:  # noqa: ANN401 - the same
    """Refuse to write a file that the same command reads, whichever is named first."""
    named: list[tuple[bool, Path, str]] = context.meta.setdefault(_FILES, [])
    for path in [said] if isinstance(said, Path) else said or []:
        for other_is_written, other, option in named:
            if (
                written is not other_is_written
                and path.is_file()
                and other.is_file()
                and path.samefile(other)
            ):
                reads, writes = (option, parameter.opts[0]) if written else (parameter.opts[0], option)
                raise ConfigError(path, "", f"would be written over by {writes}, and is read as {reads}")
        named.append((written, path, parameter.opts[0]))
    return said


def _codec(said: str) -> str:
    Spec.parse(said)
    return said


CALIBRATION_TOKENS = 1024
"""Fewest tokens that anything is calibrated on."""

JsonOption = Annotated[Path | None, output_option("--json", help="Write the figures to this file as JSON.")]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        help="Draw the figures into this PNG, SVG or PDF.",
        parser=_picture,
        metavar="FILE",
        callback=_written,
    ),
]

MODEL = (
    "Alias (smollm2, qwen05, qwen15) or folder of a transformers model, a decoder whose layers all attend to "
    "the whole past"
)
ModelOption = Annotated[str, typer.Option("--model", help=f"{MODEL}.")]
ProfileOption = Annotated[
    Path | None, input_option("--profile", help="A profile; default: calibrated once and cached.")
]
ProfileArgument = Annotated[
    Path, typer.Argument(help="A profile.", exists=True, dir_okay=False, callback=_read)
]
CodecOption = Annotated[
    str,
    typer.Option(
        "--codec",
        help="NAME, NAME:dial or NAME:dial,option. Dials are ratios, below 1 KLs, or bits.",
        parser=_codec,
        metavar="CODEC",
    ),
]
CodecsOption = Annotated[
    list[str],
    typer.Option(
        "--codec",
        help="NAME, NAME:dial or NAME:dial,option, several allowed. Dials are ratios, below 1 KLs, or bits; "
        "without one, several are measured.",
        parser=_codec,
        metavar="CODEC",
    ),
]
TextsOption = Annotated[
    list[Path],
    input_option(
        "--text",
        help="A text or JSONL file to measure on, none that a profile was made from; several allowed.",
    ),
]
ContextOption = Annotated[
    int, typer.Option("--context", min=256, help="Tokens of a document that are stored; a block has 256.")
]
ContinueOption = Annotated[
    int, typer.Option("--continue", min=2, help="Tokens of it that are read behind them.")
]
WindowsOption = Annotated[
    int,
    typer.Option(
        "--windows", min=1, help="Documents of each file, spread evenly over it; intervals need two."
    ),
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="Threads of model and codecs.")]

TRACE = input_option("--trace", help="Requests as JSONL: a Mooncake trace, or what `serve --record` wrote.")
TraceOption = Annotated[Path, TRACE]
PolicyOption = Annotated[Path | None, input_option("--policy", help="A policy file; default: balanced.")]
TokenBytesOption = Annotated[
    int | None,
    typer.Option(
        "--bytes-per-token",
        min=1,
        help="Raw bytes of a token: 2 (K and V) x layers x KV heads x dimension x 2 bytes. A recording or "
        "profile knows.",
    ),
]
BenchOption = Annotated[
    Path | None,
    input_option("--bench", help="What `kvtcd bench ttft --json` wrote of this model and machine."),
]
PrefillOption = Annotated[
    float | None,
    number_option("--prefill", min=0.001, help="In its place: tokens that the engine reads a second."),
]
ReuseOption = Annotated[
    float | None,
    number_option("--reuse", min=0.001, help="And raw MB that are fetched and unpacked a second."),
]
OverheadOption = Annotated[
    float, number_option("--overhead-ms", min=0, help="Of a fetch, whatever its length.")
]
