"""`kvtcd bench overlap`: how much of a slow disk the codec hides, and the other way round.

Blocks go down and come up through the engine's own pipelines, on a real disk tier that every record makes
wait. Once one after the other, once all at once. A pipeline is as fast as its slowest stage: of all stages,
the one whose times add up to the most over the groups; its sum is `longest_stage_s`. It can begin only when
the first block has come to it (fill), and when it has ended the last block has still to go on (drain). So
what is to be expected is::

    pipelined_s <= 1.15 * longest_stage_s + fill_drain_s

with `fill_drain_s` taken from the timeline: from the start to the first time the slowest stage begins, and
from the last time it ends to the end. A group is one block. Records that are committed together count once.

Beside it stands the plain ratio, `pipelined_s / longest_stage_s`, fill and drain included. It is meant to be
at most 1.15 too, and comes down to that as groups grow, since fill and drain do not.
"""

from __future__ import annotations

import asyncio
import json as json_text
import secrets
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE_HEAD

from kvtcd import outputs, terminal
from kvtcd.codec.choose import codec_for
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.scratch import HeapScratch
from kvtcd.core.events import Move, Moved
from kvtcd.core.identity import Identity, Rope, RopeKind
from kvtcd.core.keys import EngineKey, RecordKey, TenantKeys
from kvtcd.core.layout import Dtype, kv_layout
from kvtcd.core.place import Place
from kvtcd.core.policy import CodecChoice, Policy
from kvtcd.engine.cuda import on_cuda
from kvtcd.engine.lanes import Lane, on_threads
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.mover import Mover, Outcome
from kvtcd.engine.namespaces import Namespace, Tenant
from kvtcd.engine.ports import Bytes, Codec
from kvtcd.engine.steps import Origin
from kvtcd.engine.timeline import Span, chrome_trace
from kvtcd.engine.writer import Writer
from kvtcd.lab.accelerator import accelerator_for
from kvtcd.lab.figures import write_json
from kvtcd.terminal import Table
from kvtcd.tiers.disk import Environment, Put, footprint
from kvtcd.tiers.disk.records import Take, fresh
from kvtcd.tiers.memory import GRANULE, HostMemory
from kvtcd.tiers.pinning import pin

ALLOWED = 1.15
"""Times the slowest stage, on top of fill and drain."""
IDENTITY = Identity(
    engine="bench", hash_scheme="none", model="bench", weights="00" * 32,
    rope=Rope(RopeKind.DEFAULT, 10_000.0, 64), block_tokens=256,
    layout=kv_layout(layers=30, kv_heads=3, head_dim=64, dtype=Dtype.BF16),
)  # fmt: skip
"""The shape of SmolLM2-135M: 5.9 MB a block."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way of so many blocks; seconds.

    Attributes:
        way: promote or demote.
        groups: blocks.
        serial_s: one after the other.
        pipelined_s: all at once.
        longest_stage: the slowest, by its sum over the groups.
        longest_stage_s: that sum.
        fill_drain_s: see the module.
    """

    way: str
    groups: int
    serial_s: float
    pipelined_s: float
    longest_stage: str
    longest_stage_s: float
    fill_drain_s: float

    @property
    def ratio(self) -> float:
        """`pipelined_s` over `longest_stage_s`; meant to be at most `ALLOWED` where groups are many."""
        return self.pipelined_s / self.longest_stage_s

    @property
    def bound_s(self) -> float:
        """The most that `pipelined_s` is meant to be."""
        return ALLOWED * self.longest_stage_s + self.fill_drain_s


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured, and every span of it."""

    rows: tuple[Row, ...]
    spans: tuple[Span, ...]


class SlowDisk(Environment):
    """A disk tier that takes `delay` seconds more for every record that is read or written."""

    def __init__(self, path: Path, delay: float) -> None:
        super().__init__(path, quota=1 << 30)
        self._delay = delay

    def read(self, key: bytes, take: Take = fresh) -> tuple[bytes, Bytes] | None:
        """Read a record, slowly."""
        time.sleep(self._delay)
        return super().read(key, take)

    def write(self, puts: Sequence[Put], drops: Sequence[bytes]) -> None:
        """Write records, slowly."""
        time.sleep(self._delay * len(puts))
        super().write(puts, drops)


def command(
    *, groups: Sequence[int], disk_ms: float, device: str, trace: Path | None, json: Path | None
) -> None:
    """Measure, show a table, and write figures and the timeline if asked.

    Raises:
        Unavailable: the device is not there.
    """
    accelerator = accelerator_for(device)
    rows: list[Row] = []
    spans: list[Span] = []
    console = terminal.console()
    with terminal.progress(console, transient=True) as progress:
        for count in progress.track(groups, description="blocks down and up, group by group"):
            with tempfile.TemporaryDirectory(prefix="kvtcd-bench-") as folder:
                profiles = ProfileFolder(Path(folder))
                codec = codec_for(IDENTITY, CodecChoice(name="lossless"), profiles, accelerator)
                result = asyncio.run(
                    measure(
                        Path(folder), identity=IDENTITY, codec=codec, raw=sample(), groups=count,
                        delay=disk_ms / 1000, device=accelerator.device if accelerator else None,
                    )
                )  # fmt: skip
            rows += result.rows
            spans += result.spans
    console.print(table(rows, disk_ms))
    if trace:
        outputs.write(trace, json_text.dumps(chrome_trace(spans)))
    if json:
        figures = [asdict(row) | {"bound_s": row.bound_s, "ratio": row.ratio} for row in rows]
        head = {"disk_ms": disk_ms, "device": device, "target_ratio": ALLOWED}
        write_json(json, "bench overlap", head | {"rows": figures})


def sample() -> Bytes:
    """Return a raw block of normal noise, which `lossless` shrinks by a third: work for both its halves."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(IDENTITY.block_tokens * IDENTITY.layout.token_elements, generator=draw)
    return values.to(torch.bfloat16).view(torch.uint8).numpy()


async def measure(
    folder: Path,
    *,
    identity: Identity,
    codec: Codec,
    raw: Bytes,
    groups: int,
    delay: float,
    device: torch.device | None = None,
) -> Result:
    """Send copies of a block down and up, one after the other and all at once.

    Args:
        folder: for the disk tier.
        identity: of the block.
        codec: an exact one, which is checked.
        raw: the block.
        groups: copies.
        delay: seconds that every record makes the disk wait.
        device: where the codec works; None: on threads of the CPU.
    """
    spans: list[Span] = []
    stages, lane = on_cuda(device) if device else on_threads(), Lane("disk")
    memory = HostMemory(groups * (raw.size + GRANULE))
    pinned = pin(memory.chunks, device) if device else None
    writer = Writer(await lane.run(SlowDisk, folder / "tenant", delay), lane)
    tenant = Tenant(TenantKeys.derive(secrets.token_bytes(32), "bench"), writer)
    namespace = Namespace("bench", "bench", identity, identity.digest, 1, 1, Policy("bench"), codec, codec)
    mover = Mover(
        memory=memory, put_record=Put, stages=stages, scratch=HeapScratch, metrics=Metrics(),
        footprint=footprint, observers=[spans.append],
    )  # fmt: skip
    tokens = raw.size // identity.layout.token_bytes
    origins: dict[RecordKey, Origin] = {}
    for number in range(groups):
        engine_key = EngineKey(number.to_bytes(8, "big"))
        key = tenant.keys.record_key(identity.digest, b"", engine_key)
        origins[key] = Origin(namespace, engine_key, b"", None, 0, tokens, raw.size, 0)
        memory.allocate(key, raw.size)
        memory.pieces(key)[0][:] = raw

    async def demote(key: RecordKey) -> Outcome:
        return await mover.move(Move(key, Place.HOST, Place.DISK, 0), namespace, tenant, origins[key])

    async def promote(key: RecordKey) -> Outcome:
        memory.pieces(key)[0][:] = 0
        outcome = await mover.move(Move(key, Place.DISK, Place.HOST, 0), namespace, tenant, None)
        assert np.array_equal(memory.pieces(key)[0], raw), "what comes up is what went down"
        return outcome

    rows = [
        await _row("demote", demote, tuple(origins), spans),
        await _row("promote", promote, tuple(origins), spans),
    ]
    await writer.close()
    for stream in stages.streams():
        await stream.close()
    if pinned:
        pinned.close()
    return Result(tuple(rows), tuple(spans))


async def _row(
    way: str,
    move: Callable[[RecordKey], Coroutine[None, None, Outcome]],
    keys: Sequence[RecordKey],
    spans: list[Span],
) -> Row:
    begin = time.perf_counter()
    for key in keys:
        assert isinstance((await move(key)).event, Moved), "the move failed; the log says why"
    serial_s, seen = time.perf_counter() - begin, len(spans)
    begin = time.perf_counter()
    outcomes = await asyncio.gather(*map(move, keys))
    end = time.perf_counter()
    assert all(isinstance(outcome.event, Moved) for outcome in outcomes), "a move failed; the log says why"
    stage, busy = longest(spans[seen:])
    return Row(
        way=way,
        groups=len(keys),
        serial_s=serial_s,
        pipelined_s=end - begin,
        longest_stage=stage,
        longest_stage_s=sum(last - first for first, last in busy),
        fill_drain_s=busy[0][0] - begin + end - busy[-1][1],
    )


def longest(spans: Sequence[Span]) -> tuple[str, list[tuple[float, float]]]:
    """Return the stage whose times add up to the most, and these times, begin and end, in order."""
    busy: dict[str, set[tuple[float, float]]] = {}
    for span in spans:
        busy.setdefault(span.stage, set()).add((span.begin, span.end))
    stage = max(busy, key=lambda name: sum(end - begin for begin, end in busy[name]))
    return stage, sorted(busy[stage])


def table(rows: Sequence[Row], disk_ms: float) -> Table:
    """Return the figures as a table."""
    shown = Table(
        title=f"Overlap, the disk slowed by {disk_ms:g} ms a record (seconds)",
        caption=f"ratio: pipelined over slowest stage, meant to be at most {ALLOWED:g}",
        box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in (
        "way",
        "groups",
        "serial",
        "pipelined",
        "slowest",
        "takes",
        "fill+drain",
        "at most",
        "ratio",
    ):
        shown.add_column(column, justify="left" if column in ("way", "slowest") else "right")
    for row in rows:
        colour = "green" if row.pipelined_s <= row.bound_s else "red"
        shown.add_row(
            row.way, str(row.groups), f"{row.serial_s:.3f}", f"{row.pipelined_s:.3f}",
            row.longest_stage, f"{row.longest_stage_s:.3f}", f"{row.fill_drain_s:.3f}",
            f"[{colour}]{row.bound_s:.3f}", f"{row.ratio:.2f}",
        )  # fmt: skip
    return shown
