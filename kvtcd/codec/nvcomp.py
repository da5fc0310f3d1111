"""The entropy stage on a GPU: the same chunks of raw DEFLATE, by nvCOMP. Nothing else knows its API.

Written against nvCOMP 6, whose batches are one buffer carved by a table of offsets; earlier releases take
lists. A codec lives on one stream and belongs to the thread that launches there. Raw sizes are known from the
blob's own tables, so configurations come from sizes alone and decoding never makes the host wait.

nvCOMP's behaviour on a damaged stream is undefined, to the point of taking the device down for the whole
process. So it is given only what was compared with its checksum here, and records that bear this daemon's own
MAC (`core.record`); never compressed bytes that a client has sent.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtcd.codec.residency import Residency
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.sections import Part, Plain, deflated, inflated
from kvtcd.core.blob import (
    ALIGN,
    CHUNK_BYTES,
    Blob,
    Chunk,
    CodecId,
    Header,
    Kind,
    Run,
    Section,
    assemble,
    parse,
)
from kvtcd.core.layout import Dtype

CROSSOVER = 256
"""Chunks from which a GPU is asked. It reads all chunks of a batch at once and each of them slowly, about one
after the other within a chunk: a few take as long as hundreds, while a CPU core reads 0.5 GB/s whatever their
number. 256 of them are 4 MiB, 8 ms of a core. A guess from figures of others, measured on no GPU yet
(`tests/gpu_check.sh` measures it)."""
_MAJOR = "6."
_SLACK = 64 << 10
"""Room behind the last chunk: nvCOMP 3 was seen to read beyond short inputs, up to its own chunk size."""
_SHAPES = 64
"""Configurations kept for each stream; one for each size of block and codec in use."""
_DEVICES: dict[int, torch.device] = {}
"""By the handle of a stream: nvCOMP asks one allocator for the memory of all devices."""
_log = logging.getLogger(__name__)


def worthwhile(chunks: int) -> bool:
    """Tell whether a GPU is to work on so many chunks, rather than a CPU thread; see `CROSSOVER`."""
    return chunks >= CROSSOVER


class Chunks(NamedTuple):
    """Where chunks lie: packed in one buffer, raw in another. Bytes, one entry a chunk."""

    packed: list[int]
    packed_sizes: list[int]
    raw: list[int]
    raw_sizes: list[int]


class Tables(NamedTuple):
    """Where everything of a blob lies on the device.

    Attributes:
        coded: chunks to inflate.
        stored: chunks to copy.
        sections: offset of each section's raw bytes.
        nbytes: of all raw bytes, with gaps.
    """

    coded: Chunks
    stored: Chunks
    sections: list[int]
    nbytes: int


def tables(sections: Iterable[Section], base: int) -> Tables:
    """Lay out the raw bytes of a blob's sections.

    Args:
        sections: in the order of the blob.
        base: what offsets of packed bytes count from, a multiple of `ALIGN` in the blob.
    """
    coded, stored, starts, end = Chunks([], [], [], []), Chunks([], [], [], []), [], 0
    for section in sections:
        starts.append(end)
        at = section.offset - base
        for number, (nbytes, as_is) in enumerate(section.chunks):
            begin = number * CHUNK_BYTES
            entry = (at, nbytes, end + begin, min(CHUNK_BYTES, section.raw_bytes - begin))
            for column, value in zip(stored if as_is else coded, entry, strict=True):
                column.append(value)
            at += _aligned(nbytes)
        end += _aligned(section.raw_bytes)
    return Tables(coded, stored, starts, end)


class _Memory:
    """Device memory for nvCOMP from torch's own pool, so that one of them reuses it, and in the budget."""

    def __init__(self, ptr: int, give_back: Callable[[], None]) -> None:
        self.ptr, self._give_back = ptr, give_back

    @classmethod
    def allocate(cls, nbytes: int, stream: Any, *, residency: Residency) -> _Memory:  # noqa: ANN401 - of nvCOMP
        """Take memory for use on a stream; it goes back with the object."""
        device = _DEVICES.get(stream.ptr) or torch.device("cuda", torch.cuda.current_device())
        residency.take(device, nbytes)
        give_back = partial(residency.give_back, device, nbytes)
        try:
            return cls(torch.cuda.caching_allocator_alloc(nbytes, device, stream.ptr), give_back)
        except BaseException:
            give_back()
            raise

    def __del__(self) -> None:
        torch.cuda.caching_allocator_delete(self.ptr)  # type: ignore[no-untyped-call]  # torch says no types
        self._give_back()


class _OnStream:
    """A codec on one stream."""

    def __init__(self, api: Any, device: torch.device, stream: int) -> None:  # noqa: ANN401 - it has no types
        self.codec = api.Codec(
            algorithm="Deflate",
            algorithm_type=0,  # Huffman codes alone, as on the CPU
            bitstream_kind=api.BitstreamKind.RAW,
            device_id=device.index or 0,
            cuda_stream=stream,
        )
        self.configurations = lru_cache(maxsize=_SHAPES)(self._configure)
        chunk = api.as_array(torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device), stream)
        self.room = _aligned(self.codec.get_max_comp_buffer_size(chunk))

    def _configure(self, sizes: tuple[int, ...]) -> tuple[Any, Any]:
        """Return how to encode, and how to decode, chunks of these raw sizes; waits for nothing."""
        encoding = self.codec.compression_config(list(sizes))
        return encoding, self.codec.decompression_config(encoding)


class Nvcomp:
    """Reads and writes the chunks of whole blobs. Its methods are called within the stream they run on.

    Args:
        api: the module `nvidia.nvcomp`.
        device: where.
        residency: what its scratch counts against.
    """

    def __init__(self, api: Any, device: torch.device, residency: Residency) -> None:  # noqa: ANN401 - it has no types
        self._api, self._device = api, device
        self._streams: dict[int, _OnStream] = {}  # each used by one thread alone
        # The library keeps it in a static that outlives Python, and to give it up there ends the process.
        atexit.register(api.set_device_allocator)
        api.set_device_allocator(partial(_Memory.allocate, residency=residency))

    def inflated(self, blob: Blob) -> list[Plain]:
        """Launch the decompression of every section; the same as `sections.inflated`, on the device.

        Args:
            blob: checked by its decoder, in writable memory that stays until the stream has come so far.

        Raises:
            BadChecksum: a section is damaged; nothing was launched.
        """
        for section in blob.sections:
            blob.payload(section)
        base = blob.sections[0].offset
        found = tables(blob.sections, base)
        body = torch.frombuffer(blob.data[base:], dtype=torch.uint8)
        packed, raw = self._room(body.numel()), self._room(found.nbytes)
        packed[: body.numel()].copy_(body, non_blocking=True)
        if found.coded.raw:
            number, own = self._current()
            _, decoding = own.configurations(tuple(found.coded.raw_sizes))
            own.codec.decode(
                self._api.as_arrays(packed, found.coded.packed, found.coded.packed_sizes, number),
                out=self._api.as_arrays(raw, found.coded.raw, found.coded.raw_sizes, number),
                decompression_config=decoding,
            )
        for source, nbytes, target, _ in zip(*found.stored, strict=True):
            raw[target : target + nbytes] = packed[source : source + nbytes]
        return [
            Plain(
                Part(section.kind, section.stream, section.part), section.token_start, section.token_count,
                raw[start : start + section.raw_bytes],
            )
            for section, start in zip(blob.sections, found.sections, strict=True)
        ]  # fmt: skip

    def deflated(self, header: Header, sections: Sequence[Plain]) -> bytearray:
        """Compress sections in host memory into a blob; the same as `sections.deflated`.

        The host waits: how long the chunks have become decides where they go.
        """
        number, own = self._current()
        ends = list(accumulate(_aligned(section.data.numel()) for section in sections))
        starts, at, sizes = [0, *ends[:-1]], list[int](), list[int]()
        raw = self._room(ends[-1])
        for section, start in zip(sections, starts, strict=True):
            nbytes = section.data.numel()
            raw[start : start + nbytes].copy_(section.data, non_blocking=True)
            at += range(start, start + nbytes, CHUNK_BYTES)
            sizes += [min(CHUNK_BYTES, nbytes - begin) for begin in range(0, nbytes, CHUNK_BYTES)]
        packed = self._room(len(sizes) * own.room)
        encoding, _ = own.configurations(tuple(sizes))
        rooms = [own.room * chunk for chunk in range(len(sizes))]
        written = own.codec.encode(
            self._api.as_arrays(raw, at, sizes, number),
            out=self._api.as_arrays(packed, rooms, [own.room] * len(sizes), number),
            compression_config=encoding,
        )
        lengths = iter(zip(rooms, written.buffer_sizes, strict=True))
        # Whole, with the gaps: one copy of a little more than the raw bytes is cheaper than gathering.
        body = packed.cpu().numpy().data
        runs = []
        for section in sections:
            data, chunks = section.data.numpy().data, []
            for begin in range(0, len(data), CHUNK_BYTES):
                piece, (start, nbytes) = data[begin : begin + CHUNK_BYTES], next(lengths)
                stored = section.part.kind is Kind.ARRAY or nbytes >= len(piece)
                chunks.append(Chunk(piece if stored else body[start : start + nbytes], stored=stored))
            runs.append(Run(*section.part, section.start, section.count, len(data), chunks))
        return assemble(header, runs)

    def _room(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes + _SLACK, dtype=torch.uint8, device=self._device)

    def _current(self) -> tuple[int, _OnStream]:
        """Return the handle of the current stream, and the codec there."""
        number = torch.cuda.current_stream(self._device).cuda_stream
        if number not in self._streams:
            _DEVICES[number] = self._device
            self._streams[number] = _OnStream(self._api, self._device, number)
        return number, self._streams[number]


def load(device: torch.device, residency: Residency) -> Nvcomp | None:
    """Return nvCOMP on a device; None, with a warning that says why, where a CPU has to do its work.

    That it can be imported says nothing, so it has to write what the CPU reads and read what the CPU writes.
    """
    try:
        from nvidia import nvcomp as api  # noqa: PLC0415 - there only with an extra, and not without a GPU
    except ImportError:
        why = "it is not installed; `pip install kvtcd[cu13]`, or [cu12] for CUDA 12"
    else:
        if api.__version__.startswith(_MAJOR):
            try:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch says no types
                with torch.cuda.stream(stream):
                    _round_trip(Nvcomp(api, device, residency))
            except Exception as error:  # noqa: BLE001 - whatever it is, the CPU does the work
                why = f"its round trip failed: {error!r}"
            else:
                return Nvcomp(
                    api, device, residency
                )  # a new one: the first has a codec that belongs to this thread
        else:
            why = f"its version is {api.__version__}, and {_MAJOR}x is needed"
    _log.warning("DEFLATE stays on the CPU, nvCOMP cannot be used: %s", why)
    return None


def _round_trip(nvcomp: Nvcomp) -> None:
    """Raise unless the CPU reads what it writes, and the other way round: coded, stored and short chunks."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (CHUNK_BYTES,), generator=draw, dtype=torch.uint8)
    data = torch.cat((torch.arange(2 * CHUNK_BYTES) % 7, noise, torch.zeros(100))).to(torch.uint8)
    header = Header(CodecId.LOSSLESS, 1, Dtype.BF16, bytes(32), 1, data.numel())
    plain = [
        Plain(Part(Kind.PLANE, 0, plane), 0, 1, part) for plane, part in enumerate(torch.split(data, 40_001))
    ]
    read = nvcomp.inflated(parse(memoryview(deflated(header, plain))))
    written = inflated(parse(memoryview(nvcomp.deflated(header, plain))), HeapScratch())
    for who, sections in (("it reads", read), ("it writes", written)):
        if not torch.equal(torch.cat([section.data.cpu() for section in sections]), data):
            raise RuntimeError(f"what {who} is wrong")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
