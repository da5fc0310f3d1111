"""`kvtcd chat`: an example of a server that reuses what it has read, conversation by conversation."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import closing
from pathlib import Path

import torch
from aiohttp import web
from rich.console import Console

from kvtcd import terminal
from kvtcd.client import Client
from kvtcd.core.errors import Unavailable
from kvtcd.lab import models
from kvtcd.lab.chat_model import Speaker
from kvtcd.lab.chat_server import ChatServer

HOST = "127.0.0.1"


def command(
    *,
    model: str,
    daemon: str | None,
    port: int,
    waiting: int,
    block_tokens: int,
    step: int,
    most: int,
    threads: int,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        model: alias or folder.
        daemon: address of the daemon; None: the usual one. It may be away, which is said, and may come back.
        port: on this host alone; 0: any that is free.
        waiting: requests that may wait or be answered at once.
        block_tokens: tokens of a stored block.
        step: tokens that are read in one pass, and stored when it ends.
        most: tokens of an answer, for requests that say nothing.
        threads: of the model.

    Raises:
        Unavailable: the model cannot be had, or the port is taken.
        UnsupportedCache, UnsupportedModel: its cache cannot be stored by prefix.
    """
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(threads)
    console = terminal.console()
    with terminal.progress(console, transient=True) as progress:
        loaded = models.load(models.resolve(model, progress))
    identity = models.identity(loaded, block_tokens=block_tokens)
    with closing(Client(daemon, timeout=10)) as client:
        speaker = Speaker(loaded, identity, client, step=step, most=most)
        if failure := speaker.prefixes.failure:
            without = f"answering without the daemon, and with it once it is there: {failure}"
            console.print(without, soft_wrap=True, markup=False)
        server = ChatServer(Path(model).name, speaker, waiting=waiting)
        asyncio.run(_serve(server.app(), port, console))


async def _serve(app: web.Application, port: int, console: Console) -> None:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise Unavailable(f"port {port} of {HOST} cannot be had: {error.strerror}") from error
        console.print(f"http://{HOST}:{runner.addresses[0][1]}/v1", soft_wrap=True)
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        await ended.wait()
    finally:
        await runner.cleanup()
