"""`kvtcd doctor`: is a daemon there, is it the one that is meant, and does every way into it work?

It asks as any client does, by what a caller may know.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from kvtcd import __version__, config, terminal
from kvtcd.admin import degraded, ways
from kvtcd.admin.findings import Finding, State
from kvtcd.client import Client
from kvtcd.core.errors import KvtcdError, Unavailable
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import NamespaceInfo
from kvtcd.terminal import Table

_STYLE: dict[State, str] = {"ok": "green", "note": "yellow", "wrong": "red"}
_DOUBTS = {
    "refused": "objects there were no records of ours (see the log: who else writes to it?)",
    "failed": "blocks could not be asked for",
    "dropped": "blocks were not written (the queue was full, or the store failed)",
    "pending": "purges or deletes are still to be done there",
}
_UNTRIED = (
    "not tried, since a socket does not say where else: KVTCD_TOKEN=… kvtcd doctor --config FILE does, or, "
    "from another host, kvtcd doctor http://HOST:PORT"
)
_PATIENCE_S, _PAUSE_S = 30.0, 0.1
"""How long a shared store may take to answer, and between two questions."""


def command(
    *,
    address: str | Path | None,
    tcp: config.daemon.Tcp | None = None,
    json: Path | None = None,
    console: Console | None = None,
) -> bool:
    """Look at a daemon and show what was found; tell whether nothing is wrong.

    Args:
        address: its socket or URL; None: that of ``$KVTCD_SOCKET``, else the default.
        tcp: where it listens besides, as far as somebody knows.
        json: where to write the findings too.
        console: where to show them.

    Raises:
        ConfigError: the file cannot be written.
        Unavailable: there is no daemon.
    """
    console = console or terminal.console()
    with Client(address) as client:
        findings = list(examine(client, tcp))
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


def examine(client: Client, tcp: config.daemon.Tcp | None = None) -> Iterator[Finding]:
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
    yield from _tiers(stats["tiers"])
    for fault, count in stats.get("degraded", {}).items():
        if not fault.startswith("remote-"):  # that is asked below
            (line,) = degraded.said({fault: count})
            where = "KvtcdUnknownGpu" if fault == "unknown-gpu" else "KvtcdQuarantined"
            yield Finding("degraded", "wrong", f"{line}; see the log, and {where} in systemd/README.md")
    if damaged := stats.get("damaged"):
        yield _damaged(damaged)
    try:
        yield from (_packed(one) for one in client.namespaces())
        with ways.trial(client) as name:
            if "remote" in stats:
                yield _remote(_asked_remote(client, name))
            yield from ways.by_socket(client, name)
        if tcp:
            yield ways.by_tcp(tcp)
        elif client.address.socket is not None:
            yield Finding("by TCP", "ok", _UNTRIED)
    except KvtcdError as error:
        yield Finding("blocks", "wrong", str(error))


def _tiers(tiers: Mapping[str, Any]) -> Iterator[Finding]:
    """Say how full each tier is, and of several GPUs each."""
    for name, tier in tiers.items():
        less = tier["withheld"] / 1e9
        full = f"; its device is full and holds {less:.1f} GB less" if less else ""
        yield Finding(f"tier {name}", "note" if full else "ok", _filled(tier) + full)
        devices = tier.get("devices", {})
        for device, part in devices.items() if len(devices) > 1 else ():
            yield Finding(f"tier {name}, {device}", "ok", _filled(part))


def _filled(held: Mapping[str, int]) -> str:
    share = held["used"] / held["capacity"] if held["capacity"] else 0.0
    return f"{share:.0%} of {held['capacity'] / 1e9:.1f} GB used"


def _damaged(counts: Mapping[str, int]) -> Finding:
    """Say what became of records that failed their checks."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    said = (
        f"{sum(counts.values()):,} failed their checks since the start ({kinds}): none was served, each is a "
        "miss unless another copy was sound, and the log names them. Check the disk (KvtcdDamaged in "
        "systemd/README.md), and, with the daemon stopped, all that is stored: kvtcd inspect --verify"
    )
    return Finding("records", "wrong", said)


def _remote(figures: Mapping[str, Any]) -> Finding:
    """Say how a store that is shared with other daemons is, as far as this one has seen."""
    said = [
        f"breaker {figures['breaker']}", f"{figures['hits']:,} hits, {figures['misses']:,} misses",
        f"{figures['written']:,} blocks written, {figures['queue_blocks']:,} wait",
    ]  # fmt: skip
    said += [f"{figures[name]:,} {text}" for name, text in _DOUBTS.items() if figures[name]]
    if away := figures["breaker"] != "closed" or figures["failing"]:
        said.insert(0, "it does not answer; the log says why")
    elif figures["refusing"]:
        said.insert(0, "it takes no blocks; the log says what it answers")
    wrong = away or figures["refusing"] or figures["refused"]
    doubtful = any(figures[name] for name in _DOUBTS)
    return Finding("tier remote", "wrong" if wrong else "note" if doubtful else "ok", "; ".join(said))


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
