"""Commands that bring an engine and a daemon together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtcd.cli_options import ModelOption, ThreadsOption

llamacpp = typer.Typer(help="Slots of a llama.cpp server, in the daemon.", no_args_is_help=True)

DaemonOption = Annotated[
    str | None,
    typer.Option(help="Socket or http(s)://host:port; default: $KVTCD_SOCKET, else the usual one."),
]


def chat(
    *,
    model: ModelOption = "smollm2",
    daemon: DaemonOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0: any that is free.")] = 8000,
    waiting: Annotated[
        int, typer.Option(min=1, help="Requests that may wait or be answered at once; more get 429.")
    ] = 16,
    block_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of a stored block.")] = 256,
    step: Annotated[int, typer.Option(min=1, help="Tokens that are read in one pass.")] = 2048,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer, where a request says nothing.")
    ] = 512,
    threads: ThreadsOption = 1,
) -> None:
    """Serve a model in OpenAI's manner: an example that stores and reuses what it reads and says."""
    from kvtcd.lab import chat as lab  # noqa: PLC0415 - torch and transformers

    lab.command(
        model=model, daemon=daemon, port=port, waiting=waiting, block_tokens=block_tokens, step=step,
        most=max_tokens, threads=threads,
    )  # fmt: skip


ServerOption = Annotated[str, typer.Option(help="http://host:port of the llama.cpp server.")]
FolderOption = Annotated[Path, typer.Option("--slots", help="What the server was given as --slot-save-path.")]
SlotOption = Annotated[int, typer.Option(min=0, help="Number of the slot.")]
FileOption = Annotated[
    Path | None, typer.Option("--model", help="The model's file; default: what the server says it is.")
]
LoraOption = Annotated[
    list[Path] | None, typer.Option(help="File of an adapter that is applied; all of them.")
]
VariantOption = Annotated[
    str, typer.Option(help="Any text that names arguments of the server which change what the cache holds.")
]
SaltOption = Annotated[str, typer.Option(help="Parts these slots from others of the same user.")]
DigestOption = Annotated[
    bool, typer.Option("--full-digest", help="Read every byte of the model instead of sampled pages.")
]


@llamacpp.command("save")
def llamacpp_save(
    *,
    slots: FolderOption,
    server: ServerOption = "http://127.0.0.1:8080",
    slot: SlotOption = 0,
    model: FileOption = None,
    lora: LoraOption = None,
    variant: VariantOption = "",
    salt: SaltOption = "",
    full_digest: DigestOption = False,
    daemon: DaemonOption = None,
) -> None:
    """Store a slot of a running server: what it has read, and what was computed of it."""
    from kvtcd.integrations import llamacpp as engine  # noqa: PLC0415 - only this command needs it

    with engine.opened(
        server=server, slots=slots, model=model, adapters=lora or [], variant=variant,
        full_digest=full_digest, salt=salt, daemon=daemon,
    ) as (store, _):  # fmt: skip
        report = store.save(slot)
    if report.why:
        typer.echo(f"nothing was saved: {report.why}", err=True)
        raise typer.Exit(1)
    there = "saved" if report.new else "there already"
    typer.echo(f"{report.tokens:,} tokens, {report.nbytes:,} bytes: {there}")


@llamacpp.command("restore")
def llamacpp_restore(
    *,
    slots: FolderOption,
    prompt: Annotated[Path | None, typer.Option(help="A text that is about to be sent as a prompt.")] = None,
    messages: Annotated[
        Path | None, typer.Option(help="A conversation that is about to be sent: JSON, a list of messages.")
    ] = None,
    server: ServerOption = "http://127.0.0.1:8080",
    slot: SlotOption = 0,
    model: FileOption = None,
    lora: LoraOption = None,
    variant: VariantOption = "",
    salt: SaltOption = "",
    full_digest: DigestOption = False,
    daemon: DaemonOption = None,
) -> None:
    """Put the longest saved prefix of a prompt or a conversation into a slot of a running server."""
    from kvtcd.integrations import llamacpp as engine  # noqa: PLC0415 - only this command needs it

    with engine.opened(
        server=server, slots=slots, model=model, adapters=lora or [], variant=variant,
        full_digest=full_digest, salt=salt, daemon=daemon,
    ) as (store, llama):  # fmt: skip
        tokens = engine.tokens_of(llama, prompt=prompt, messages=messages)
        report = store.restore(slot, tokens)
    if not report.tokens:
        typer.echo(f"nothing is saved that begins this prompt of {len(tokens):,} tokens", err=True)
        raise typer.Exit(1)
    typer.echo(f"{report.tokens:,} of {len(tokens):,} tokens, {report.nbytes:,} bytes: restored")
