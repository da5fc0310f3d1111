"""`kvtcd lab scale`: what a store that hosts share is worth, by a trace and by the length of a prefix."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress

from kvtcd import terminal
from kvtcd.config import load_policy
from kvtcd.core.errors import ConfigError
from kvtcd.core.policy import Evict, Policy
from kvtcd.lab.recording import read_requests
from kvtcd.lab.replay import Replay
from kvtcd.lab.scale.fleet import Costs, Fleet, Host, Line, Routing
from kvtcd.lab.simulate import block_bytes, budget_blocks
from kvtcd.lab.speeds import Cost, Speeds, break_even, known
from kvtcd.lab.trace import Request
from kvtcd.terminal import Table

Caches = Literal["none", "own", "shared"]

GBIT = 1e9 / 8
"""Bytes."""
LINKS = (1.0, 2.5, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
"""Gbit/s, for break-even."""
_BOUNDLESS = 1 << 40
"""Blocks that no trace has."""


@dataclass(frozen=True, slots=True)
class Site:
    """What is planned for.

    Attributes:
        speeds: of reading and unpacking.
        token_bytes: raw.
        block_bytes: raw, of a block of the trace.
        budget: raw blocks that the cache of a host holds.
        store_budget: raw blocks that the store holds; None: all.
        link, store: bytes a second, of each host's link and of the store.
        latency: seconds until the first byte of the store comes.
        policy: what hosts admit and evict by; the store admits by it, and evicts what was not used longest.
    """

    speeds: Speeds
    token_bytes: float
    block_bytes: float
    budget: int
    store_budget: int | None
    link: float
    store: float
    latency: float
    policy: Policy


@dataclass(frozen=True, slots=True)
class Row:
    """A trace served by so many hosts.

    Attributes:
        hosts: how many.
        caches: they keep nothing, have one each, or share the store behind these.
        ratio: of what is packed, end to end; None where nothing is kept.
        local, remote: shares of the tokens, by where they were found; the rest was read.
        first_token_p50_s, first_token_p95_s: quantiles over requests, queueing included.
        busy: seconds of reading over seconds of the trace, a mean over hosts; above 1 the queue only grows.
        link_busy, store_busy: the same of the busiest link, and of the store.
        fetched_bytes, written_bytes: out of the store, and into it.
    """

    hosts: int
    caches: Caches
    ratio: float | None
    local: float
    remote: float
    first_token_p50_s: float
    first_token_p95_s: float
    busy: float
    link_busy: float
    store_busy: float
    fetched_bytes: float
    written_bytes: float


@dataclass(frozen=True, slots=True)
class Least:
    """The fewest tokens that come out of an idle store sooner than they are read; None: they never do."""

    link_gbit_s: float
    ratio: float
    tokens: int | None


def command(
    *, trace: Path, hosts: Sequence[int], ratios: Sequence[float], budget: str, store_budget: str | None,
    link_gbit_s: float, store_gbit_s: float, latency_ms: float, routing: Routing, policy: Path | None,
    bytes_per_token: int | None, bench: Path | None, prefill: float | None, reuse: float | None,
    overhead_ms: float, json: Path | None, plot: Path | None,
) -> None:  # fmt: skip
    """Serve a trace by fleets of hosts, and show what a shared store saves.

    Args:
        trace: requests.
        hosts: numbers of hosts to try.
        ratios: to try, of what is packed, end to end.
        budget: room of each host's own cache, as `policy simulate` has it.
        store_budget: room of the store; None: for all.
        link_gbit_s: from each host to the store.
        store_gbit_s: out of the store, for all hosts together.
        latency_ms: until its first byte comes.
        routing: which host a request goes to.
        policy: a policy file; None: what balanced.toml says.
        bytes_per_token: raw, where the trace does not say.
        bench: what `bench ttft --json` wrote of the model.
        prefill: tokens read a second, in its place.
        reuse: raw megabytes unpacked a second.
        overhead_ms: of unpacking, whatever the length.
        json: a file for the figures.
        plot: a file for the picture.

    Raises:
        ConfigError: a file or an option is wrong, or no speed is said.
        Unavailable: a plot was asked for, and matplotlib is not installed.
    """
    requests, console = read_requests(trace), terminal.console()
    raw = block_bytes(requests, bytes_per_token)
    if raw is None:
        raise ConfigError("command line", "--bytes-per-token", "is needed: this trace does not say it")
    token_bytes = _token_bytes(requests, bytes_per_token)
    speeds = known(bench, prefill, reuse, overhead_ms, token_bytes)
    if speeds is None:
        raise ConfigError("command line", "", "say --bench, or --prefill and --reuse")
    room = budget_blocks(store_budget, raw) if store_budget else None
    site = Site(
        speeds, token_bytes, raw, budget_blocks(budget, raw), room, link_gbit_s * GBIT, store_gbit_s * GBIT,
        latency_ms / 1e3, load_policy(policy) if policy else Policy("balanced"),
    )  # fmt: skip
    with terminal.progress(console, transient=True) as progress:
        rows = scale(requests, site, hosts=hosts, ratios=ratios, routing=routing, progress=progress)
    least = least_tokens(site, ratios)
    show(console, rows, least)
    if json:
        from kvtcd.lab.figures import write_json  # noqa: PLC0415 - loads torch

        figures = {
            "trace": trace.name, "requests": len(requests), "routing": routing, "link_gbit_s": link_gbit_s,
            "store_gbit_s": store_gbit_s, "latency_ms": latency_ms, "token_bytes": token_bytes,
            "budget_blocks": site.budget, "store_blocks": room, "speeds": asdict(speeds),
        }  # fmt: skip
        lists = {"rows": [asdict(row) for row in rows], "least": [asdict(one) for one in least]}
        write_json(json, "lab scale", figures | lists)
    if plot:
        from kvtcd.lab.scale.plot import draw  # noqa: PLC0415 - loads matplotlib, which not all have

        draw(rows, least, plot)


def scale(
    requests: Sequence[Request], site: Site, *,
    hosts: Sequence[int], ratios: Sequence[float], routing: Routing, progress: Progress | None = None,
) -> list[Row]:  # fmt: skip
    """Serve a trace by each number of hosts: without caches, at each ratio with their own, and a store."""
    progress = progress or terminal.silent()
    kinds: list[tuple[Caches, float | None]] = [("none", None)]
    kinds += [(caches, ratio) for ratio in ratios for caches in ("own", "shared")]
    return [
        _row(requests, site, number=number, caches=caches, ratio=ratio, routing=routing, progress=progress)
        for number, (caches, ratio) in itertools.product(hosts, kinds)
    ]


def _row(
    requests: Sequence[Request], site: Site, *,
    number: int, caches: Caches, ratio: float | None, routing: Routing, progress: Progress,
) -> Row:  # fmt: skip
    packed = ratio or 1.0
    longest_unused = replace(site.policy, evict=Evict("lru", leaves_first=False))
    own = [Replay(site.policy, int(site.budget * packed)) if ratio else None for _ in range(number)]
    room = int(site.store_budget * packed) if site.store_budget else _BOUNDLESS
    store = Replay(longest_unused, room) if caches == "shared" else None
    machines, out = [Host(Line(site.link), cache) for cache in own], Line(site.store)
    costs = Costs(
        site.speeds.prefill, unpacking(site.speeds, packed), site.token_bytes / packed, site.latency
    )
    fleet = Fleet(machines, costs, routing, store, out)
    for request in progress.track(
        requests, description=f"{number} hosts, caches: {caches}, ratio {packed:g}"
    ):
        fleet.request(request)
    served, tokens = fleet.served, sum(request.tokens for request in requests)
    seconds = max(requests[-1].at - requests[0].at, 1e-9)
    half, most = (float(each) for each in np.quantile(served.seconds, (0.5, 0.95)))
    return Row(
        number, caches, ratio, served.local / tokens, served.remote / tokens, half, most,
        busy=sum(host.reading for host in machines) / number / seconds,
        link_busy=max(host.link.busy for host in machines) / seconds, store_busy=out.busy / seconds,
        fetched_bytes=served.remote * costs.token_bytes,
        written_bytes=store.stored * site.block_bytes / packed if store else 0.0,
    )  # fmt: skip


def unpacking(speeds: Speeds, ratio: float) -> Cost:
    """Return what it takes to have tokens ready whose packed bytes are in the host's memory.

    What was measured is with a codec; raw blocks (ratio 1) take what raw ones took, else nothing for a token.
    """
    packed = speeds.reuse.get("host-packed") or next(iter(speeds.reuse.values()))
    return packed if ratio > 1 else speeds.reuse.get("host-raw", Cost(packed.constant))


def least_tokens(site: Site, ratios: Sequence[float]) -> list[Least]:
    """Return from how many tokens on a prefix is better taken from the store, by link and ratio."""
    found = []
    for link, ratio in itertools.product(LINKS, ratios):
        unpack, rate = unpacking(site.speeds, ratio), min(link * GBIT, site.store)
        per_token = max(unpack.linear, site.token_bytes / ratio / rate)
        fetch = Cost(unpack.constant + site.latency, per_token)
        found.append(Least(link, ratio, break_even(site.speeds.prefill, fetch)))
    return found


def _token_bytes(requests: Sequence[Request], bytes_per_token: int | None) -> float:
    """Return the raw bytes of a token, a mean over the trace."""
    nbytes = sum(request.tokens * (bytes_per_token or request.token_bytes or 0) for request in requests)
    return nbytes / sum(request.tokens for request in requests)


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("hosts", lambda row: f"{row.hosts}"),
    ("caches", lambda row: row.caches),
    ("ratio", lambda row: f"{row.ratio:g}" if row.ratio else ""),
    ("own", lambda row: f"{row.local:.1%}"),
    ("store", lambda row: f"{row.remote:.1%}"),
    ("p50", lambda row: f"{row.first_token_p50_s:.3g} s"),
    ("p95", lambda row: f"{row.first_token_p95_s:.3g} s"),
    ("reading", lambda row: f"{row.busy:.0%}"),
    ("link", lambda row: f"{row.link_busy:.1%}"),
    ("out", lambda row: f"{row.store_busy:.1%}"),
)


def show(console: Console, rows: Sequence[Row], least: Sequence[Least]) -> None:
    """Print tables of fleets, and of lengths from which on fetching pays."""
    table = Table(
        title="A trace served",
        caption="own, store: tokens found there; p50, p95: time to the first token; reading, link, out: "
        "accelerators, busiest link and store in use, above 100 % too few or too slow",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    console.print(table.fill(_COLUMNS, rows, left={"caches"}))
    ratios = list(dict.fromkeys(one.ratio for one in least))
    lengths = Table(title="Fewest tokens that are fetched sooner than they are read")
    lengths.add_column("link", justify="right")
    for ratio in ratios:
        lengths.add_column(f"ratio {ratio:g}", justify="right")
    for link in LINKS:
        found = [one.tokens for one in least if one.link_gbit_s == link]
        lengths.add_row(f"{link:g} Gbit/s", *("never" if n is None else f"{n:,}" for n in found))
    console.print(lengths)
