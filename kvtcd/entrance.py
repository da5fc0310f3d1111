"""What a daemon is reached by: sockets handed over or bound here, tokens, certificate; where it publishes."""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypeVar

from kvtcd.api import listeners
from kvtcd.api.listeners import Listener
from kvtcd.api.publisher import Endpoints, Publication, Publisher
from kvtcd.api.tls import Certificate, Tls
from kvtcd.config import Config, load_tokens
from kvtcd.core.access import Token
from kvtcd.core.errors import AlreadyRunning
from kvtcd.engine.service import Service
from kvtcd.systemd import credential, inherited

T = TypeVar("T")
Handed = list[tuple[str, Listener]]
"""Sockets of a service manager, by their names."""
TOKENS = "kvtcd.tokens"
"""Name of the credential that may hold the tokens instead of the file."""


def handed_over(config: Config) -> Handed:
    """Return the sockets that a service manager hands over.

    Raises:
        ConfigError: one of them is not what it is called; or there is none for data, and none can be bound.
    """
    encrypted = config.tcp.tls is not None
    found = [(name, listeners.adopt(name, each, encrypted=encrypted)) for name, each in inherited(os.environ)]
    if listeners.DATA not in dict(found) and (why := listeners.obstacle(config.daemon.socket)):
        raise config.fault("daemon.socket", why)
    return found


def require_free(config: Config, handed: Handed) -> None:
    """Refuse, before anything is made, to begin where somebody listens on what would be bound.

    Raises:
        AlreadyRunning: as `bound`, which may still find it taken.
        ConfigError: something else than a socket is there.
    """
    if listeners.DATA not in dict(handed) and listeners.examine_both(config.daemon.socket):
        raise AlreadyRunning(config.daemon.socket, "socket (daemon.socket)")


def bound(config: Config, handed: Handed) -> list[Listener]:
    """Return what connections come in by: sockets that were handed over, and for the rest some bound here.

    Raises:
        ConfigError: what is configured cannot be bound.
        AlreadyRunning: somebody listens on what is configured.
    """
    every, names = [listener for _, listener in handed], dict(handed)
    if listeners.DATA not in names:
        every += listeners.bind_both(config.daemon.socket)
    if listeners.TCP not in names and config.tcp.address:
        every.append(_bound_tcp(config, config.tcp.address))
    return every


def _bound_tcp(config: Config, address: tuple[str, int]) -> Listener:
    try:
        return listeners.bind_tcp(*address)
    except OSError as error:
        raise config.fault("tcp.listen", f"{config.tcp.listen} cannot be bound: {error.strerror}") from None


def publisher(config: Config, running: Service) -> AbstractAsyncContextManager[object]:
    """Return what publishes KV events while it is entered: nothing, if nothing is configured.

    Raises:
        ConfigError: what is configured cannot be had.
    """
    endpoints = _endpoints(config)
    return Publisher(running, _publication(config), endpoints) if endpoints else nullcontext()


def _publication(config: Config) -> Publication:
    said = config.events
    return Publication(said.zmq, said.replay, said.topic, said.tenant, as_int=said.hashes == "int64")


def _endpoints(config: Config) -> Endpoints | None:
    said = config.events
    if not said.zmq:
        return None
    try:
        return Endpoints(_publication(config))
    except ModuleNotFoundError as error:
        why = f"needs {error.name}, which is not installed: pip install 'kvtcd[events]'"
        raise config.fault("events.zmq", why) from None
    except OSError as error:
        field = f"events.{'replay' if error.filename == said.replay else 'zmq'}"
        raise config.fault(field, f"{error.filename} cannot be bound: {error.strerror}") from None


def examine(config: Config, handed: Handed, *, busy: bool) -> bool:
    """Refuse what a start would; tell whether somebody listens now where the daemon would.

    Nothing stays bound. What is taken is no fault while a daemon runs, or its service manager listens for it:
    most likely it is theirs. Then it is left alone, too.

    Args:
        config: what holds.
        handed: sockets of a service manager.
        busy: whether a daemon has the state directory.

    Raises:
        ConfigError, AlreadyRunning: what a start would say.
    """
    taken = listeners.DATA not in dict(handed) and listeners.examine_both(config.daemon.socket)
    if not taken and not busy:
        if listeners.TCP not in dict(handed) and config.tcp.address:
            _bound_tcp(config, config.tcp.address).socket.close()
        asyncio.run(_publishable(config))
    return taken


async def _publishable(config: Config) -> None:
    """Refuse endpoints that cannot be bound; their sockets belong to a loop."""
    if endpoints := _endpoints(config):
        endpoints.close()


class Entrance:
    """Who may come by TCP, and what that is encrypted with; without TCP there is neither.

    Attributes:
        tokens: a list that is there as long as the daemon, with the tokens that are valid now.
        tls: None where nothing is encrypted.

    Raises:
        ConfigError: tokens or certificate cannot be used.
    """

    def __init__(self, config: Config, handed: Handed) -> None:
        self._config = config
        self._open = config.tcp.address is not None or listeners.TCP in dict(handed)
        self.tls = Tls(*config.tcp.tls) if self._open and config.tcp.tls else None
        self.tokens = [*self._known()]

    def _known(self) -> tuple[Token, ...]:
        if not self._open:
            return ()
        return load_tokens(self._config.tcp.tokens, credential(os.environ, TOKENS))

    def read(self) -> tuple[tuple[Token, ...], Certificate | None]:
        """Read the files as they are now; nothing changes by it.

        Raises:
            ConfigError: one of them is wrong.
        """
        return self._known(), self.tls.read() if self.tls else None

    async def take(self, tokens: tuple[Token, ...], certificate: Certificate | None) -> None:
        """Let what was read hold from now on."""
        if self.tls and certificate:
            await asyncio.to_thread(self.tls.take, certificate)
        self.tokens[:] = tokens
