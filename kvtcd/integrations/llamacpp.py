"""`kvtcd llamacpp`: from what a command line says to slots in a daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtcd.client import Client
from kvtcd.core.errors import ConfigError
from kvtcd.integrations.llamacpp_server import LlamaServer
from kvtcd.integrations.llamacpp_slots import Model, Slots


@contextmanager
def opened(
    *,
    server: str,
    slots: Path,
    model: Path | None,
    adapters: Sequence[Path],
    variant: str,
    full_digest: bool,
    salt: str,
    daemon: str | None,
) -> Iterator[tuple[Slots, LlamaServer]]:
    """Yield the slots of a server, and the server.

    Raises:
        BadRequest: an address or a folder that is none.
        Unavailable: no server, no daemon, or no such model.
    """
    llama = LlamaServer(server, slots)
    what = Model(
        file=model or llama.props().model, adapters=tuple(adapters), variant=variant, full_digest=full_digest
    )
    with Client(daemon) as client:
        yield Slots(client, llama, what, salt=salt), llama


def tokens_of(server: LlamaServer, *, prompt: Path | None, messages: Path | None) -> list[int]:
    """Return the tokens of a prompt or a conversation, one of the two, as the server would read it.

    Raises:
        ConfigError: both or none is given, or the file cannot be read.
    """
    file = prompt or messages
    if file is None or (prompt and messages):
        raise ConfigError("command line", "", "give one of --prompt and --messages")
    try:
        text = file.read_text("utf-8")
        if messages:
            text = server.prompt_of(json.loads(text))
    except (OSError, ValueError) as error:
        raise ConfigError(file, "", f"cannot be read: {error}") from None
    return server.tokenize(text)
