"""What can be measured of a GPU in two minutes: copies, nvCOMP and where it passes a CPU, kernels, overlap.

Each function is a part of `gpu_run`, given the device, and returns what it has found.
"""

from __future__ import annotations

import asyncio
import mmap
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from support import gpu_nvcomp
from support.gpu_nvcomp import Wrong

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
from kvtcd.core.errors import BadChecksum
from kvtcd.core.layout import Dtype
from kvtcd.core.policy import CodecChoice
from kvtcd.lab import bench_codec_packers, bench_overlap
from kvtcd.lab.bench_codec_case import make
from kvtcd.tiers.memory import GRANULE, HostMemory
from kvtcd.tiers.pinning import pin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtcd.codec.choose import NamespaceCodec
    from kvtcd.codec.ports import Encoded
    from kvtcd.codec.uniform import Arithmetic
    from kvtcd.engine.ports import Bytes

CHUNKS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
SIZES = ((1024, 128), (1024, 256), (2048, 256), (4096, 1024))
STRAIGHT = ((14_336, 1024), (32_768, 1024))
REPEATS = 7
SPEEDS_S = 18.0
"""About how long nvCOMP's speeds may take."""
TOKENS = 2816
"""Of the lossless block: 65 MB, four parts of it on the way up, and thousands of chunks."""


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
    """Measure copies to and from memory that is pinned and memory that is not, and pinning itself. GB/s.

    With huge pages and without: of those the kernel decides, `huge` is what it was asked for. And copies
    within the device's own memory, as of the GPU tier to an engine.
    """
    here, there = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    within = nbytes / 1e9 / seconds(lambda: there.copy_(here, non_blocking=True), device)
    own = {"memory": "own", "huge": None, "mib": nbytes >> 20, "to_gb_s": within, "from_gb_s": within}
    rows = [row for huge in (True, False) for row in _copies(device, nbytes, huge=huge)]
    return [*rows, {**own, "register_gb_s": None}]


def _copies(device: torch.device, nbytes: int, *, huge: bool) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    memory = HostMemory(nbytes)
    if not huge:
        memory._map.madvise(mmap.MADV_NOHUGEPAGE)
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
            raise Wrong("memory cannot be pinned", rows)
        rows.append(
            {
                "memory": kind,
                "huge": huge,
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
    """Measure both entropy stages on codes of four values, as one CPU thread and the device do it. ms.

    The last row says from how many chunks on the device stays ahead.
    """
    found = gpu_nvcomp.loaded(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        rows = [_entropy(device, found, count) for count in chunks]
    ahead = {f"{way}_gpu_ms": crossover(rows, way) for way in ("inflate", "deflate")}
    return [*rows, {"chunks": f"device ahead from, {nvcomp.CROSSOVER} used", **ahead}]


def _entropy(device: torch.device, found: nvcomp.Nvcomp, count: int) -> dict[str, object]:
    packed = gpu_nvcomp.codes(count * CHUNK_BYTES, torch.device("cpu"))
    plain = [Plain(Part(Kind.CODES, 0, 4), 0, 1, packed)]
    header = Header(CodecId.LOSSLESS, 1, Dtype.BF16, bytes(32), 1, packed.numel())
    cpu, gpu = deflated(header, plain), found.deflated(header, plain)
    blob, scratch = parse(memoryview(cpu)), HeapScratch()
    for written in (cpu, gpu):
        if not torch.equal(found.inflate(parse(memoryview(written))).proved()[0].data.cpu(), plain[0].data):
            raise Wrong("nvCOMP does not read what was written")

    def on_cpu() -> None:
        scratch.clear()
        for section in inflated(blob, scratch):
            section.data.to(device)

    return {
        "chunks": count,
        "inflate_cpu_ms": 1e3 * seconds(on_cpu, device),
        "inflate_gpu_ms": 1e3 * seconds(lambda: found.inflate(blob).proved(), device),
        "deflate_cpu_ms": 1e3 * seconds(lambda: deflated(header, plain), device, 2),
        "deflate_gpu_ms": 1e3 * seconds(lambda: found.deflated(header, plain), device, 2),
        "ratio_cpu": packed.numel() / len(cpu),
        "ratio_gpu": packed.numel() / len(gpu),
    }


def kernels(device: torch.device, sizes: Sequence[tuple[int, int]] = SIZES) -> list[dict[str, object]]:
    """Measure rounding and packing, and the way back, by kernels and by torch; sizes: rank and tokens. ms."""
    with gpu_nvcomp.told() as said:
        found = fused.load(device)
    if isinstance(found, InTorch):
        raise Wrong("; ".join(said))
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
        restored = arithmetic.restore(coded.codes, escapes, steps, order, widths).coefficients
        told.append((coded.codes, escapes, restored))
        row[f"quantise_{name}_ms"] = 1e3 * seconds(
            partial(arithmetic.quantise, coefficients, steps, order, widths), device
        )
        row[f"restore_{name}_ms"] = 1e3 * seconds(
            partial(arithmetic.restore, coded.codes, escapes, steps, order, widths), device
        )
    if not all(map(torch.equal, *told)):
        raise Wrong("kernels say other codes than torch", row)
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


def straight(device: torch.device, sizes: Sequence[tuple[int, int]] = STRAIGHT) -> list[dict[str, object]]:
    """Time decoding to host memory and to where a block is wanted on the device; p and rank. GB/s."""
    accelerator = Accelerator.on(device, Residency())
    rows: list[dict[str, object]] = []
    for p, rank in sizes:
        case = make(p, rank)
        for name in bench_codec_packers.CODECS:
            packer = bench_codec_packers.codec(name, case, accelerator)
            row: dict[str, object] = {"p": p, "rank": rank, "codec": name}
            with torch.cuda.stream(torch.cuda.Stream(device)):
                for way, call in (("host", packer.decode), ("straight", packer.straight)):
                    row[f"{way}_gb_s"] = case.raw.nbytes / 1e9 / seconds(call, device)
            rows.append(row)
    return rows


def lossless(device: torch.device, tokens: int = TOKENS) -> list[dict[str, object]]:
    """Time both ways of a large block without a transform: thousands of chunks, parts on the way up. ms.

    It lies in memory that is pinned, as that of a daemon.
    """
    nbytes = bench_overlap.IDENTITY.layout.nbytes(tokens)
    memory = HostMemory(2 * nbytes + GRANULE)
    raw, out = memory.slab[:nbytes], memory.slab[-nbytes:]
    raw[:] = _block(tokens)
    pinned = pin(memory.chunks, device)
    try:
        accelerator = Accelerator.on(device, Residency())
        with torch.cuda.stream(torch.cuda.Stream(device)):
            rows = [_there_and_back(given, raw, out, device) for given in (None, accelerator)]
    finally:
        pinned.close()
    if accelerator.told:
        raise Wrong(f"a CPU did it in the place of the device: {sorted(accelerator.told)}", rows)
    return rows


def _there_and_back(
    accelerator: Accelerator | None, raw: Bytes, out: Bytes, device: torch.device
) -> dict[str, object]:
    """Time a codec on a device, or on the CPU; see that what comes back is what went in."""
    codec, scratch = _codec(accelerator), HeapScratch()
    tokens = len(raw) // bench_overlap.IDENTITY.layout.token_bytes

    def encode() -> Encoded:
        scratch.clear()
        return codec.analyze(raw, tokens=tokens, first_token=0, after=0, scratch=scratch).deflate()

    def decode() -> None:
        scratch.clear()
        codec.inflate(blob, scratch).synthesize(out)

    packed = encode()
    blob = parse(memoryview(packed.blob))
    row: dict[str, object] = {
        "codec_on": "cuda" if accelerator else "cpu",
        "mb": raw.nbytes / 1e6,
        "chunks": sum(len(section.chunks) for section in blob.sections),
        "nvcomp": bool(accelerator and accelerator.nvcomp),
        "ratio": raw.nbytes / len(packed.blob),
        "encode_ms": 1e3 * seconds(encode, device, 2),
    }
    out[:] = 0
    row["decode_ms"] = 1e3 * seconds(decode, device, 3)
    if not np.array_equal(out, raw):
        raise Wrong("what comes back is not what went in", row)
    return row


def refused(device: torch.device, tokens: int = TOKENS, flips: int = 7) -> list[dict[str, object]]:
    """Flip bits of a blob under checksums, one at a time, and see each refused before the device gets it."""
    accelerator, raw, scratch = Accelerator.on(device, Residency()), _block(tokens), HeapScratch()
    codec = _codec(accelerator)
    packed = codec.analyze(raw, tokens=tokens, first_token=0, after=0, scratch=scratch).deflate()
    sections = parse(memoryview(packed.blob)).sections
    rows: list[dict[str, object]] = []
    for number in range(flips):
        section = sections[number % len(sections)]
        damaged = bytearray(packed.blob)
        at = section.offset + 997 * number % section.chunks[0][0]
        damaged[at] ^= 1 << number
        try:
            codec.inflate(parse(memoryview(damaged)), scratch)
        except BadChecksum as error:
            rows.append({"byte": at, "bit": number, "refused": str(error)})
        else:
            raise Wrong(f"bit {number} of byte {at} was flipped, and taken", rows)
    return rows


def _codec(accelerator: Accelerator | None) -> NamespaceCodec:
    with tempfile.TemporaryDirectory(prefix="kvtcd-gpu-") as folder:
        profiles = ProfileFolder(Path(folder))
        return codec_for(bench_overlap.IDENTITY, CodecChoice(name="lossless"), profiles, accelerator)


def _block(tokens: int) -> Bytes:
    """Return a raw block of normal noise."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(tokens * bench_overlap.IDENTITY.layout.token_elements, generator=draw)
    return values.to(torch.bfloat16).view(torch.uint8).numpy()


def exchanged(device: torch.device) -> list[dict[str, object]]:
    """See whether zlib and nvCOMP read each other."""
    rows = _asked(device, gpu_nvcomp.exchanged)
    if wrong := [row for row in rows if not row["zlib_reads"] or not row["reads_zlib"]]:
        raise Wrong(f"zlib and nvCOMP do not read each other in {len(wrong)} of {len(rows)} cases", rows)
    return rows


def manners(device: torch.device) -> list[dict[str, object]]:
    """Say what nvCOMP does to the host."""
    found = _asked(device, gpu_nvcomp.manners)
    return [{"what": name, "found": value} for name, value in found.items()]


def speeds(device: torch.device, seconds: float = SPEEDS_S) -> list[dict[str, object]]:
    """Time nvCOMP by algorithm, size and number of chunks."""
    until = time.monotonic() + seconds
    rows = _asked(device, lambda api, device: gpu_nvcomp.speeds(api, device, until))
    if failed := [row for row in rows if "failed" in row and row["algorithm"] == "Deflate"]:
        raise Wrong(f"Deflate failed in {len(failed)} of {len(rows)} cases: {failed[0]['failed']}", rows)
    return rows


def _asked(device: torch.device, ask: Callable[[Any, torch.device], Any]) -> Any:
    """Ask something of nvCOMP itself, once it has shown that it works."""
    gpu_nvcomp.loaded(device)
    from nvidia import nvcomp as api  # noqa: PLC0415 - there only with an extra

    with torch.cuda.stream(torch.cuda.Stream(device)):
        return ask(api, device)
