"""`kvtcd top`: a daemon in a terminal, live: what is where, what is found, what moves.

It asks every few seconds what the page asks too, and goes on asking while the daemon is away.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvtcd import terminal
from kvtcd.admin import degraded
from kvtcd.admin.top_figures import PREFIXES, Answers, Figures, Held, figures
from kvtcd.client import Client
from kvtcd.core.errors import KvtcdError
from kvtcd.terminal import Table

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
"""Columns of the hour."""


def command(
    *, address: str | None, every_s: float, once: bool, json: Path | None, console: Console | None = None
) -> None:
    """Show a daemon until the user has seen enough, or once.

    Args:
        address: its socket or URL; None: that of ``$KVTCD_SOCKET``, else the default.
        every_s: seconds between two looks.
        once: show it once.
        json: where to write the last figures too.
        console: where to show them.

    Raises:
        KvtcdError: it is asked once, and cannot answer.
        ConfigError: the file cannot be written.
    """
    console = console or terminal.console()
    with Client(address, timeout=max(every_s, 5.0)) as client:
        answers: Answers | None
        if once:
            answers = Answers.of(client)
            console.print(render(answers, figures(answers)))
        else:
            answers = _watch(client, every_s, console)
    if json and answers is not None:
        from kvtcd.lab.figures import write_json  # noqa: PLC0415 - torch

        shown = asdict(figures(answers)) | {"info": answers.info.to_json(), "prefixes": answers.prefixes}
        keys = ("uptime_s", "blocks", "misses", "moving", "demoting", "waiting")
        write_json(json, "top", {key: answers.stats[key] for key in keys} | shown)


def _watch(client: Client, every_s: float, console: Console) -> Answers | None:
    """Show it until the user interrupts; return what it said last."""
    answers: Answers | None = None
    seen: RenderableType = Text("…")
    try:
        with Live(seen, console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                try:
                    answers = Answers.of(client)
                    seen = render(answers, figures(answers))
                    live.update(seen, refresh=True)
                except KvtcdError as error:
                    live.update(Group(Text(str(error), style="red"), seen), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return answers


def render(answers: Answers, shown: Figures) -> RenderableType:
    """Return the figures as they look."""
    parts: list[RenderableType] = [_head(answers, shown), _tiers(answers, shown)]
    if remote := answers.stats.get("remote"):
        parts.append(_remote(remote))
    if shown.namespaces:
        parts.append(_namespaces(answers, shown))
    if shown.tenants:
        parts.append(_holders("tenants", "tenant", shown.tenants))
    if answers.prefixes:
        parts.append(_prefixes(answers))
    return Group(*parts)


def _head(answers: Answers, shown: Figures) -> RenderableType:
    stats, recent = answers.stats, shown.recent
    faults = "".join(f"\n{line}" for line in degraded.said(stats.get("degraded", {})))
    rate = recent.blocks / recent.seconds if recent.seconds else 0.0
    head = Text(
        f"kvtcd {answers.info.version}, up {_duration(stats['uptime_s'])}   {stats['blocks']:,} blocks   "
        f"moving {stats['moving']:,} (down {stats['demoting']:,})   waiting {stats['waiting']:,}\n"
        f"last {recent.seconds:.0f} s: {rate:,.1f} blocks read a second, {_share(recent.hit_ratio)} found\n"
        f"last hour: {spark(shown.hour, _WIDTH)}"
    )
    return head.append(faults, style="red")


def spark(values: Sequence[float | None], width: int) -> str:
    """Draw shares as a line of bars, the last `width` means; a dot where there is none."""
    group = -(-len(values) // width) if values else 1
    drawn = []
    for start in range(0, len(values), group):
        known = [value for value in values[start : start + group] if value is not None]
        mean = sum(known) / len(known) if known else None
        drawn.append("·" if mean is None else _BARS[min(len(_BARS) - 1, int(mean * len(_BARS)))])
    return "".join(drawn)


def _tiers(answers: Answers, shown: Figures) -> Table:
    table = _table("tiers", "tier", "used", "of", "share", "copies", "ratio", "hits")
    for held in shown.tiers:
        tier = answers.stats["tiers"][held.name]
        withheld = f" -{_bytes(tier['withheld'])}" if tier["withheld"] else ""
        share = _share(tier["used"] / tier["capacity"] if tier["capacity"] else None)
        table.add_row(
            held.name, _bytes(tier["used"]), _bytes(tier["capacity"]) + withheld, share,
            f"{held.copies:,}", _ratio(held.ratio), f"{held.hits:,}",
        )  # fmt: skip
        devices = tier.get("devices", {})
        for name, device in devices.items() if len(devices) > 1 else ():
            share = _share(device["used"] / device["capacity"])
            used, capacity = _bytes(device["used"]), _bytes(device["capacity"])
            table.add_row(f"  {name}", used, capacity, share, f"{device['blocks']:,}", "", "")
    return table


def _remote(remote: Mapping[str, Any]) -> Table:
    table = _table(
        "shared store", "state", "waiting", "bytes", "hits", "misses", "written", "dropped", "refused"
    )
    state = "away" if remote["breaker"] != "closed" else "takes no blocks" if remote["refusing"] else "ok"
    table.add_row(
        state, f"{remote['queue_blocks']:,}", _bytes(remote["queue_bytes"]),
        *(f"{remote[name]:,}" for name in ("hits", "misses", "written", "dropped", "refused")),
    )  # fmt: skip
    return table


def _namespaces(answers: Answers, shown: Figures) -> Table:
    table = _table("namespaces", "namespace", "codec", "KL", "copies", "bytes", "ratio", "hits", "found")
    known = {each.name: each for each in answers.namespaces}
    for held in shown.namespaces:
        said = known.get(held.name)
        kl = said.expected_kl if said else None
        drifting = said and said.drift and said.drift.state == "drifting"
        codec = f"{said.codec} (unlike calibration)" if said and drifting else said.codec if said else ""
        table.add_row(
            held.name, codec, "" if kl is None else f"{kl:.2g}", f"{held.copies:,}",
            _bytes(held.bytes), _ratio(held.ratio), f"{held.hits:,}", _found(held),
        )  # fmt: skip
    return table


def _holders(title: str, what: str, holders: Sequence[Held]) -> Table:
    table = _table(title, what, "copies", "bytes", "ratio", "hits", "found")
    for held in holders:
        table.add_row(
            held.name, f"{held.copies:,}", _bytes(held.bytes), _ratio(held.ratio), f"{held.hits:,}",
            _found(held),
        )  # fmt: skip
    return table


def _prefixes(answers: Answers) -> Table:
    table = _table("prefixes matched most", "namespace", "first block", "matches", "blocks")
    for each in answers.prefixes[:PREFIXES]:
        table.add_row(each["namespace"], each["key"][:16], f"{each['matches']:,}", f"{each['blocks']:,}")
    return table


def _table(title: str, first: str, *rest: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(first)
    for heading in rest:
        table.add_column(heading, justify="left" if heading in {"codec", "first block"} else "right")
    return table


def _found(held: Held) -> str:
    asked = held.hits + held.misses
    return _share(held.hits / asked if asked else None)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f}"


def _bytes(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def _duration(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds % 60)} s"
