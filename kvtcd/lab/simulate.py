"""`kvtcd policy simulate`: how many blocks of a trace each policy would have found in a budget.

The budget is one tier, spent on packed blocks: at an end-to-end ratio R, room for B raw blocks holds R·B. The
yardsticks hold raw blocks: plain LRU, and the optimum that knows the future. All blocks count alike, a
partial last block too; a budget in bytes is so many blocks of the mean size (`block_bytes`). A hit is a block
found as part of a leading prefix, in shares of all blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from kvtcd import terminal
from kvtcd.config import load_policy, size
from kvtcd.core.errors import ConfigError
from kvtcd.core.keys import RecordKey
from kvtcd.core.policy import Evict, Policy
from kvtcd.lab.belady import most_hits
from kvtcd.lab.recording import read_requests
from kvtcd.lab.replay import Replay
from kvtcd.lab.trace import Request
from kvtcd.terminal import Table

_BLOCKS = re.compile(r"(\d+) ?blocks")
RAW_LRU = Policy("lru", evict=Evict("lru", leaves_first=False))


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one budget; shares of all blocks of the trace.

    Attributes:
        policy: name of its file.
        budget_blocks: raw blocks that the budget holds.
        ratio: how much smaller stored blocks are, end to end.
        hit_ratio: found.
        stored_ratio: written.
        hit_ratio_raw_lru: found by LRU over raw blocks.
        belady: found at most, over raw blocks.
        gap_closed: share of the way from the former to the latter; above 1 where packing makes up for more.
    """

    policy: str
    budget_blocks: int
    ratio: float
    hit_ratio: float
    stored_ratio: float
    hit_ratio_raw_lru: float
    belady: float
    gap_closed: float


def command(
    *, trace: Path, policies: Sequence[Path], budgets: Sequence[str], ratios: Sequence[float],
    bytes_per_token: int | None, json: Path | None, plot: Path | None,
) -> None:  # fmt: skip
    """Replay a trace and show what each policy finds.

    Raises:
        ConfigError: a file or budget is wrong.
        Unavailable: a plot was asked for, and matplotlib is not installed.
    """
    tried = [load_policy(path) for path in policies]
    requests = read_requests(trace)
    nbytes = block_bytes(requests, bytes_per_token)
    blocks = [budget_blocks(budget, nbytes) for budget in budgets]
    console = terminal.console()
    with terminal.progress(console) as progress:
        rows = simulate(requests, tried, blocks, ratios, progress)
    show(console, rows)
    if json:
        from kvtcd.lab.figures import write_json  # noqa: PLC0415 - loads torch

        references = sum(len(request.blocks) for request in requests)
        figures = {"trace": trace.name, "requests": len(requests), "references": references}
        write_json(json, "policy simulate", figures | {"rows": [asdict(row) for row in rows]})
    if plot:
        from kvtcd.lab.simulate_plot import draw  # noqa: PLC0415 - loads matplotlib, which not all have

        draw(rows, plot)


def block_bytes(requests: Sequence[Request], bytes_per_token: int | None) -> float | None:
    """Return the raw bytes of a block, the mean over all that the trace names; None if nobody says.

    In a recording, namespaces may have blocks of different sizes, and the last block of a sequence may be
    shorter: each counts as it is. The replay then takes all of them for blocks of that mean, as LRU and the
    optimum have to (with sizes of their own, the optimum is a knapsack).

    Args:
        requests: those of a recording say how many bytes a token has.
        bytes_per_token: counts instead of what they say.
    """
    sizes: dict[RecordKey, int] = {}
    for request in requests:
        token_bytes = bytes_per_token or request.token_bytes
        for number, key in enumerate(request.blocks if token_bytes else ()):
            left = request.tokens - number * request.block_tokens
            sizes[key] = max(1, min(request.block_tokens, left)) * (token_bytes or 0)
    return sum(sizes.values()) / len(sizes) if sizes else None


def budget_blocks(text: str, block_bytes: float | None) -> int:
    """Read a budget: ``"3000blocks"``, or a size, for which the raw bytes of a block must be known.

    Raises:
        ConfigError: it is neither, or holds no block.
    """
    if found := _BLOCKS.fullmatch(text):
        blocks = int(found[1])
    elif block_bytes is None:
        why = f"{text!r} is not for instance 3000blocks; a size needs --bytes-per-token, but for a recording"
        raise ConfigError("--budget", "", why)
    else:
        try:
            blocks = int(size(text) / block_bytes)
        except ValueError:
            raise ConfigError(
                "--budget", "", f"{text!r} is neither a size, such as 64GiB, nor 3000blocks"
            ) from None
    if not blocks:
        raise ConfigError("--budget", "", f"{text!r} does not hold one block")
    return blocks


def simulate(
    requests: Sequence[Request], policies: Sequence[Policy], budgets: Sequence[int], ratios: Sequence[float],
    progress: Progress | None = None,
) -> list[Row]:  # fmt: skip
    """Replay a trace under every policy, budget and ratio."""
    progress = progress or terminal.silent()
    references = sum(len(request.blocks) for request in requests)

    def replayed(policy: Policy, capacity: int) -> tuple[float, float]:
        replay = Replay(policy, capacity)
        for request in progress.track(requests, description=f"{policy.name}, {capacity:,} blocks"):
            replay.request(request)
        return replay.hits / references, replay.stored / references

    rows = []
    for budget in budgets:
        lru, _ = replayed(RAW_LRU, budget)
        best = most_hits(requests, budget) / references
        for ratio in ratios:
            for policy in policies:
                hits, stored = replayed(policy, int(budget * ratio))
                gap = (hits - lru) / (best - lru) if best > lru else 0.0
                rows.append(Row(policy.name, budget, ratio, hits, stored, lru, best, gap))
    return rows


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("policy", lambda row: row.policy),
    ("raw blocks", lambda row: f"{row.budget_blocks:,}"),
    ("ratio", lambda row: f"{row.ratio:g}"),
    ("hits", lambda row: f"{row.hit_ratio:.1%}"),
    ("written", lambda row: f"{row.stored_ratio:.1%}"),
    ("raw LRU", lambda row: f"{row.hit_ratio_raw_lru:.1%}"),
    ("optimum", lambda row: f"{row.belady:.1%}"),
    ("gap closed", lambda row: f"{row.gap_closed:.0%}"),
)


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print rows as a table."""
    table = Table(title="Blocks found, of all blocks asked for")
    console.print(table.fill(_COLUMNS, rows, left={"policy"}))
