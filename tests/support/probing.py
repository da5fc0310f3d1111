"""A tenant who asks for blocks of another's keys: does the clock tell him that they exist?

``PYTHONPATH=tests python -m support.probing`` prints for each kind of request how much longer it takes for
one of 64 keys that another tenant has than for one of 64 that nobody has: the median of differences between
two requests in a row, in random order, with the interval that holds it with 95 %, of the order statistics.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from support.ports import free_port
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block

from kvtcd import config
from kvtcd.client import BlockHead, Client
from kvtcd.core.access import digest, new_token
from kvtcd.core.errors import NotFound
from kvtcd.core.keys import EngineKey
from kvtcd.lab.daemon import Daemon

BLOCKS, PAIRS = 64, 2_000
NAME = "demo"
ASKS: dict[str, Callable[[Client, EngineKey], object]] = {
    "get": lambda client, key: client.get(NAME, key),
    "match": lambda client, key: client.match(NAME, [key]),
    "delete": lambda client, key: client.delete(NAME, key),
}


def took(ask: Callable[[Client, EngineKey], object], client: Client, key: EngineKey) -> float:
    """Return the microseconds of a request that finds nothing."""
    begun = time.perf_counter()
    with suppress(NotFound):
        ask(client, key)
    return (time.perf_counter() - begun) * 1e6


def compared(
    ask: Callable[[Client, EngineKey], object],
    client: Client,
    theirs: list[EngineKey],
    nobodys: list[EngineKey],
) -> dict:
    """Return how much longer foreign keys take than unknown ones."""
    luck, single, differences = random.SystemRandom(), [], []
    for _ in range(PAIRS):
        foreign, unknown = luck.choice(theirs), luck.choice(nobodys)
        if luck.random() < 0.5:
            first = took(ask, client, foreign)
            differences.append(first - took(ask, client, unknown))
        else:
            first = took(ask, client, unknown)
            differences.append(took(ask, client, foreign) - first)
        single.append(first)
    differences.sort()
    half = int(0.98 * PAIRS**0.5)
    middle = PAIRS // 2
    return {
        "request_us": round(sorted(single)[middle]),
        "longer_us": [round(differences[at], 2) for at in (middle, middle - half, middle + half)],
    }


def main() -> None:
    """Print the figures as JSON."""
    tokens = {name: new_token() for name in ("owner", "prober")}
    with tempfile.TemporaryDirectory(prefix="kvtcd-probe-") as name:
        folder, port = Path(name), free_port()
        (folder / "tokens.toml").write_text(
            "".join(
                f"[[token]]\nsha256 = '{digest(token.encode()).hex()}'\ntenant = '{who}'\n"
                for who, token in tokens.items()
            )
        )
        tcp = config.daemon.Tcp(listen=f"127.0.0.1:{port}", tokens=folder / "tokens.toml")
        with (
            Daemon(folder, host=256 * BLOCK_BYTES + (1 << 20), disk=64 << 20, profiles=folder, tcp=tcp),
            Client(f"http://127.0.0.1:{port}", token=tokens["owner"]) as owner,
            Client(f"http://127.0.0.1:{port}", token=tokens["prober"]) as prober,
        ):
            theirs, nobodys = ([EngineKey(secrets.token_bytes(32)) for _ in range(BLOCKS)] for _ in range(2))
            for client in (owner, prober):
                client.register(NAME, IDENTITY)
            for number, key in enumerate(theirs):
                owner.put(NAME, BlockHead(key, BLOCK_TOKENS, 0), block(number), durable=True)
            own = BlockHead(EngineKey(b"own"), BLOCK_TOKENS, 0)
            prober.put(NAME, own, block(0), durable=True)
            found = {kind: compared(ask, prober, theirs, nobodys) for kind, ask in ASKS.items()}
            assert all(owner.get(NAME, key) for key in theirs)
    print(json.dumps({"pairs": PAIRS, "load": os.getloadavg()[0], **found}))  # noqa: T201 - what it is for


if __name__ == "__main__":
    main()
