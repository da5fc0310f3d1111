"""Commands that bring an engine and a daemon together."""

from __future__ import annotations

from typing import Annotated

import typer


def chat(
    *,
    model: Annotated[str, typer.Option(help="Alias or folder of a transformers model.")] = "smollm2",
    daemon: Annotated[
        str | None,
        typer.Option(help="Socket or http://host:port; default: $KVTCD_SOCKET, else the usual one."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0: any that is free.")] = 8000,
    waiting: Annotated[
        int, typer.Option(min=1, help="Requests that may wait or be answered at once; more get 429.")
    ] = 16,
    block_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of a stored block.")] = 256,
    step: Annotated[int, typer.Option(min=1, help="Tokens that are read in one pass.")] = 2048,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer, where a request says nothing.")
    ] = 512,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the model.")] = 1,
) -> None:
    """Serve a model in OpenAI's manner: an example that stores and reuses what it reads and says."""
    from kvtcd.lab import chat as lab  # noqa: PLC0415 - torch and transformers

    lab.command(
        model=model, daemon=daemon, port=port, waiting=waiting, block_tokens=block_tokens, step=step,
        most=max_tokens, threads=threads,
    )  # fmt: skip
