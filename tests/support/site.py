"""A daemon that is reached by TCP, with traffic that the tests of the page know."""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.patience import PATIENCE_S
from support.ports import free_port
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block

from kvtcd import config
from kvtcd.client import BlockHead, Client
from kvtcd.core.access import digest, new_token
from kvtcd.core.keys import EngineKey
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

SCOPES = {"operator": ["data", "admin"], "idle": ["data"], "watcher": ["metrics"]}
LONG = "z-name.of-sixty-four-characters-" + "0123456789abcdef" * 2
"""As long as the name of a namespace may be, and hard to break."""


@dataclass
class Site:
    """A daemon with a page.

    Attributes:
        tokens: of an operator who has traffic, of a tenant who has nothing, and of a watcher.
    """

    daemon: Daemon
    port: int
    tokens: dict[str, str]

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.port}/"

    def client(self, name: str = "operator") -> Client:
        """Return a client with one of the tokens."""
        return Client(self.address.rstrip("/"), token=self.tokens[name])

    def stats(self) -> dict[str, Any]:
        """Return what the daemon says of itself."""
        with self.client() as client:
            return client.stats()


def key(number: int) -> EngineKey:
    return EngineKey(hashlib.sha256(bytes([number])).digest())


def store(client: Client, *numbers: int) -> None:
    for number in numbers:
        client.put("chat", BlockHead(key(number), BLOCK_TOKENS, 0), block(number), durable=True)


@contextmanager
def running() -> Iterator[Site]:
    """Run one, with some traffic behind it."""
    tokens = {name: new_token() for name in SCOPES}
    with tempfile.TemporaryDirectory(prefix="kvtcd-page-") as name:
        folder = Path(name)
        (folder / "tokens.toml").write_text(
            "".join(
                f"[[token]]\nsha256 = '{digest(token.encode()).hex()}'\n"
                f"tenant = '{who}'\nscopes = {SCOPES[who]}\n"
                for who, token in tokens.items()
            )
        )
        port = free_port()
        daemon = Daemon(
            folder, host=64 * BLOCK_BYTES + (1 << 20), disk=64 << 20, profiles=folder / "profiles",
            tcp=config.daemon.Tcp(listen=f"127.0.0.1:{port}", tokens=folder / "tokens.toml"),
            stop_seconds=PATIENCE_S,
        )  # fmt: skip
        with daemon:
            site = Site(daemon, port, tokens)
            with site.client() as client:
                client.register("chat", IDENTITY)
                client.register(LONG, replace(IDENTITY, model="m" * 60))
                store(client, *range(20))
                for number in (1, 2, 3, 1, 99):
                    client.match("chat", [key(number), key(number + 1)])
                for number in (1, 2, 2):
                    client.get("chat", key(number))
                client.demote("chat", [key(n) for n in range(10, 15)])
            yield site
