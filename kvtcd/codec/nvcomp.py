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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor

from kvtcd.codec.batches import blank, last_words, tables, untouched
from kvtcd.codec.residency import Residency
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.sections import Part, Plain, deflated, inflated
from kvtcd.core.blob import CHUNK_BYTES, Blob, Chunk, CodecId, Header, Kind, Run, aligned, assemble, parse
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
        self.last_words = lru_cache(maxsize=_SHAPES)(lambda *chunks: last_words(*chunks).to(device))
        chunk = api.as_array(torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device), stream)
        self.room = aligned(self.codec.get_max_comp_buffer_size(chunk))

    def _configure(self, sizes: tuple[int, ...]) -> tuple[Any, Any]:
        """Return how to encode, and how to decode, chunks of these raw sizes; waits for nothing."""
        encoding = self.codec.compression_config(list(sizes))
        return encoding, self.codec.decompression_config(encoding)


@dataclass(frozen=True, slots=True)
class Inflating:
    """Sections that a stream has been told to inflate.

    Attributes:
        sections: as they will be.
        done: comes behind the stream's work on them.
        unwritten: whether any chunk was left as it was, once that has come; a tensor without dimensions.
        sizes: of chunks, in bytes.
        read, written: nvCOMP's batches, there until then; None where there was nothing for it to do.
    """

    sections: list[Plain]
    done: torch.cuda.Event
    unwritten: Tensor
    sizes: list[int]
    read: Any = None
    written: Any = None

    def proved(self) -> list[Plain]:
        """Wait for the sections.

        Raises:
            RuntimeError: by its own word, or by the bytes, nvCOMP has not written each chunk in full.
        """
        self.done.synchronize()
        said = self.sizes if self.written is None else self.written.buffer_sizes
        if said != self.sizes or self.unwritten:
            raise RuntimeError(f"nvCOMP has not inflated all of {len(self.sizes)} chunks")
        return self.sections


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

    def inflate(self, blob: Blob) -> Inflating:
        """Launch the decompression of every section; what comes of it is that of `sections.inflated`.

        No status is told of a chunk but by what makes the host wait. So the room for them is filled with a
        pattern before, and looked at behind: whoever waits knows, and never sees what another block left.

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
        packed = torch.empty(body.numel() + _SLACK, dtype=torch.uint8, device=self._device)
        raw = self._room(found.nbytes)
        packed[: body.numel()].copy_(body, non_blocking=True)
        unwritten, batches = torch.zeros((), dtype=torch.bool), tuple[Any, ...]()
        if found.coded.raw:
            number, own = self._current()
            _, decoding = own.configurations(tuple(found.coded.raw_sizes))
            read = self._api.as_arrays(packed, found.coded.packed, found.coded.packed_sizes, number)
            out = self._api.as_arrays(raw, found.coded.raw, found.coded.raw_sizes, number)
            batches = (read, own.codec.decode(read, out=out, decompression_config=decoding))
            words = own.last_words(tuple(found.coded.raw), tuple(found.coded.raw_sizes))
            unwritten = untouched(raw, words).any().to("cpu", non_blocking=True)
        for source, target, nbytes in found.stored:
            raw[target : target + nbytes] = packed[source : source + nbytes]
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch says no types
        done.record(torch.cuda.current_stream(self._device))
        sections = [
            Plain(
                Part(section.kind, section.stream, section.part), section.token_start, section.token_count,
                raw[start : start + section.raw_bytes],
            )
            for section, start in zip(blob.sections, found.sections, strict=True)
        ]  # fmt: skip
        return Inflating(sections, done, unwritten, found.coded.raw_sizes, *batches)

    def deflated(self, header: Header, sections: Sequence[Plain]) -> bytearray:
        """Compress sections in host memory into a blob; the same as `sections.deflated`.

        The host waits: how long the chunks have become decides where they go.

        Raises:
            RuntimeError: nvCOMP has not written each chunk in full.
        """
        stream, own = self._current()
        ends = list(accumulate(aligned(section.data.numel()) for section in sections))
        starts, at, sizes, may = [0, *ends[:-1]], list[int](), list[int](), list[bool]()
        raw = torch.empty(ends[-1] + _SLACK, dtype=torch.uint8, device=self._device)
        for section, start in zip(sections, starts, strict=True):
            nbytes = section.data.numel()
            raw[start : start + nbytes].copy_(section.data, non_blocking=True)
            at += range(start, start + nbytes, CHUNK_BYTES)
            sizes += [min(CHUNK_BYTES, nbytes - begin) for begin in range(0, nbytes, CHUNK_BYTES)]
            may += [section.part.kind is not Kind.ARRAY] * (len(sizes) - len(may))
        packed = self._room(len(sizes) * own.room)
        encoding, _ = own.configurations(tuple(sizes))
        rooms = [own.room * chunk for chunk in range(len(sizes))]
        read = self._api.as_arrays(raw, at, sizes, stream)
        out = self._api.as_arrays(packed, rooms, [own.room] * len(sizes), stream)
        written = own.codec.encode(read, out=out, compression_config=encoding).buffer_sizes
        shorter = [each for each, size in enumerate(sizes) if may[each] and written[each] < size]
        lengths = [written[each] for each in shorter]
        # Of chunks that have shrunk the beginnings, as long as the longest: in one copy, with gaps.
        longest = aligned(max(lengths, default=0))
        by_chunk = packed[: rooms[-1] + own.room].view(-1, own.room)[:, :longest]
        body = by_chunk.index_select(0, torch.tensor(shorter, dtype=torch.int64).to(self._device)).cpu()
        last = last_words([longest * row for row in range(len(lengths))], lengths)
        if min(lengths, default=1) < 1 or untouched(body.flatten(), last).any():
            raise RuntimeError(f"nvCOMP has not deflated all of {len(sizes)} chunks")
        deflated = dict(zip(shorter, zip(body.numpy(), lengths, strict=True), strict=True))
        runs, numbers = [], count()
        for section in sections:
            data, chunks = section.data.numpy().data, []
            for begin in range(0, len(data), CHUNK_BYTES):
                row, nbytes = deflated.get(next(numbers), (None, 0))
                piece = data[begin : begin + CHUNK_BYTES] if row is None else row.data[:nbytes]
                chunks.append(Chunk(piece, stored=row is None))
            runs.append(Run(*section.part, section.start, section.count, len(data), chunks))
        return assemble(header, runs)

    def _room(self, nbytes: int) -> Tensor:
        return blank(nbytes + _SLACK, self._device)

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
    read = nvcomp.inflate(parse(memoryview(deflated(header, plain)))).proved()
    written = inflated(parse(memoryview(nvcomp.deflated(header, plain))), HeapScratch())
    for who, sections in (("it reads", read), ("it writes", written)):
        if not torch.equal(torch.cat([section.data.cpu() for section in sections]), data):
            raise RuntimeError(f"what {who} is wrong")
