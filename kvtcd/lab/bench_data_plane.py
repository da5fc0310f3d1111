"""`kvtcd bench data-plane`: what it costs to get blocks into the daemon and out, beside what it cannot beat.

Bytes per second of CPU, of client and server together: with two processes and one wire, time that passes
says more of the scheduler than of the way. All ways take turns within each round; figures are medians over
rounds.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from kvtcd import config, terminal
from kvtcd.client import Client
from kvtcd.core import access
from kvtcd.core.identity import Identity, Rope, RopeKind
from kvtcd.core.layout import Dtype, kv_layout
from kvtcd.lab.carriers import Blocks, Carrier, Files, Memcpy, Verb, raw_socket, redis_values
from kvtcd.lab.daemon import Daemon
from kvtcd.lab.figures import write_json
from kvtcd.terminal import Table

MIB = 1 << 20
_TOKENS = 256
_AT_ONCE = 256
"""MiB moved in one timing, so that small blocks are timed by many."""
_POLICY = """\
[codec]
name = "lossless"
[tiers]
host = { form = "raw" }
[evict]
policy = "lru"
"""
_WIRE = {"http-tcp": "raw-tcp", "http-unix": "raw-unix"}


@dataclass(frozen=True, slots=True)
class Row:
    """One way, one direction, one size of blocks.

    Attributes:
        path: http-tcp, http-unix and region are the daemon's; raw-tcp, raw-unix, memcpy, redis and file are
            what they are held against.
        verb: get or put.
        mib: of a block.
        gb_s: 10⁹ bytes per second of CPU, of both processes together.
        wall_gb_s: 10⁹ bytes per second that passed.
        over_socket: `gb_s` over that of a bare socket of the same kind; None where that says nothing.
        over_memcpy: over that of a copy in memory.
        over_redis: over that of Redis on a Unix socket; None where there is none.
    """

    path: str
    verb: Verb
    mib: int
    gb_s: float
    wall_gb_s: float
    over_socket: float | None
    over_memcpy: float
    over_redis: float | None


def command(
    *, sizes: Sequence[int], rounds: int, json: Path | None = None, console: Console | None = None
) -> list[Row]:
    """Measure all ways.

    Args:
        sizes: of blocks, MiB.
        rounds: how often each way is timed for each size.
        json: where to write the figures too.
        console: where to show progress and figures.

    Raises:
        Unavailable: no daemon could be started.
        ConfigError: the file cannot be written.
    """
    console = console or terminal.console()
    timings: dict[tuple[str, Verb, int], list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtcd-"))
        ways = stack.enter_context(_ways(Path(folder), max(sizes)))
        turns = [(size, name) for size in sizes for _ in range(rounds + 1) for name in ways[size]]
        progress = stack.enter_context(terminal.progress(console, transient=True))
        for size, name in progress.track(turns, description="moving blocks"):
            for verb, timing in _time(ways[size][name], size).items():
                timings.setdefault((name, verb, size), []).append(timing)
    rows = _rows(timings)
    console.print(_table(rows))
    if json:
        write_json(json, "bench data-plane", {"rows": [asdict(row) for row in rows]})
    return rows


@contextmanager
def _ways(folder: Path, largest: int) -> Iterator[dict[int, dict[str, Carrier]]]:
    """Yield, for each size, all ways by name."""
    policy, tokens = folder / "policy.toml", folder / "tokens.toml"
    policy.write_text(_POLICY)
    secret = access.new_token()
    digest = access.digest(secret.encode()).hex()
    tokens.write_text(f'[[token]]\nsha256 = "{digest}"\ntenant = "bench"\nscopes = ["data"]\n')
    tokens.chmod(0o600)
    port, nbytes = _free_port(), largest * MIB
    daemon = Daemon(
        folder, host=8 * nbytes, disk=0, profiles=folder, policy=policy,
        tcp=config.daemon.Tcp(listen=f"127.0.0.1:{port}", tokens=tokens),
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(daemon)
        unix = stack.enter_context(daemon.client())
        tcp = stack.enter_context(Client(f"http://127.0.0.1:{port}", token=secret))
        region = stack.enter_context(unix.region(nbytes))
        region.memory[:] = b"\1" * nbytes
        own = memoryview(bytearray(b"\1" * nbytes))
        others: dict[str, Carrier] = {
            "raw-tcp": stack.enter_context(raw_socket(own, socket.AF_INET, folder)),
            "raw-unix": stack.enter_context(raw_socket(own, socket.AF_UNIX, folder)),
            "memcpy": Memcpy(own),
            "file": Files(own, folder),
        }
        if (redis := stack.enter_context(redis_values(own, folder))) is not None:
            others["redis"] = redis
        yield {
            size: {
                "http-tcp": _blocks(own, daemon.pid, tcp, size),
                "http-unix": _blocks(own, daemon.pid, unix, size),
                "region": _blocks(region.memory, daemon.pid, unix, size),
                **others,
            }
            for size in (1 << n for n in range(largest.bit_length()))
        }


def _blocks(memory: memoryview, pid: int, client: Client, mib: int) -> Blocks:
    """Return a way through the daemon, for blocks of one size."""
    layout = kv_layout(layers=mib, kv_heads=8, head_dim=128, dtype=Dtype.BF16)
    identity = Identity(
        engine="bench", hash_scheme="none", model="bench", weights="00" * 32,
        rope=Rope(RopeKind.DEFAULT, 10_000.0, 128), layout=layout, block_tokens=_TOKENS,
    )  # fmt: skip
    name = client.register(f"bench-{mib}", identity).name
    return Blocks(memory, pid, client, name, _TOKENS)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _time(way: Carrier, mib: int) -> dict[Verb, tuple[float, float]]:
    """Return seconds of CPU, and seconds passed, for a byte each way."""
    nbytes, times = mib * MIB, max(1, _AT_ONCE // mib)
    spent: dict[Verb, tuple[float, float]] = {"put": (0.0, 0.0), "get": (0.0, 0.0)}
    for _ in range(times):
        for verb, (cpu, wall) in spent.items():
            cpu_before, wall_before = way.spent(), time.perf_counter()
            way.move(verb, nbytes)
            passed = time.perf_counter() - wall_before
            spent[verb] = cpu + way.spent() - cpu_before, wall + passed
        way.tidy()
    return {verb: (cpu / times / nbytes, wall / times / nbytes) for verb, (cpu, wall) in spent.items()}


def _rows(timings: dict[tuple[str, Verb, int], list[tuple[float, float]]]) -> list[Row]:
    """Turn timings into figures; the first round of each only warms up."""
    cpu = {key: median(timing[0] for timing in rounds[1:]) for key, rounds in timings.items()}
    wall = {key: median(timing[1] for timing in rounds[1:]) for key, rounds in timings.items()}

    def row(path: str, verb: Verb, mib: int) -> Row:
        def over(other: str | None) -> float | None:
            key = (other or "", verb, mib)
            return cpu[key] / cpu[path, verb, mib] if key in cpu else None

        memcpy = over("memcpy")
        assert memcpy is not None, "it is always measured"
        return Row(
            path, verb, mib, 1e-9 / cpu[path, verb, mib], 1e-9 / wall[path, verb, mib],
            over(_WIRE.get(path)), memcpy, over("redis"),
        )  # fmt: skip

    return [row(*key) for key in cpu]


def _table(rows: Sequence[Row]) -> Table:
    table = Table(
        title="10⁹ bytes per second of CPU, client and server together, and by the clock",
        caption="ratios are of CPU; memcpy and file of a few MiB stay in the processor's cache",
    )
    for name in (
        "path",
        "verb",
        "MiB",
        "GB/s of CPU",
        "GB/s by the clock",
        "/ socket",
        "/ memcpy",
        "/ Redis",
    ):
        table.add_column(name, justify="left" if name in {"path", "verb"} else "right")
    for row in rows:
        ratios = (row.over_socket, row.over_memcpy, row.over_redis)
        table.add_row(
            row.path, row.verb, str(row.mib), f"{row.gb_s:.2f}", f"{row.wall_gb_s:.2f}",
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )  # fmt: skip
    return table
