"""Mixed traffic for as long as one likes, and whether anything grows: `make soak`.

Clients store, match, fetch, pin, move, delete and purge; some hang up in the middle, some use shared memory,
one listens. Every block that comes back is checked against the number it stands for. Meanwhile memory,
descriptors and mappings of the daemon are read off the kernel; at the end metrics, the daemon's own account
and what lies on disk are held against each other. Exits with 1 and says why if anything grew, leaked or
differed.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from soak.traffic import NAMESPACES, Traffic, identity
from soak.watch import Watch, slope
from support.toy import BLOCK_BYTES

from kvtcd.client import Client
from kvtcd.lab.daemon import Daemon

HOST, DISK = 512 * BLOCK_BYTES, 4_096 * BLOCK_BYTES
WATCHED = ("mib", "descriptors", "shared", "threads")
FILLS = "blocks"
MOST_AN_HOUR = 0.5
"""What may seem to grow, in an hour, of each: what history takes, and one that happens to be open."""


def metrics(path: Path) -> dict[str, float]:
    """Read the daemon's metrics."""
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(str(path))
        wire.sendall(b"GET /metrics HTTP/1.1\r\nHost: kvtcd\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: wire.recv(1 << 16), b"")).decode()
    return {name: float(value) for name, value in re.findall(r"^(kvtcd_\S+) (\S+)$", text, re.MULTILINE)}


def quiet(client: Client, seconds: float = 120) -> dict:
    """Return the daemon's account once nothing moves any more."""
    until = time.monotonic() + seconds
    while (stats := client.stats())["waiting"] or stats["moving"]:
        if time.monotonic() > until:
            raise SystemExit(f"something still moves or waits after {seconds:g} s: {stats}")
        time.sleep(0.2)
    return stats


def accounts(daemon: Daemon) -> dict[str, int]:
    """Return how many blocks are on disk: by account, by metrics, and by what lies there in the end."""
    with daemon.client() as client:
        for name in NAMESPACES:
            client.flush(name, deadline=120)
        stats, counted = quiet(client), metrics(daemon.socket)
    daemon.stop()
    lying = daemon.config.parent / "inspected.json"
    state = daemon.config.parent / "state"
    inspect = [sys.executable, "-m", "kvtcd", "inspect", str(state), "--verify", "--json", str(lying)]
    subprocess.run(inspect, check=True, stdout=subprocess.DEVNULL)
    stored = json.loads(lying.read_text())
    return {
        "account": stats["tiers"]["disk"]["packed"]["blocks"],
        "metrics": int(counted['kvtcd_tier_blocks{tier="disk"}']),
        "disk": sum(held["blocks"] for tenant in stored["tenants"] for held in tenant["namespaces"].values()),
        "leases": int(counted["kvtcd_leases"]),
        "failures": int(
            sum(value for name, value in counted.items() if name.startswith("kvtcd_failures_total"))
        ),
        "damaged": int(sum(value for name, value in counted.items() if name.startswith("kvtcd_damaged"))),
    }


def faults(figures: dict) -> list[str]:
    """Say what is not as it has to be."""
    found = [f"wrong bytes: {block}" for block in figures["wrong"]]
    for what in WATCHED:
        rate = figures["growth"][what]
        if rate["lo"] > 0 and rate["an_hour"] > MOST_AN_HOUR:
            found.append(
                f"{what} grows by {rate['an_hour']:.2f} an hour ({rate['lo']:.2f} to {rate['hi']:.2f})"
            )
    blocks = figures["accounts"]
    if len({blocks["account"], blocks["metrics"], blocks["disk"]}) > 1:
        found.append(f"accounts of the disk differ: {blocks}")
    found += [f"{blocks[what]} {what}" for what in ("failures", "damaged") if blocks[what]]
    if figures["left_in_shm"]:
        found.append(f"left in /dev/shm: {figures['left_in_shm']}")
    return found


def show(figures: dict) -> None:
    """Print what came of it."""
    console = Console(width=110)
    table = Table(
        "",
        "first",
        "last",
        "an hour",
        "95 %",
        title=f"{figures['minutes']:.0f} minutes, {figures['calls']:,} calls",
    )
    for what, rate in figures["growth"].items():
        first, last = figures["samples"][0][what], figures["samples"][-1][what]
        interval = f"{rate['lo']:+.2f} to {rate['hi']:+.2f}"
        table.add_row(what, f"{first:.1f}", f"{last:.1f}", f"{rate['an_hour']:+.2f}", interval)
    console.print(table)
    console.print("blocks on disk:", figures["accounts"])
    console.print("refused:", figures["refused"])


def main() -> int:
    """Let it run; return the exit code."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--minutes", type=float, default=45.0)
    given.add_argument("--clients", type=int, default=4)
    given.add_argument("--seed", type=int, default=1)
    given.add_argument("--json", type=Path)
    args = given.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        daemon = Daemon(folder, host=HOST, disk=DISK, profiles=folder / "profiles")
        with daemon:
            with daemon.client() as client:
                for one in NAMESPACES:
                    client.register(one, identity(one))
            traffic, watch = Traffic(daemon), Watch(daemon.pid)
            threads = [
                threading.Thread(target=traffic.run, args=(args.seed + i,)) for i in range(args.clients)
            ]
            threads.append(threading.Thread(target=traffic.listen, daemon=True))
            for thread in threads:
                thread.start()
            with Console().status("traffic") as status, daemon.client() as observer:
                while (past := time.monotonic() - watch.began) < args.minutes * 60:
                    time.sleep(min(5.0, args.minutes))
                    watch.look(observer.stats()["blocks"])
                    status.update(
                        f"{past / 60:.0f} of {args.minutes:g} minutes, {traffic.done.total():,} calls"
                    )
            traffic.over.set()
            for thread in threads[:-1]:
                thread.join(300)
            counted = accounts(daemon)
    figures = {
        "command": "soak",
        "minutes": args.minutes,
        "calls": traffic.done.total() - traffic.done["notice"],
        "done": dict(traffic.done),
        "refused": dict(traffic.refused),
        "wrong": traffic.wrong[:10],
        "growth": {what: slope(watch.samples, what) for what in (*WATCHED, FILLS)},
        "accounts": counted,
        "left_in_shm": sorted(name for name in watch.named if Path(name).exists()),
        "samples": watch.samples,
    }
    show(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    found = faults(figures)
    for fault in found:
        Console().print(f"[red]{fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
