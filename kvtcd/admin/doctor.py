"""`kvtcd doctor`: is a daemon there, is it the one that is meant, and does every way into it work?

It asks as any client does, by what a caller may know. Its blocks go into a trial: a namespace that the daemon
keeps in memory alone, lists and counts nowhere, and forgets in the end.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape

from kvtcd import __version__, terminal
from kvtcd.admin import degraded
from kvtcd.client import BlockHead, Client
from kvtcd.client.device import DevicePart
from kvtcd.client.regions import Region
from kvtcd.core.device_errors import NoDriver
from kvtcd.core.errors import BadRequest, KvtcdError, Unavailable
from kvtcd.core.identity import TRIAL, Identity
from kvtcd.core.keys import EngineKey
from kvtcd.core.layout import Dtype, Layout, Stream
from kvtcd.core.messages import NamespaceInfo
from kvtcd.cuda.driver import Failure
from kvtcd.cuda.own import DeviceMemory
from kvtcd.terminal import Table

State = Literal["ok", "note", "wrong"]
_STYLE: dict[State, str] = {"ok": "green", "note": "yellow", "wrong": "red"}
_DOUBTS = {
    "refused": "objects there were no records of ours (see the log: who else writes to it?)",
    "failed": "blocks could not be asked for",
    "dropped": "blocks were not written (the queue was full, or the store failed)",
    "pending": "purges or deletes are still to be done there",
}
_BLOCKS = 8
_PATIENCE_S, _PAUSE_S = 30.0, 0.1
"""How long a shared store may take to answer, and between two questions."""
_TOKENS = 256
_LAYOUT = Layout((Stream("v", heads=8, head_dim=256, rope=False),), layers=4, dtype=Dtype.BF16)
"""4 MiB a block, of a stream without RoPE."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, and where it is not well, what to do."""

    what: str
    state: State
    said: str


def command(*, address: str | None, json: Path | None = None, console: Console | None = None) -> bool:
    """Look at a daemon and show what was found; tell whether nothing is wrong.

    Args:
        address: its socket or URL; None: that of ``$KVTCD_SOCKET``, else the default.
        json: where to write the findings too.
        console: where to show them.

    Raises:
        ConfigError: the file cannot be written.
        Unavailable: there is no daemon.
    """
    console = console or terminal.console()
    with Client(address) as client:
        findings = list(examine(client))
    table = Table(title=f"kvtcd on {client.address}", show_lines=False)
    for name in ("", "what", "finding"):
        table.add_column(name)
    for one in findings:
        table.add_row(f"[{_STYLE[one.state]}]{one.state}[/]", one.what, escape(one.said))
    console.print(table)
    if json:
        from kvtcd.lab.figures import write_json  # noqa: PLC0415 - torch

        write_json(json, "doctor", {"findings": [asdict(one) for one in findings]})
    return all(one.state != "wrong" for one in findings)


def examine(client: Client) -> Iterator[Finding]:
    """Yield what there is to say, the most basic first; nothing more behind a fault that hides the rest.

    Raises:
        Unavailable: there is no daemon.
    """
    try:
        info = client.info()
    except Unavailable:
        raise
    except KvtcdError as error:
        yield Finding("daemon", "wrong", str(error))
        return
    differs = "" if info.version == __version__ else f", this client {__version__}"
    yield Finding(
        "daemon", "note" if differs else "ok", f"version {info.version}{differs}, boot {info.boot_id}"
    )
    if not client.ready():
        yield Finding(
            "ready", "wrong", "it takes no blocks now: it is starting or stopping, or its disk failed"
        )
        return
    stats = client.stats()
    for name, tier in stats["tiers"].items():
        share = tier["used"] / tier["capacity"] if tier["capacity"] else 0.0
        less = tier["withheld"] / 1e9
        full = f"; its device is full and holds {less:.1f} GB less" if less else ""
        said = f"{share:.0%} of {tier['capacity'] / 1e9:.1f} GB used{full}"
        yield Finding(f"tier {name}", "note" if full else "ok", said)
    faults = {fault: count for fault, count in stats.get("degraded", {}).items() if fault != "remote-away"}
    for line in degraded.said(faults):
        yield Finding("degraded", "wrong", f"{line}; see the log, and KvtcdQuarantined in systemd/README.md")
    try:
        yield from (_packed(one) for one in client.namespaces())
        with _trial(client) as name:
            if "remote" in stats:
                yield _remote(_asked_remote(client, name))
            yield from _ways(client, name)
    except KvtcdError as error:
        yield Finding("blocks", "wrong", str(error))


def _remote(figures: Mapping[str, Any]) -> Finding:
    """Say how a store that is shared with other daemons is, as far as this one has seen."""
    said = [
        f"breaker {figures['breaker']}", f"{figures['hits']:,} hits, {figures['misses']:,} misses",
        f"{figures['written']:,} blocks written, {figures['queue_blocks']:,} wait",
    ]  # fmt: skip
    said += [f"{figures[name]:,} {text}" for name, text in _DOUBTS.items() if figures[name]]
    if away := figures["breaker"] != "closed" or figures["failing"]:
        said.insert(0, "it does not answer; the log says why")
    doubtful = any(figures[name] for name in _DOUBTS)
    return Finding("tier remote", "wrong" if away else "note" if doubtful else "ok", "; ".join(said))


def _asked_remote(client: Client, name: str) -> Mapping[str, Any]:
    """Have the daemon ask its shared store for something, and return how that was, once it is known."""
    before, until = client.stats()["remote"], time.monotonic() + _PATIENCE_S
    while True:
        client.match(name, [EngineKey(secrets.token_bytes(16))])
        now: Mapping[str, Any] = client.stats()["remote"]
        known = now["answered"] > before["answered"] or now["breaker"] != "closed"
        if known or time.monotonic() > until:
            return now if known else {**now, "failing": max(1, now["failing"])}
        time.sleep(_PAUSE_S)


def _packed(namespace: NamespaceInfo) -> Finding:
    """Say how a namespace is packed, and why not as its policy asks."""
    reason, kl = namespace.codec_reason, namespace.expected_kl
    said = [f"packed by {namespace.codec}"]
    if namespace.profile:
        said.append(f"with profile {namespace.profile[:12]}")
    if kl is not None:
        said.append(f"which costs {kl:.2g} nats per token by its own curve")
    drift = namespace.drift
    drifting = drift is not None and drift.state == "drifting"
    if drift and drifting:
        said.append(f"blocks are unlike calibration ({drift.why})")
    return Finding(
        f"namespace {namespace.name}",
        "note" if reason or drifting else "ok",
        ", ".join(said) + (f": {reason}" if reason else ""),
    )


@contextmanager
def _trial(client: Client) -> Iterator[str]:
    """Yield the name of a namespace that leaves nothing; others may look at the same time."""
    mark = secrets.token_hex(8)
    identity = Identity(
        engine=TRIAL, hash_scheme="none", model=f"trial {mark}", weights="00" * 32,
        layout=_LAYOUT, rope=None, block_tokens=_TOKENS,
    )  # fmt: skip
    name = client.register(f"{TRIAL}.{mark}", identity).name
    try:
        yield name
    finally:
        client.purge(name)


def _ways(client: Client, name: str) -> Iterator[Finding]:
    """Store and fetch blocks by each way there is."""
    nbytes = _LAYOUT.nbytes(_TOKENS)
    memory = memoryview(bytearray(os.urandom(nbytes)))
    yield _way(client, name, "http", memory, memory.tobytes)
    with client.region(nbytes) as region:
        if region.path == "region":
            region.memory[:] = os.urandom(nbytes)
            yield _way(client, name, "region", region.memory, region.memory.tobytes)
        else:
            yield _unshared(region)
    if client.address.socket is not None:
        yield Finding(
            "by TCP",
            "ok",
            "not tried: where config.toml has [tcp], KVTCD_TOKEN=… kvtcd doctor http://HOST:PORT",
        )
    yield _by_device(client, name, nbytes)


def _unshared(region: Region) -> Finding:
    return Finding("by region", "note", f"{region.why}; clients send bytes over HTTP instead")


def _by_device(client: Client, name: str, nbytes: int) -> Finding:
    """Do the same from memory of the first GPU that this process sees, if there is one."""
    try:
        with DeviceMemory(nbytes) as memory, client.device_region((memory.pointer, nbytes)) as region:
            if region.path != "device":
                return Finding("by device", "note", f"{region.why}; engines' blocks go through the host")
            memory.write(os.urandom(nbytes))
            return _way(client, name, "device", region[:], memory.read)
    except NoDriver as error:
        return Finding("by device", "ok", f"not looked at: {error}")
    except (Failure, BadRequest) as error:
        return Finding("by device", "note", f"not looked at: no memory of a GPU is to be had: {error}")


def _way(
    client: Client, name: str, way: str, memory: memoryview | DevicePart, look: Callable[[], bytes]
) -> Finding:
    """Move blocks in and out of memory, whose bytes `look` returns; the same must come back."""
    sent, taken, given = look(), 0.0, 0.0
    for _ in range(_BLOCKS):
        key = EngineKey(secrets.token_bytes(16))
        begun = time.perf_counter()
        result = client.put(name, BlockHead(key, _TOKENS, first_token=0), memory)
        stored = time.perf_counter()
        if result.outcome != "stored":
            why = (
                f"a block of 4 MiB was not stored: {result.reason}; is there room for it in [host] capacity?"
            )
            return Finding(f"by {way}", "note", why)
        client.fill(name, [key], [memory])
        given += time.perf_counter() - stored
        taken += stored - begun
        client.delete(name, key)
        if look() != sent:
            return Finding(f"by {way}", "wrong", "other bytes came back than were stored; report this")
    moved = _BLOCKS * len(sent) / 1e9
    return Finding(
        f"by {way}",
        "ok",
        f"in {moved / taken:.2f} GB/s, out {moved / given:.2f} GB/s, blocks of 4 MiB, by the clock",
    )
