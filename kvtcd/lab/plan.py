"""`kvtcd plan`: what a model's cache takes, what a budget holds of it, what traffic finds, and when it pays.

Bytes follow from the profile and the policy: the curve that calibration measured gives the ratio of coded
tokens, and with the exact first tokens and the finer last ones that of a whole prefix. Those last ones are
estimated beyond the curve, along the line through its finest two points, which is rather too many bytes than
too few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from kvtcd import terminal
from kvtcd.codec.dial import Curve
from kvtcd.codec.kvtc2 import RECENT
from kvtcd.codec.origin import Origin
from kvtcd.codec.profile import read_origin
from kvtcd.config import load_policy, show_bytes, size
from kvtcd.core.errors import ConfigError
from kvtcd.core.layout import Dtype, Layout
from kvtcd.core.policy import CodecChoice, Policy
from kvtcd.lab import simulate
from kvtcd.lab.recording import read_requests
from kvtcd.lab.speeds import Speeds, known
from kvtcd.lab.trace import Request
from kvtcd.terminal import Table


@dataclass(frozen=True, slots=True)
class Size:
    """What a token takes.

    Attributes:
        model: whose; None where only bytes were given.
        bytes_per_token: raw, 16 bits a value.
        ratio_codec: of the tokens between the first and the last ones.
        ratio: of a whole prefix.
        kl: divergence that calibration measured there, nats per token; None where nothing was measured.
    """

    model: str | None
    bytes_per_token: int
    ratio_codec: float
    ratio: float
    kl: float | None

    @property
    def packed_per_token(self) -> float:
        """Bytes of a packed token, a mean over a prefix."""
        return self.bytes_per_token / self.ratio


@dataclass(frozen=True, slots=True)
class Gain:
    """A source against reading a prefix again.

    Attributes:
        source: where it is stored.
        break_even: least tokens for which fetching is faster; None if it never is.
        prefill_s, reuse_s: for the length that was planned for.
    """

    source: str
    break_even: int | None
    prefill_s: float
    reuse_s: float


def command(
    *, profile: Path | None, bytes_per_token: int | None, ratio: float | None, policy: Path | None,
    tokens: int | None, budgets: Sequence[str], trace: Path | None, bench: Path | None,
    prefill: float | None, reuse: float | None, overhead_ms: float, json: Path | None, plot: Path | None,
) -> None:  # fmt: skip
    """Show a plan.

    Args:
        profile: of the model.
        bytes_per_token: raw, in the place of a profile.
        ratio: of a whole prefix, where no curve gives it.
        policy: codec with its dial, admission and eviction; None: what balanced.toml says.
        tokens: of a prefix; None: the mean of the trace, else 4,096.
        budgets: sizes of what stored blocks may take.
        trace: requests, for what is found.
        bench: what `bench ttft --json` wrote of this model and machine.
        prefill: tokens a second, in the place of that.
        reuse: raw megabytes fetched and unpacked a second.
        overhead_ms: of a fetch, whatever its length.
        json: a file for the figures.
        plot: a file for the picture.

    Raises:
        ConfigError: a file or an option is wrong, or too little is said.
        Corrupt: the profile is damaged.
        Unavailable: a plot was asked for, and matplotlib is not installed.
    """
    console, governing = terminal.console(), load_policy(policy) if policy else Policy("balanced")
    requests = read_requests(trace) if trace else []
    length = tokens or (round(sum(r.tokens for r in requests) / len(requests)) if requests else 4096)
    if profile is not None and bytes_per_token is None:
        found = of_profile(_origin(profile), governing.codec, length, ratio)
    elif bytes_per_token is not None and profile is None and ratio is not None:
        found = Size(None, bytes_per_token, ratio, ratio, None)
    else:
        raise ConfigError("command line", "", "say --profile, or --bytes-per-token and --ratio")
    speeds = known(bench, prefill, reuse, overhead_ms, found.bytes_per_token)
    nbytes = [_bytes(budget) for budget in budgets]
    with terminal.progress(console, transient=True) as progress:
        rows = _found(requests, governing, nbytes, found, progress)
    gains = gains_of(speeds, length) if speeds else []
    show(console, found, length, nbytes=nbytes, rows=rows, gains=gains)
    if json:
        from kvtcd.lab.figures import write_json  # noqa: PLC0415 - loads torch

        held = [
            {"bytes": each, "tokens_raw": each // found.bytes_per_token, "tokens_packed": holds(each, found)}
            for each in nbytes
        ]
        figures = asdict(found) | {"packed_per_token": found.packed_per_token, "tokens": length}
        lists = {"rows": [asdict(row) for row in rows], "gains": [asdict(gain) for gain in gains]}
        write_json(json, "plan", figures | {"budgets": held} | lists)
    if plot:
        from kvtcd.lab.plan_plot import draw  # noqa: PLC0415 - loads matplotlib, which not all have

        draw(nbytes, rows, speeds, length, plot)


def of_profile(origin: Origin, choice: CodecChoice, tokens: int, ratio: float | None = None) -> Size:
    """Return what a token takes of a model that has a profile.

    Args:
        origin: of the profile.
        choice: codec and dial.
        tokens: of a prefix.
        ratio: of a whole prefix; counts instead of what the curve says.

    Raises:
        ConfigError: the dial is beyond the curve, or no curve says what this codec gives.
        Corrupt: the curve cannot be read.
    """
    raw = Layout(origin.streams, origin.layers, Dtype.BF16).token_bytes
    if ratio is not None:
        return Size(origin.model, raw, ratio, ratio, None)
    curve = Curve.from_json(origin.curve) if choice.name == "kvtc2" else None
    if curve is None:
        why = f"no curve of {origin.model} says what {choice.name} gives; `kvtcd eval rd` measures it"
        raise ConfigError("command line", "--ratio", why)
    try:
        step = curve.step_for(ratio=choice.ratio, max_kl=choice.max_kl)
    except ValueError as error:
        raise ConfigError("policy", "codec", str(error)) from None
    point = curve.at(step)
    sinks, window = min(choice.sinks, tokens), min(choice.window, max(0, tokens - choice.sinks))
    coded = tokens - sinks - window
    stored = sinks + window / finer(curve, step, RECENT) + coded / point.ratio
    return Size(origin.model, raw, point.ratio, tokens / stored, point.kl)


def finer(curve: Curve, step: float, half_octaves: int) -> float:
    """Return the ratio at a step that is finer by so many half octaves, beyond the curve if need be."""
    target, (left, right) = step * math.exp2(-half_octaves / 2), curve.points[:2]
    if target >= left.step:
        return curve.at(target).ratio
    slope = math.log(right.ratio / left.ratio) / math.log(right.step / left.step)
    return max(1.0, left.ratio * math.pow(target / left.step, slope))


def holds(nbytes: int, found: Size) -> int:
    """Return the packed tokens that find room."""
    return int(nbytes / found.packed_per_token)


def gains_of(speeds: Speeds, tokens: int) -> list[Gain]:
    """Compare every source with reading."""
    return [
        Gain(source, speeds.break_even(source), speeds.prefill.at(tokens), cost.at(tokens))
        for source, cost in speeds.reuse.items()
    ]


def _origin(profile: Path) -> Origin:
    try:
        return read_origin(profile)
    except OSError as error:
        raise ConfigError(profile, "", f"cannot be read: {error.strerror}") from None


def _bytes(budget: str) -> int:
    try:
        return size(budget)
    except ValueError as error:
        raise ConfigError("--budget", "", str(error)) from None


def _found(
    requests: Sequence[Request], policy: Policy, nbytes: Sequence[int], found: Size, progress: Progress
) -> list[simulate.Row]:
    """Replay a trace in every budget, as `policy simulate` does."""
    if not requests:
        return []
    block = simulate.block_bytes(requests, found.bytes_per_token)
    blocks = [simulate.budget_blocks(f"{each} B", block) for each in nbytes]
    return simulate.simulate(requests, [policy], blocks, [round(found.ratio, 2)], progress)


def show(
    console: Console, found: Size, tokens: int, *,
    nbytes: Sequence[int], rows: Sequence[simulate.Row], gains: Sequence[Gain],
) -> None:  # fmt: skip
    """Print a plan as tables."""
    about = Table(title=f"A prefix of {tokens:,} tokens", show_header=False)
    for name, value in (
        ("model", found.model or "not named"),
        ("raw", f"{found.bytes_per_token:,} bytes a token, {found.bytes_per_token * tokens / 1e6:,.1f} MB"),
        ("packed", f"{found.packed_per_token:,.0f} bytes a token, ratio {found.ratio:.1f}"),
        ("coded tokens", f"ratio {found.ratio_codec:.1f}"),
        ("KL", "not measured" if found.kl is None else f"{found.kl:.2g} nats per token"),
    ):
        about.add_row(name, value)
    console.print(about)
    if nbytes:
        console.print(_budgets(found, tokens, nbytes, rows))
    if gains:
        console.print(_gains(gains, tokens))


def _budgets(found: Size, tokens: int, nbytes: Sequence[int], rows: Sequence[simulate.Row]) -> Table:
    table = Table(
        title="Budgets", caption="hits: blocks of the trace found, of all asked for" if rows else ""
    )
    headings = ["budget", "tokens", "prefixes", "raw tokens"]
    for heading in [*headings, "hits", "raw LRU", "optimum, raw"] if rows else headings:
        table.add_column(heading, justify="right")
    for number, each in enumerate(nbytes):
        held = holds(each, found)
        cells = [show_bytes(each), f"{held:,}", f"{held // tokens:,}", f"{each // found.bytes_per_token:,}"]
        if rows:
            row = rows[number]
            cells += [f"{share:.1%}" for share in (row.hit_ratio, row.hit_ratio_raw_lru, row.belady)]
        table.add_row(*cells)
    return table


def _gains(gains: Sequence[Gain], tokens: int) -> Table:
    table = Table(title="Fetching instead of reading again")
    for heading in ("source", "pays from", f"read {tokens:,}", f"fetch {tokens:,}", "times faster"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for gain in gains:
        table.add_row(
            gain.source, "never" if gain.break_even is None else f"{gain.break_even:,} tokens",
            f"{gain.prefill_s:.3g} s", f"{gain.reuse_s:.3g} s", f"{gain.prefill_s / gain.reuse_s:.1f}",
        )  # fmt: skip
    return table
