"""A device without memory, and an nvCOMP that fails: the same blocks come out, and what was spared is told.

The device is scripted: `second_device` runs the codecs, and at some operations it has no memory.
"""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
from support import fake_cuda, fake_nvcomp
from support.codec_world import World, kv
from support.staged import FIRST, TOKENS, decode, encode

from kvtcd.codec import nvcomp
from kvtcd.codec.choose import codec_for
from kvtcd.codec.profile import store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.residency import Residency
from kvtcd.codec.staged import Accelerator
from kvtcd.core.policy import CodecChoice
from kvtcd.lab.second_device import DEVICE, SecondDevice

WORLD = World(kv())
CPU = torch.device("cpu")
CHOICES = [CodecChoice("kvtc", 4, window=20), CodecChoice("kvtc2", 12, window=20)]


SHORT = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    torch.AcceleratorError("CUDA error: out of memory"),
]
"""In the words of torch's pool, of cuBLAS on a new thread, and of a kernel that is loaded at first use."""


class Script:
    """Has no memory from an operation on, until that was said so many times; each ends an attempt."""

    def __init__(self, begin: int, times: int) -> None:
        self.begin, self.left, self.seen, self.words = begin, times, 0, itertools.cycle(SHORT)

    def __call__(self, operation) -> None:
        self.seen += operation.launches
        if self.seen > self.begin and self.left and operation.launches:
            self.left -= 1
            raise next(self.words)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles")
    store(WORLD.profile()[1], path)
    return path


@pytest.fixture(scope="module")
def raw():
    return WORLD.block(TOKENS, seed=1, first_token=FIRST)


@pytest.mark.parametrize("times", [1, 99])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_wherever_memory_ends_the_block_is_the_same(path, raw, choice, times):
    plain = codec_for(WORLD.identity, choice, ProfileFolder(path))
    want = encode(plain, raw)
    block = decode(plain, want.blob, raw.numel())
    spared: list[str] = []
    with SecondDevice(count := Script(0, 0)):
        accelerator = Accelerator(DEVICE, spared=spared.append)
        staged = codec_for(WORLD.identity, choice, ProfileFolder(path), accelerator)
        encode(staged, raw)  # puts bases there, and looks at the block, as at every eighth
        decode(staged, want.blob, raw.numel())
        count.seen = 0
        encode(staged, raw)
        encodes, count.seen = count.seen, 0
        decode(staged, want.blob, raw.numel())
        decodes = count.seen
    assert min(encodes, decodes) > 50, "there is something to refuse"
    for begin in range(0, encodes, 29):
        with SecondDevice(Script(begin, times)):
            got = encode(staged, raw)
        assert (got.blob, got.codec, got.reason) == (want.blob, want.codec, want.reason)
        assert spared == ["memory"] * (times > 1), begin
        spared.clear()
    for begin in range(0, decodes, 29):
        with SecondDevice(Script(begin, times)):
            assert np.array_equal(decode(staged, want.blob, raw.numel()), block)
        assert spared == ["memory"] * (times > 1), begin
        spared.clear()


def test_the_second_attempt_takes_what_is_not_in_use_and_single_layers(path, raw, monkeypatch):
    residency = Residency()
    staged = codec_for(
        WORLD.identity, CHOICES[0], ProfileFolder(path, residency), Accelerator(DEVICE, residency=residency)
    )
    blob = encode(codec_for(WORLD.identity, CHOICES[0], ProfileFolder(path)), raw).blob
    asked, decoder = [], type(staged.decoder._decoder)
    parts = decoder.parts
    monkeypatch.setattr(
        decoder, "parts", lambda self, symbols, out, n: asked.append(n) or parts(self, symbols, out, n)
    )
    with SecondDevice():
        with residency.hold("idle", DEVICE, 1, list):
            pass
        before = residency.used(DEVICE)
    with SecondDevice(Script(3, 1)):
        decode(staged, blob, raw.numel())

    assert asked == [16 << 20, 0]
    assert residency.used(DEVICE) >= before - 1, "the basis is there again, the idle one is not"
    assert ("idle" in {key for _, key in residency._entries}) is False


def test_a_basis_that_is_larger_than_the_budget_leaves_blocks_to_the_cpu(path, raw, caplog):
    residency, spared = Residency(), []
    residency.limit(DEVICE, 1000)
    want = encode(codec_for(WORLD.identity, CHOICES[1], ProfileFolder(path)), raw)
    with SecondDevice(), caplog.at_level(logging.WARNING):
        accelerator = Accelerator(DEVICE, residency=residency, spared=spared.append)
        staged = codec_for(WORLD.identity, CHOICES[1], ProfileFolder(path, residency), accelerator)
        got = encode(staged, raw)

    assert got.blob == want.blob
    assert spared == ["memory"]
    assert "codec.memory" in caplog.text


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (torch.OutOfMemoryError("full"), "memory"),
        (RuntimeError("CUDA Runtime API failure: out of memory; code=2"), "memory"),
        (RuntimeError("nvCOMP: 10"), "nvcomp"),
        (ValueError("the buffer is too small to hold the data"), "nvcomp"),
        (IndexError("batch"), "nvcomp"),
        (MemoryError("std::bad_alloc"), "nvcomp"),
    ],
    ids=repr,
)
def test_what_nvcomp_cannot_do_a_cpu_does(path, raw, monkeypatch, error, why):
    fake_cuda.install(monkeypatch)
    fake_nvcomp.install(monkeypatch)
    monkeypatch.setattr(nvcomp, "CROSSOVER", 1)
    spared: list[str] = []
    found = nvcomp.load(CPU, Residency())
    accelerator = Accelerator(CPU, found, spared=spared.append)
    staged = codec_for(WORLD.identity, CodecChoice("lossless"), ProfileFolder(path), accelerator)

    def fail(*_: object, **__: object) -> None:
        raise error

    for call in ("encode", "decode"):
        monkeypatch.setattr(fake_nvcomp.Codec, call, fail)
    encoded = encode(staged, raw)
    assert np.array_equal(decode(staged, encoded.blob, raw.numel()), raw.numpy())
    assert spared == [why, why]


@pytest.mark.parametrize("flaw", ["writes nothing", "stops halfway", "says less"])
def test_what_nvcomp_has_not_done_is_never_served(path, raw, monkeypatch, flaw):
    fake_cuda.install(monkeypatch)
    fake_nvcomp.install(monkeypatch)
    monkeypatch.setattr(nvcomp, "CROSSOVER", 1)
    spared: list[str] = []
    accelerator = Accelerator(CPU, nvcomp.load(CPU, Residency()), spared=spared.append)
    staged = codec_for(WORLD.identity, CodecChoice("lossless"), ProfileFolder(path), accelerator)
    monkeypatch.setattr(fake_nvcomp.Codec, "flaw", flaw)
    encoded = encode(staged, raw)

    assert np.array_equal(decode(staged, encoded.blob, raw.numel()), raw.numpy())
    assert spared == ["nvcomp", "nvcomp"]


@pytest.mark.parametrize("times", [1, 99])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_codec_for_which_there_is_no_memory_is_one_of_the_cpu(path, raw, choice, times):
    plain = codec_for(WORLD.identity, choice, ProfileFolder(path))
    want, spared = encode(plain, raw), []
    with SecondDevice(script := Script(0, times)):
        accelerator = Accelerator(DEVICE, spared=spared.append)
        codec = codec_for(WORLD.identity, choice, ProfileFolder(path), accelerator)
        script.left = 0
        got = encode(codec, raw)
        block = decode(codec, want.blob, raw.numel())

    assert (codec.device, spared) == (("cuda", []) if times == 1 else ("cpu", ["memory"]))
    assert got.blob == want.blob
    assert np.array_equal(block, decode(plain, want.blob, raw.numel()))


def test_a_block_is_looked_at_once_however_often_that_is_tried(path, raw):
    """The sums of two streams, the second of which finds no memory the first time."""
    found = []
    for begin in (10_000, *range(0, 40, 3)):
        with SecondDevice(script := Script(10_000, 1)):
            codec = codec_for(WORLD.identity, CHOICES[0], ProfileFolder(path), Accelerator(DEVICE))
            script.begin, script.seen = begin, 0
            encode(codec, raw)
            windows = codec.encoder._encoder._windows
            found.append([(window._count, float(window._kept.cpu())) for window in windows])

    assert found[1:] == found[:1] * len(found[1:])


def test_other_errors_are_not_hidden(path, raw):
    staged = codec_for(WORLD.identity, CHOICES[0], ProfileFolder(path), Accelerator(DEVICE))

    def broken(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with SecondDevice(broken), pytest.raises(RuntimeError, match="illegal"):
        encode(staged, raw)
