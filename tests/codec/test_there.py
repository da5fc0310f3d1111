"""Blocks that are decoded to where they are wanted on the device: the bytes of the way over host memory."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from support import fake_cuda, fake_nvcomp
from support.codec_world import World, kv
from support.staged import FIRST, TOKENS, encode
from support.twin_memory import TwinMemory

from kvtcd.codec import nvcomp
from kvtcd.codec.choose import codec_for
from kvtcd.codec.foreign import Foreign
from kvtcd.codec.pages import PagedDecoder, PageMap
from kvtcd.codec.profile import store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.residency import Residency
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.staged import Accelerator, StagedDecoder
from kvtcd.core.blob import parse
from kvtcd.core.device_bytes import ALIGNED, DeviceBytes
from kvtcd.core.policy import CodecChoice
from kvtcd.lab.second_device import DEVICE, SecondDevice, here, there

WORLD = World(kv())
CHOICES = [
    CodecChoice("kvtc", 4, window=20),
    CodecChoice("kvtc2", 12, window=20),
    CodecChoice("lossless"),
    CodecChoice("tq", None, window=20, bits=3, options=("mean",)),
    CodecChoice("kivi", None, window=20, bits=3),
]
GUARD = 64


class Region:
    """Memory of the second device, with a guard on either side."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.full(nbytes + 2 * GUARD, 0xEE, np.uint8)
        self.memory = DeviceBytes(0, self.bytes.ctypes.data + GUARD, nbytes)

    @property
    def block(self) -> np.ndarray:
        assert set(self.bytes[:GUARD]) | set(self.bytes[-GUARD:]) == {0xEE}, "nothing is written beyond it"
        return self.bytes[GUARD:-GUARD]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles")
    store(WORLD.profile()[1], path)
    return ProfileFolder(path)


@pytest.fixture(scope="module")
def raw():
    return WORLD.block(TOKENS, seed=1, first_token=FIRST)


def both_ways(codec, blob, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a block over host memory, and straight."""
    over, region = np.full(nbytes, 0xDD, np.uint8), Region(nbytes)
    for out in (over, region.memory):
        codec.inflate(parse(memoryview(blob)), HeapScratch()).synthesize(out)
    return over, region.block


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_bytes_are_the_same_and_nothing_but_symbols_crosses_the_bus(folder, raw, choice):
    plain = codec_for(WORLD.identity, choice, folder)
    blob, done = encode(plain, raw).blob, []
    with SecondDevice(done.append):
        staged = codec_for(
            WORLD.identity, choice, folder, Accelerator(DEVICE, foreign=TwinMemory(wrap=there))
        )
        assert staged.gpu == 0
        over, straight = both_ways(staged, blob, raw.numel())
        assert np.array_equal(straight, over)
        done.clear()
        inflated = staged.inflate(parse(memoryview(blob)), HeapScratch())
        symbols = sum(section.data.numel() for section in inflated.symbols.sections)
        region = Region(raw.numel())
        inflated.synthesize(region.memory)

    out = sum(operation.crosses for operation in done if operation.to_host)
    crossed = sum(operation.crosses for operation in done)
    assert out < 64, "the host asks for a few numbers at most"
    if choice.name != "kvtc":  # which brings its plan and table of widths along
        assert crossed <= symbols + (64 << 10)
    assert crossed < raw.numel() or choice.name == "lossless"


@pytest.mark.parametrize("flaw", [None, "writes nothing"])
@pytest.mark.parametrize("choice", CHOICES[:3], ids=str)
def test_what_nvcomp_has_inflated_is_proved_before_it_is_decoded(folder, raw, choice, flaw, monkeypatch):
    fake_cuda.install(monkeypatch)
    fake_nvcomp.install(monkeypatch)
    monkeypatch.setattr(nvcomp, "CROSSOVER", 1)
    device = torch.device("cpu")
    plain = codec_for(WORLD.identity, choice, folder)
    accelerator = Accelerator(device, nvcomp.load(device, Residency()), foreign=TwinMemory())
    staged, blob = codec_for(WORLD.identity, choice, folder, accelerator), encode(plain, raw).blob
    if flaw:
        monkeypatch.setattr(fake_nvcomp.Codec, "flaw", flaw)
    over, straight = both_ways(staged, blob, raw.numel())
    want = np.empty(raw.numel(), np.uint8)
    plain.inflate(parse(memoryview(blob)), HeapScratch()).synthesize(want)
    assert np.array_equal(straight, want)
    assert np.array_equal(over, want)


def test_an_engines_pages_are_put_in_order_there(raw):
    pages = PageMap(kv(), 16, by_token=True)

    class Copies:
        """Decodes to the block itself."""

        def synthesize(self, symbols, out):
            out.copy_(symbols.block.to(out.device))

    class Symbols:
        def __init__(self, block):
            self.block, self.sections = block, ()
            self.header = type("Header", (), {"tokens": TOKENS, "codec": None})

    with SecondDevice():
        decoder = PagedDecoder(Copies(), pages)
        want, got = torch.empty_like(raw), there(torch.empty_like(raw))
        decoder.synthesize(Symbols(raw), want)
        decoder.synthesize_there(Symbols(raw), got)
        assert torch.equal(here(got), want)


class Script:
    """Has no memory from an operation on, until that was said so many times; each ends an attempt."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, operation) -> None:
        if self.left and operation.name == "mm":
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(("times", "spared"), [(1, []), (2, ["memory"])])
def test_where_memory_is_short_layers_come_one_by_one_and_then_from_a_cpu(folder, raw, times, spared, caplog):
    choice, told = CodecChoice("kvtc2", 12, window=20), []
    plain = codec_for(WORLD.identity, choice, folder)
    blob, script = encode(plain, raw).blob, Script(0)
    with SecondDevice(script):
        accelerator = Accelerator(DEVICE, foreign=TwinMemory(wrap=there), spared=told.append)
        staged = codec_for(WORLD.identity, choice, folder, accelerator)
        region = Region(raw.numel())
        inflated = staged.inflate(parse(memoryview(blob)), HeapScratch())
        script.left = times
        with caplog.at_level(logging.WARNING):
            inflated.synthesize(region.memory)

    want = np.empty(raw.numel(), np.uint8)
    plain.inflate(parse(memoryview(blob)), HeapScratch()).synthesize(want)
    assert script.left == 0
    assert told == spared
    assert np.array_equal(region.block, want)


def test_only_a_codec_that_can_says_so(folder):
    for accelerator in (None, Accelerator(torch.device("cpu"))):
        assert codec_for(WORLD.identity, CHOICES[0], folder, accelerator).gpu is None
    on_cpu = codec_for(
        WORLD.identity, CHOICES[0], folder, Accelerator(torch.device("cpu"), foreign=TwinMemory())
    ).on_cpu()
    assert on_cpu.gpu is None


def test_memory_is_taken_as_it_lies_or_not_at_all(monkeypatch):
    region = Region(32)
    memory = region.memory
    as_it_lies = TwinMemory().tensor(memory)
    foreign = Foreign(torch.device("cuda", 3))
    assert foreign.gpu == 3
    monkeypatch.setattr(torch, "as_tensor", lambda given, device: as_it_lies if given is memory else device)
    assert foreign.tensor(memory) is as_it_lies
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: as_it_lies.clone())
    with pytest.raises(RuntimeError, match="is not used as it lies on cuda:3"):
        foreign.tensor(memory)


def test_memory_says_where_it_is_as_libraries_of_tensors_ask():
    memory = DeviceBytes(1, 4096, 7)
    assert memory.__cuda_array_interface__ == {
        "shape": (7,), "typestr": "|u1", "data": (4096, False), "version": 3,
    }  # fmt: skip
    assert memory.aligned
    assert not DeviceBytes(1, 4096 + ALIGNED // 2, 7).aligned


@pytest.mark.gpu
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_gpu_decodes_straight_what_it_decodes_over_the_host(folder, raw, choice):
    device = torch.device("cuda", 0)
    blob = encode(codec_for(WORLD.identity, choice, folder), raw).blob
    staged = codec_for(WORLD.identity, choice, folder, Accelerator.on(device, Residency()))
    memory = torch.full((raw.numel() + 2 * GUARD,), 0xEE, dtype=torch.uint8, device=device)
    over = np.empty(raw.numel(), np.uint8)
    there_ = DeviceBytes(0, memory.data_ptr() + GUARD, raw.numel())
    for out in (over, there_):
        staged.inflate(parse(memoryview(blob)), HeapScratch()).synthesize(out)
        torch.cuda.synchronize()
    found = memory.cpu().numpy()
    assert np.array_equal(found[GUARD:-GUARD], over)
    assert set(found[:GUARD]) | set(found[-GUARD:]) == {0xEE}
    assert isinstance(staged.decoder, StagedDecoder)
