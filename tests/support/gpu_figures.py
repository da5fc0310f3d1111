"""What can be measured of a GPU in two minutes: copies, nvCOMP and where it passes a CPU, kernels, overlap.

``python -m support.gpu_figures FILE`` writes JSON and shows a table.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from support import gpu_nvcomp

from kvtcd.codec import fused, nvcomp
from kvtcd.codec.choose import codec_for
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.residency import Residency
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.sections import Part, Plain, deflated, inflated
from kvtcd.codec.staged import Accelerator
from kvtcd.codec.uniform import InTorch
from kvtcd.codec.widths import Widths
from kvtcd.core.blob import CHUNK_BYTES, CodecId, Header, Kind, parse
from kvtcd.core.layout import Dtype
from kvtcd.core.policy import CodecChoice
from kvtcd.lab import bench_overlap
from kvtcd.lab.figures import write_json
from kvtcd.tiers.memory import HostMemory
from kvtcd.tiers.pinning import pin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtcd.codec.uniform import Arithmetic

CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)
SIZES = ((1024, 128), (1024, 256), (2048, 256), (4096, 1024))
REPEATS = 7
NVCOMP_S = 40.0


def seconds(call: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the least time of a call, until the device has done what it launched."""
    best = float("inf")
    for _ in range(repeats + 1):  # the first one loads kernels
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best


def copies(device: torch.device, nbytes: int = 256 << 20) -> list[dict[str, object]]:
    """Measure copies to and from memory that is pinned and memory that is not, and pinning itself. GB/s."""
    rows: list[dict[str, object]] = []
    memory = HostMemory(nbytes)
    memory.slab[:] = 1
    host, there = (
        torch.from_numpy(memory.slab),
        torch.empty(memory.capacity, dtype=torch.uint8, device=device),
    )
    for kind in ("pageable", "pinned"):
        begin = time.perf_counter()
        pinned = pin(memory.chunks, device) if kind == "pinned" else None
        took = time.perf_counter() - begin
        if pinned and not pinned.share:
            break
        rows.append(
            {
                "memory": kind,
                "mib": memory.capacity >> 20,
                "to_gb_s": nbytes / 1e9 / seconds(lambda: there.copy_(host, non_blocking=True), device),
                "from_gb_s": nbytes / 1e9 / seconds(lambda: host.copy_(there, non_blocking=True), device),
                "register_gb_s": nbytes / 1e9 / took if pinned else None,
            }
        )
        if pinned:
            pinned.close()
    return rows


def entropy(device: torch.device, chunks: Sequence[int] = CHUNKS) -> list[dict[str, object]]:
    """Measure both entropy stages on codes of four values, as one CPU thread and the device do it. ms."""
    found = nvcomp.load(device, Residency())
    if found is None:
        return []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return [_entropy(device, found, count) for count in chunks]


def _entropy(device: torch.device, found: nvcomp.Nvcomp, count: int) -> dict[str, object]:
    packed = gpu_nvcomp.codes(count * CHUNK_BYTES, torch.device("cpu"))
    plain = [Plain(Part(Kind.CODES, 0, 4), 0, 1, packed)]
    header = Header(CodecId.LOSSLESS, 1, Dtype.BF16, bytes(32), 1, packed.numel())
    cpu, gpu = deflated(header, plain), found.deflated(header, plain)
    blob, scratch = parse(memoryview(cpu)), HeapScratch()
    for written in (cpu, gpu):
        if not torch.equal(found.inflated(parse(memoryview(written)))[0].data.cpu(), plain[0].data):
            raise SystemExit("nvCOMP does not read what was written")

    def on_cpu() -> None:
        scratch.clear()
        for section in inflated(blob, scratch):
            section.data.to(device)

    return {
        "chunks": count,
        "inflate_cpu_ms": 1e3 * seconds(on_cpu, device),
        "inflate_gpu_ms": 1e3 * seconds(lambda: found.inflated(blob), device),
        "deflate_cpu_ms": 1e3 * seconds(lambda: deflated(header, plain), device, 2),
        "deflate_gpu_ms": 1e3 * seconds(lambda: found.deflated(header, plain), device, 2),
        "ratio_cpu": packed.numel() / len(cpu),
        "ratio_gpu": packed.numel() / len(gpu),
    }


def kernels(device: torch.device, sizes: Sequence[tuple[int, int]] = SIZES) -> list[dict[str, object]]:
    """Measure rounding and packing, and the way back, by kernels and by torch; sizes: rank and tokens. ms.

    Ends the process with 1 where they say different codes.
    """
    found = fused.load(device)
    if isinstance(found, InTorch):
        return []
    return [_kernels(device, found, rank, tokens) for rank, tokens in sizes]


def _kernels(device: torch.device, found: Arithmetic, rank: int, tokens: int) -> dict[str, object]:
    draw = torch.Generator().manual_seed(0)
    spread = torch.logspace(1, -1, rank)
    widths = Widths.of(spread, 1.0).to(device)
    values = torch.randn(widths.rank, tokens, generator=draw) * spread[: widths.rank, None]
    coefficients, steps = values.to(device), torch.ones(tokens, device=device)
    order = torch.randperm(tokens, generator=draw).to(device)
    row: dict[str, object] = {"rank": rank, "tokens": tokens}
    told = []
    for name, arithmetic in (("kernels", found), ("torch", InTorch())):
        coded = arithmetic.quantise(coefficients, steps, order, widths)
        escapes = coded.escapes[:, : int(coded.found[0])].contiguous()
        restored = arithmetic.restore(coded.codes, escapes, steps, order, widths)
        told.append((coded.codes, escapes, restored))
        row[f"quantise_{name}_ms"] = 1e3 * seconds(
            partial(arithmetic.quantise, coefficients, steps, order, widths), device
        )
        row[f"restore_{name}_ms"] = 1e3 * seconds(
            partial(arithmetic.restore, coded.codes, escapes, steps, order, widths), device
        )
    if not all(map(torch.equal, *told)):
        raise SystemExit("kernels say other codes than torch")
    return row


def crossover(rows: Sequence[dict[str, object]], way: str) -> int | None:
    """Return the fewest chunks from which the device was faster, and stayed so; None if it never was."""
    faster = [row[f"{way}_gpu_ms"] < row[f"{way}_cpu_ms"] for row in rows]
    from_here = next((i for i in range(len(rows)) if all(faster[i:])), None)
    return None if from_here is None else int(rows[from_here]["chunks"])


def overlap(device: torch.device, groups: int = 8, delay: float = 0.05) -> list[dict[str, object]]:
    """Run `kvtcd bench overlap` with the codec on threads and on the device."""
    rows: list[dict[str, object]] = []
    raw, choice = bench_overlap.sample(), CodecChoice(name="lossless")
    for where, accelerator in (("threads", None), ("cuda", Accelerator.on(device, Residency()))):
        with tempfile.TemporaryDirectory(prefix="kvtcd-gpu-") as folder:
            profiles = ProfileFolder(Path(folder))
            codec = codec_for(bench_overlap.IDENTITY, choice, profiles, accelerator)
            result = asyncio.run(
                bench_overlap.measure(
                    Path(folder), identity=bench_overlap.IDENTITY, codec=codec, raw=raw, groups=groups,
                    delay=delay, device=device if accelerator else None,
                )
            )  # fmt: skip
        rows += [{"codec_on": where} | asdict(row) | {"bound_s": row.bound_s} for row in result.rows]
    return rows


def table(title: str, rows: Sequence[dict[str, object]]) -> Table:
    """Return rows as a table."""
    shown = Table(title=title)
    for name in rows[0] if rows else ():
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    return shown


def library(device: torch.device, seconds: float = NVCOMP_S) -> dict[str, object]:
    """Ask nvCOMP itself what has to be known of it; empty without it. `seconds`: about how long."""
    until = time.monotonic() + seconds
    if nvcomp.load(device, Residency()) is None:
        return {}
    from nvidia import nvcomp as api  # noqa: PLC0415 - there only with an extra

    with torch.cuda.stream(torch.cuda.Stream(device)):
        return {
            "nvcomp": api.__version__,
            "exchanged": gpu_nvcomp.exchanged(api, device),
            "manners": gpu_nvcomp.manners(api, device),
            "nvcomp_speeds": gpu_nvcomp.speeds(api, device, until),
        }


def versions() -> dict[str, object]:
    """Say what card and which CUDA it is."""
    if not torch.cuda.is_available():
        return {"cuda": torch.version.cuda}
    card = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "cuda": torch.version.cuda, "card": card.name, "capability": [card.major, card.minor],
        "multiprocessors": card.multi_processor_count, "memory": total, "memory_free": free,
    }  # fmt: skip


def measure(device: torch.device, out: Path) -> None:
    """Measure everything, write it, and show it. Ends the process with 1 where zlib and nvCOMP differ."""
    figures: dict[str, object] = versions() | {"copies": copies(device), "entropy": entropy(device)}
    figures["kernels"] = kernels(device)
    figures |= library(device)
    figures |= {f"{way}_crossover": crossover(figures["entropy"], way) for way in ("inflate", "deflate")}
    figures["crossover_used"] = nvcomp.CROSSOVER
    figures["overlap"] = overlap(device)
    write_json(out, "gpu check", figures)
    console = Console(width=150)
    for name in ("copies", "entropy", "kernels", "nvcomp_speeds", "overlap"):
        console.print(table(name, figures.get(name, [])))
    shown = ("crossover", "card", "cuda", "nvcomp", "manners")
    console.print({key: figures[key] for key in figures if key in shown or "crossover" in key})
    wrong = [row for row in figures.get("exchanged", []) if not row["zlib_reads"] or not row["reads_zlib"]]
    if wrong:
        console.print(table("zlib and nvCOMP do not read each other", wrong))
        raise SystemExit(1)


if __name__ == "__main__":
    measure(torch.device("cuda", 0), Path(sys.argv[1]))
