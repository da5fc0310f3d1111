"""The adapter to nvCOMP: tables, sizes and alignment on a strict stand-in; interchange on a real device."""

from __future__ import annotations

import logging
import sys
import threading
import types
import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import fake_cuda, fake_nvcomp
from support.patience import PATIENCE_S

from kvtcd.codec import nvcomp
from kvtcd.codec.batches import Copy, blank, last_words, tables, untouched
from kvtcd.codec.residency import Residency
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.sections import Part, Plain, deflated, inflated
from kvtcd.core.blob import ALIGN, CHUNK_BYTES, CodecId, Header, Kind, parse
from kvtcd.core.errors import BadChecksum
from kvtcd.core.layout import Dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
KINDS = ["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [1, 15, 16, 17, 100, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5]


def sections(sizes: list[int], symbols: int = 5, seed: int = 0) -> list[Plain]:
    """Sections of random bytes below `symbols`; 256 of them do not shrink."""
    draw = np.random.default_rng(seed)
    return [
        Plain(Part(Kind.PLANE, number, 0), 0, 1, torch.from_numpy(draw.integers(0, symbols, size, np.uint8)))
        for number, size in enumerate(sizes)
    ]


def header(plain: list[Plain]) -> Header:
    return Header(
        CodecId.LOSSLESS, 1, Dtype.BF16, bytes(32), 1, max(1, sum(part.data.numel() for part in plain))
    )


def assert_same(got: list[Plain], want: list[Plain]) -> None:
    assert [(s.part, s.start, s.count) for s in got] == [(s.part, s.start, s.count) for s in want]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.data.cpu(), other.data)


@pytest.fixture
def loaded(kind, monkeypatch) -> Iterator[nvcomp.Nvcomp]:
    """NvCOMP, within a stream."""
    if kind == "stand-in":
        fake_cuda.install(monkeypatch)
        fake_nvcomp.install(monkeypatch)
    device = CPU if kind == "stand-in" else torch.device("cuda", 0)
    found = nvcomp.load(device, Residency())
    if found is None and kind == "cuda":
        pytest.skip("nvCOMP is not here")
    assert found is not None
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("symbols", [1, 5, 256])
def test_it_reads_what_the_cpu_writes(loaded, symbols) -> None:
    plain = sections(SIZES, symbols)
    blob = parse(memoryview(deflated(header(plain), plain)))

    assert any(stored for s in blob.sections for _, stored in s.chunks), "some chunks are as they are"
    assert_same(loaded.inflate(blob).proved(), plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("symbols", [1, 5, 256])
def test_the_cpu_and_zlib_read_what_it_writes(loaded, symbols) -> None:
    plain = sections(SIZES, symbols)
    blob = parse(memoryview(loaded.deflated(header(plain), plain)))

    assert_same(inflated(blob, HeapScratch()), plain)
    for section, part in zip(blob.sections, plain, strict=True):
        payload, start = blob.payload(section), 0
        for number, (nbytes, stored) in enumerate(section.chunks):
            piece = bytes(payload[start : start + nbytes])
            want = bytes(part.data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES].numpy())
            assert (piece if stored else zlib.decompress(piece, -15)) == want
            start += -(-nbytes // ALIGN) * ALIGN


@pytest.mark.parametrize("kind", KINDS)
def test_it_takes_no_damaged_section(loaded) -> None:
    plain = sections([5000, 3 * CHUNK_BYTES])
    data = deflated(header(plain), plain)
    blob = parse(memoryview(data))
    data[blob.sections[1].offset + 40] ^= 1

    with pytest.raises(BadChecksum):
        loaded.inflate(blob)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_without_matches_are_as_short_as_on_the_cpu(loaded) -> None:
    plain = sections([64 * CHUNK_BYTES])

    assert len(loaded.deflated(header(plain), plain)) <= 1.05 * len(deflated(header(plain), plain))


@given(
    sizes=st.lists(st.integers(1, 3 * CHUNK_BYTES), min_size=1, max_size=6),
    symbols=st.sampled_from([2, 256]),
    seed=st.integers(0, 9),
)
def test_the_tables_cover_every_byte_once(sizes, symbols, seed) -> None:
    plain = sections(sizes, symbols, seed)
    blob = parse(memoryview(deflated(header(plain), plain)))
    base = blob.sections[0].offset
    found = tables(blob.sections, base)

    raw, times = np.zeros(found.nbytes + ALIGN, np.uint8), np.zeros(found.nbytes + ALIGN, np.uint8)
    for at, nbytes, target, size in zip(*found.coded, strict=True):
        assert not at % ALIGN
        assert not target % ALIGN
        whole = zlib.decompress(bytes(blob.data[base + at : base + at + nbytes]), -15)
        assert len(whole) == size
        raw[target : target + size] = np.frombuffer(whole, np.uint8)
        times[target : target + size] += 1
    for at, target, nbytes in found.stored:
        raw[target : target + nbytes] = blob.data[base + at : base + at + nbytes]
        times[target : target + nbytes] += 1
    assert times.max() == 1
    for start, part in zip(found.sections, plain, strict=True):
        assert times[start : start + part.data.numel()].all()
    for start, part in zip(found.sections, plain, strict=True):
        assert np.array_equal(raw[start : start + part.data.numel()], part.data.numpy())


def test_neighbours_that_are_stored_are_one_copy() -> None:
    plain = [*sections([5 * CHUNK_BYTES + 3], 256), *sections([40_000, 100], 3), *sections([7, 9], 256)]
    blob = parse(memoryview(deflated(header(plain), plain)))
    base = blob.sections[0].offset
    packed = [section.offset - base for section in blob.sections]
    raw = tables(blob.sections, base).sections

    assert tables(blob.sections, base).stored == [
        Copy(0, 0, 5 * CHUNK_BYTES + 3),
        Copy(packed[3], raw[3], ALIGN + 9),
    ]


@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=8),
    written=st.lists(st.integers(0, 70), min_size=8, max_size=8),
)
def test_what_was_not_written_to_its_end_is_known(sizes, written) -> None:
    """Brute force: a chunk is untouched whose last nine bytes, or more, are as they were."""
    starts = [80 * number for number in range(len(sizes))]
    room = blank(80 * len(sizes), CPU)
    before = room.clone()
    for start, size, some in zip(starts, sizes, written, strict=False):
        room[start : start + min(some, size)] = 0
    told = untouched(room, last_words(starts, sizes)).tolist()
    large = [number for number, size in enumerate(sizes) if size > 8]

    assert len(told) == len(large)
    for untold, number in zip(told, large, strict=True):
        some, size = min(written[number], sizes[number]), sizes[number]
        assert untold or size - some < 16
        assert not untold or some < size
    assert torch.equal(blank(80 * len(sizes), CPU), before)


def test_a_stream_has_one_codec_and_a_shape_one_configuration(monkeypatch) -> None:
    fake_cuda.install(monkeypatch)
    fake = fake_nvcomp.install(monkeypatch)
    loaded, plain = nvcomp.load(CPU, Residency()), sections([40_000])
    blob = parse(memoryview(deflated(header(plain), plain)))
    probes = len(fake.codecs)
    assert loaded is not None

    def on_a_stream() -> None:
        with torch.cuda.stream(torch.cuda.Stream(CPU)):
            for _ in range(3):
                assert_same(loaded.inflate(blob).proved(), plain)

    threads = [threading.Thread(target=on_a_stream) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    first, second = fake.codecs[probes:]
    assert first.algorithm == second.algorithm == ("Deflate", 0), "Huffman codes alone, as on the CPU"
    assert first.stream != second.stream
    assert 0 not in {first.stream, second.stream}, "the streams that were entered, of that device"
    assert [(codec.decodes, codec.configured) for codec in (first, second)] == [(3, 1), (3, 1)]
    assert min(codec.slack for codec in fake.codecs) >= 64 << 10, "behind inputs of either way"


def test_a_codec_is_one_of_its_own_device(monkeypatch) -> None:
    fake = fake_nvcomp.install(monkeypatch)
    nvcomp._OnStream(sys.modules["nvidia.nvcomp"], torch.device("meta", 3), 7)

    assert [(codec.device_id, codec.stream) for codec in fake.codecs] == [(3, 7)]


@pytest.mark.parametrize("kind", ["stand-in"])
@pytest.mark.parametrize("flaw", ["writes nothing", "stops halfway", "says less"])
def test_what_was_not_done_is_noticed_and_what_lay_there_before_never_seen(loaded, monkeypatch, flaw) -> None:
    monkeypatch.setattr(torch, "empty", lambda n, **kw: torch.full((n,), 0xEE, **kw))
    plain = sections([3 * CHUNK_BYTES, CHUNK_BYTES + 100], 5)
    blob = parse(memoryview(deflated(header(plain), plain)))
    monkeypatch.setattr(fake_nvcomp.Codec, "flaw", flaw)
    inflating = loaded.inflate(blob)

    with pytest.raises(RuntimeError, match="has not inflated all of 5 chunks"):
        inflating.proved()
    assert not any((section.data == 0xEE).any() for section in inflating.sections)
    with pytest.raises(RuntimeError, match="has not deflated all of 5 chunks"):
        loaded.deflated(header(plain), plain)


@pytest.mark.parametrize("kind", ["stand-in"])
def test_whoever_asks_for_sections_waits_for_the_device(loaded) -> None:
    plain, gate, log = sections([40_000]), threading.Event(), []
    blob = parse(memoryview(deflated(header(plain), plain)))
    fake_cuda.launch(lambda: (gate.wait(PATIENCE_S), log.append("device")))
    inflating = loaded.inflate(blob)
    asking = threading.Thread(target=lambda: (inflating.proved(), log.append("told")))
    asking.start()
    assert inflating.done.awaited.wait(PATIENCE_S)
    gate.set()
    asking.join(PATIENCE_S)

    assert log == ["device", "told"]


def test_its_scratch_memory_comes_from_the_pool_of_torch(monkeypatch) -> None:
    given, back = [], []
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda *call: given.append(call) or 4096)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", back.append)
    fake_cuda.install(monkeypatch)
    fake = fake_nvcomp.install(monkeypatch)
    residency, other = Residency(), torch.device("meta")
    nvcomp.load(CPU, residency)
    monkeypatch.setattr(nvcomp, "_DEVICES", {77: CPU, 78: other})
    memory = fake.allocators[-1](123, types.SimpleNamespace(ptr=77))
    held = memory.ptr, list(back), residency.used(CPU)
    there = fake.allocators[-1](9, types.SimpleNamespace(ptr=78))
    assert (residency.used(CPU), residency.used(other)) == (123, 9), "one allocator for all devices"
    del memory, there

    assert held == (4096, [], 123)
    assert (given, back) == ([(123, CPU, 77), (9, other, 78)], [4096, 4096])
    assert (residency.used(CPU), residency.used(other)) == (0, 0)


def test_scratch_that_is_not_to_be_had_does_not_count(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", refuse)
    fake_cuda.install(monkeypatch)
    fake, residency = fake_nvcomp.install(monkeypatch), Residency()
    nvcomp.load(CPU, residency)
    monkeypatch.setattr(nvcomp, "_DEVICES", {77: CPU})
    with pytest.raises(torch.OutOfMemoryError):
        fake.allocators[-1](123, types.SimpleNamespace(ptr=77))

    assert residency.used(CPU) == 0


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"version": "5.3.0"}, "its version is 5.3.0"),
        ({"flaw": "reads wrong"}, "what it reads is wrong"),
        ({"flaw": "writes wrong"}, "round trip failed"),
    ],
)
def test_what_cannot_be_used_is_one_warning(monkeypatch, caplog, how, why) -> None:
    fake_cuda.install(monkeypatch)
    fake_nvcomp.install(monkeypatch, **how)
    with caplog.at_level(logging.DEBUG):
        assert nvcomp.load(CPU, Residency()) is None

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert why in record.getMessage()


def test_without_the_library_the_warning_names_the_extra(monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", None)

    assert nvcomp.load(CPU, Residency()) is None
    (record,) = caplog.records
    assert "kvtcd[cu13]" in record.getMessage()


@pytest.mark.parametrize(("chunks", "gpu"), [(0, False), (255, False), (256, True), (10_000, True)])
def test_few_chunks_stay_on_the_cpu(chunks, gpu) -> None:
    assert nvcomp.worthwhile(chunks) is gpu
