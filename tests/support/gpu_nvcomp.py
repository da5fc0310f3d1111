"""What has to be known of nvCOMP itself: does it speak with zlib, how fast is it, what holds up the host.

All of it on codes as the codecs make them, within a stream, by nvCOMP's own calls.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from kvtcd.codec import nvcomp
from kvtcd.codec.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SIZES = (1, 2, 15, 33, 4095, 4096, 16_383, 16_384, 65_535, 65_536)
"""Bytes of chunks that are exchanged with zlib."""
ALGORITHMS = (("Deflate", 0), ("Deflate", 1), ("GDeflate", 0), ("Zstd", None), ("ANS", None))
"""What is timed, and its ``algorithm_type``; all but the first for comparison."""
CHUNKS, BATCHES = (8 << 10, 16 << 10, 32 << 10, 64 << 10), (64, 256, 1024, 4096, 16_384)
MOST = 256 << 20
"""Bytes of a batch at most."""
_ALIGN, _REPEATS, _SPIN_S = 16, 3, 0.1
_NEVER_S = 600.0
_BUSY = 100_000_000
"""Cycles that a device is kept busy for, some 50 ms."""


class Wrong(Exception):
    """What was measured is not as it has to be; `found` is what there is of it."""

    def __init__(self, why: str, found: object = None) -> None:
        super().__init__(why)
        self.found = found


@contextmanager
def told() -> Iterator[list[str]]:
    """Collect what the package warns of meanwhile."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kvtcd")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def loaded(device: torch.device) -> nvcomp.Nvcomp:
    """Return nvCOMP once it has shown that it works, or raise `Wrong` with the reason why it is not used."""
    with told() as said:
        found = nvcomp.load(device, Residency())
    if found is None:
        raise Wrong("; ".join(said))
    return found


def codes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return rounded normal noise, two codes of four bits in a byte: what `kvtc2` gives the entropy stage."""
    draw = torch.Generator(device).manual_seed(0)
    low, high = (
        torch.randn((2, nbytes), generator=draw, device=device).mul_(1.5).round_().clamp_(-8, 7).add_(8)
    )
    return low.to(torch.uint8) | (high.to(torch.uint8) << 4)


class Batch:
    """Chunks of one size, and a codec for them on the current stream.

    Args:
        api: the module `nvidia.nvcomp`.
        algorithm, kind: its name, and its ``algorithm_type``.
        raw: bytes of all chunks, a multiple of 16 each but for the last.
        size: of a chunk.
    """

    def __init__(self, api: Any, algorithm: str, kind: int | None, raw: torch.Tensor, size: int) -> None:
        self._api, self.raw = api, raw
        self.stream = torch.cuda.current_stream(raw.device).cuda_stream
        self._codec = api.Codec(
            algorithm=algorithm, bitstream_kind=api.BitstreamKind.RAW, device_id=raw.device.index or 0,
            cuda_stream=self.stream, **({} if kind is None else {"algorithm_type": kind}),
        )  # fmt: skip
        self.offsets = list(range(0, raw.numel(), size))
        self.sizes = [min(size, raw.numel() - at) for at in self.offsets]
        chunk = api.as_array(torch.empty(size, dtype=torch.uint8, device=raw.device), self.stream)
        self.room = -(-self._codec.get_max_comp_buffer_size(chunk) // _ALIGN) * _ALIGN
        self._encoding = self._codec.compression_config(self.sizes)
        self._decoding = self._codec.decompression_config(self._encoding)
        self.rooms = [self.room * number for number in range(len(self.sizes))]
        self.packed = torch.empty(self.room * len(self.sizes), dtype=torch.uint8, device=raw.device)
        self.lengths: list[int] = []

    def encode(self, into: Any = None) -> None:
        """Compress all chunks, each to its own room; waits until their lengths are known."""
        target = self._carved(
            self.packed if into is None else into, self.rooms, [self.room] * len(self.rooms)
        )
        source = self._carved(self.raw, self.offsets, self.sizes)
        written = self._codec.encode(source, out=target, compression_config=self._encoding)
        self.lengths = list(written.buffer_sizes)

    def decode(self, out: torch.Tensor, packed: Any = None) -> None:
        """Launch the decompression of what was encoded last."""
        source = self._carved(self.packed if packed is None else packed, self.rooms, self.lengths)
        self._codec.decode(
            source, out=self._carved(out, self.offsets, self.sizes), decompression_config=self._decoding
        )

    def _carved(self, buffer: Any, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
        return self._api.as_arrays(buffer, list(offsets), list(sizes), self.stream)


def done(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def exchanged(api: Any, device: torch.device) -> list[dict[str, object]]:
    """Exchange chunks of many sizes with zlib, both ways, and say what came back."""
    rows: list[dict[str, object]] = []
    for (kind, size), noise in itertools.product(itertools.product((0, 1), SIZES), (False, True)):
        raw = codes(size, device)
        if noise:
            raw = torch.randint(0, 256, (size,), dtype=torch.uint8).to(device)
        batch = Batch(api, "Deflate", kind, raw, size)
        batch.encode()
        done(device)
        plain = raw.cpu().numpy().tobytes()
        read = _inflated(batch.packed[: batch.lengths[0]].cpu().numpy().tobytes())
        ours = _deflated(plain)
        out = torch.zeros(size, dtype=torch.uint8, device=device)
        fed = torch.zeros(max(batch.room, len(ours)), dtype=torch.uint8, device=device)
        fed[: len(ours)] = torch.frombuffer(bytearray(ours), dtype=torch.uint8).to(device)
        batch.lengths = [len(ours)]
        batch.decode(out, fed)
        done(device)
        reads = out.cpu().numpy().tobytes() == plain
        rows.append(
            {"type": kind, "bytes": size, "noise": noise, "zlib_reads": read == plain, "reads_zlib": reads}
        )
    return rows


def speeds(
    api: Any,
    device: torch.device,
    until: float,
    chunks: Sequence[int] = CHUNKS,
    batches: Sequence[int] = BATCHES,
) -> list[dict[str, object]]:
    """Time both ways by algorithm, size of chunks and their number, until a moment (`time.monotonic`)."""
    rows: list[dict[str, object]] = []
    for (algorithm, kind), size, count in itertools.product(ALGORITHMS, chunks, batches):
        if size * count > MOST or time.monotonic() > until:
            continue
        row: dict[str, object] = {"algorithm": algorithm, "type": kind, "chunk": size, "chunks": count}
        try:
            rows.append(row | _speed(api, device, algorithm, kind, size, count))
        except (RuntimeError, ValueError) as error:
            rows.append(row | {"failed": str(error)})
    return rows


def _speed(
    api: Any, device: torch.device, algorithm: str, kind: int | None, size: int, count: int
) -> dict[str, object]:
    raw = codes(size * count, device)
    batch, out = Batch(api, algorithm, kind, raw, size), torch.zeros_like(raw)
    encode = min(timed(batch.encode, device)[1] for _ in range(_REPEATS))
    runs = [timed(lambda: batch.decode(out), device) for _ in range(_REPEATS)]
    if not torch.equal(out, raw):
        raise RuntimeError("what it decodes is not what it encoded")
    return {
        "ratio": raw.numel() / sum(batch.lengths),
        "encode_gb_s": raw.numel() / 1e9 / encode,
        "decode_gb_s": raw.numel() / 1e9 / min(whole for _, whole in runs),
        "decode_launch_ms": 1e3 * min(launch for launch, _ in runs),
        "decode_ms": 1e3 * min(whole for _, whole in runs),
    }


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return seconds until a call has returned, and until the device has done what it launched."""
    done(device)
    begin = time.perf_counter()
    call()
    launched = time.perf_counter()
    done(device)
    return launched - begin, time.perf_counter() - begin


def manners(api: Any, device: torch.device, count: int = 10_000) -> dict[str, object]:
    """Say what nvCOMP does to the host: tables, waits, Python's lock, pinned memory, lists for batches."""
    size = 1024
    raw = codes(size * count, device)
    batch, out = Batch(api, "Deflate", 0, raw, size), torch.zeros_like(raw)
    batch.encode()
    launch, whole = min(timed(lambda: batch.decode(out), device) for _ in range(_REPEATS))
    table, _ = timed(lambda: api.as_arrays(raw, batch.offsets, batch.sizes, batch.stream), device)
    found: dict[str, object] = {
        "chunks": count,
        "as_arrays_ms": 1e3 * table,
        "decode_launch_ms": 1e3 * launch,
        "decode_ms": 1e3 * whole,
    }
    for name, call in (("decode", lambda: batch.decode(out)), ("encode", batch.encode)):
        launch, whole = behind(call, device)
        found |= {f"{name}_returns_ms_behind_work": 1e3 * launch, f"that_work_and_{name}_ms": 1e3 * whole}
        found[f"others_run_during_{name}"] = kept(call, device)
    return found | {
        "pinned": _answer(lambda: _pinned(batch, device)),
        "list": _answer(lambda: _listed(batch, device)),
    }


def behind(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return what `timed` does, of a call while the device is busy for some 50 ms with something else."""
    done(device)
    if device.type == "cuda":
        torch.cuda._sleep(_BUSY)
    begin = time.perf_counter()
    call()
    launched = time.perf_counter()
    done(device)
    return launched - begin, time.perf_counter() - begin


def kept(call: Callable[[], object], device: torch.device) -> float:
    """Return the share of its speed that another thread keeps while this one is in a call.

    0 where the call keeps Python's lock, near 1 where it lets go of it. What the device does meanwhile is
    waited for outside of the count, since that wait lets go by itself; and nobody is made to let go but by a
    call, or a thread would run at the end of one that has kept the lock.
    """
    stop, counts = threading.Event(), [0]

    def spin() -> None:
        while not stop.is_set():
            counts[0] += 1
            time.sleep(0)

    def rate(busy: Callable[[], object]) -> float:
        inside = seen = 0.0
        end = time.perf_counter() + _SPIN_S
        while not inside or time.perf_counter() < end:
            before, begin = counts[0], time.perf_counter()
            busy()
            inside, seen = inside + time.perf_counter() - begin, seen + counts[0] - before
            done(device)
        return seen / inside

    spinner, interval = threading.Thread(target=spin), sys.getswitchinterval()
    sys.setswitchinterval(_NEVER_S)
    spinner.start()
    try:
        return rate(call) / rate(lambda: time.sleep(_SPIN_S / 10))
    finally:
        stop.set()
        spinner.join()
        sys.setswitchinterval(interval)


class OnDevice:
    """Pinned memory as nvCOMP may take it: by its address, as if it lay on the device."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host  # which must stay
        self.__cuda_array_interface__ = {
            "data": (host.data_ptr(), False), "shape": (host.numel(),), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def _pinned(batch: Batch, device: torch.device) -> str:
    """Encode straight into pinned memory of the host, and decode from there."""
    host = torch.zeros(batch.packed.numel(), dtype=torch.uint8, pin_memory=device.type == "cuda")
    out = torch.zeros_like(batch.raw)
    batch.encode(OnDevice(host))
    batch.decode(out, OnDevice(host))
    done(device)
    if not host.any():
        return "gives a copy of it"
    return "encodes into it and decodes from it" if torch.equal(out, batch.raw) else "gives wrong bytes"


def _listed(batch: Batch, device: torch.device) -> str:
    """Encode and decode a list of arrays in the place of a batch."""
    api, codec = batch._api, batch._codec
    raw = [batch.raw[at : at + size] for at, size in zip(batch.offsets[:2], batch.sizes[:2], strict=True)]
    packed = codec.encode([api.as_array(each, batch.stream) for each in raw])
    plain = codec.decode(list(packed))
    done(device)
    back = [torch.as_tensor(each, device=device).flatten().view(torch.uint8) for each in plain]
    return "is taken" if all(map(torch.equal, back, raw)) else "gives wrong bytes"


def _answer(call: Callable[[], object]) -> str:
    try:
        return str(call())
    except Exception as error:  # noqa: BLE001 - whatever it says is the answer
        return f"refused: {type(error).__name__}: {error}"


def _deflated(data: bytes) -> bytes:
    writer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return writer.compress(data) + writer.flush()


def _inflated(data: bytes) -> bytes | None:
    try:
        return zlib.decompress(data, -15)
    except zlib.error:
        return None
