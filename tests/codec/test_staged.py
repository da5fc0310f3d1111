"""Codecs that work on a device for blocks in host memory: the same blobs and blocks as without.

The device is the CPU, with nvCOMP's stand-in; then one that keeps its tensors apart; and a real one where
there is one.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import fake_cuda, fake_nvcomp
from support.codec_world import World, centred_error, kv, mla
from support.staged import FIRST, TOKENS, decode, encode

from kvtcd.codec import nvcomp
from kvtcd.codec.choose import codec_for
from kvtcd.codec.profile import store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.residency import Residency
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.staged import Accelerator
from kvtcd.core.blob import CodecId, parse
from kvtcd.core.errors import Corrupt
from kvtcd.core.policy import CodecChoice
from kvtcd.lab.second_device import DEVICE, SecondDevice

WORLD = World(kv())
CHOICES = [
    CodecChoice("kvtc", 4, window=20),
    CodecChoice("kvtc2", 12, window=20),
    CodecChoice("lossless"),
    CodecChoice("tq", None, window=20, bits=3, options=("mean",)),
    CodecChoice("tq-prod", None, window=20, bits=5),
    CodecChoice("qjl", None, window=20, bits=4, options=("mean",)),
    CodecChoice("sq", None, window=20, bits=3),
    CodecChoice("kivi", None, window=20, bits=3),
    CodecChoice("xkv", 3, window=20),
    CodecChoice("cachegen", None, window=20, level=2, options=("delta",)),
    CodecChoice("fp8", None, window=20),
]
ENTROPY = ["cpu", "stand-in"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles")
    for layout in (kv(), mla()):
        store(World(layout).profile()[1], path)
    return ProfileFolder(path)


@pytest.fixture
def accelerator(entropy, monkeypatch) -> Accelerator:
    device = torch.device("cpu")
    if entropy == "cpu":
        return Accelerator(device)
    fake_cuda.install(monkeypatch)
    fake_nvcomp.install(monkeypatch)
    monkeypatch.setattr(nvcomp, "CROSSOVER", 1)
    return Accelerator(device, nvcomp.load(device, Residency()))


@pytest.mark.parametrize("entropy", ENTROPY)
@pytest.mark.parametrize("layout", [kv(), mla()])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_it_reads_and_writes_what_the_codec_itself_does(folder, accelerator, layout, choice) -> None:
    world = World(layout)
    raw = world.block(TOKENS, seed=1, first_token=FIRST)
    plain = codec_for(world.identity, choice, folder)
    staged = codec_for(world.identity, choice, folder, accelerator)
    before = raw.clone()
    one, two = encode(plain, raw), encode(staged, raw)

    assert (staged.name, staged.reason) == (plain.name, plain.reason)
    assert (two.codec, two.reason) == (one.codec, one.reason)
    assert torch.equal(raw, before)
    if accelerator.nvcomp is None:
        assert two.blob == one.blob
    want = decode(plain, one.blob, raw.numel())
    for codec, blob in ((plain, two.blob), (staged, one.blob), (staged, two.blob)):
        assert np.array_equal(decode(codec, blob, raw.numel()), want)


@pytest.mark.parametrize("entropy", ["stand-in"])
def test_what_is_small_stays_on_the_cpu_both_ways(folder, accelerator, monkeypatch) -> None:
    raw = WORLD.block(TOKENS, seed=1, first_token=FIRST)
    staged = codec_for(WORLD.identity, CodecChoice("lossless"), folder, accelerator)
    chunks = -(-raw.numel() // 4 // (16 << 10)) * 4  # two streams of two planes
    done = []
    for few in (chunks, chunks + 1):
        monkeypatch.setattr(nvcomp, "CROSSOVER", few)
        decode(staged, encode(staged, raw).blob, raw.numel())
        done.append([(codec.encodes, codec.decodes) for codec in fake_nvcomp.Codec.made[1:]])

    assert done == [[(1, 1)], [(1, 1)]], "the second time nothing was added"


@pytest.mark.parametrize("entropy", ENTROPY)
def test_a_damaged_blob_is_refused_before_anything_is_launched(folder, accelerator) -> None:
    staged = codec_for(WORLD.identity, CodecChoice("lossless"), folder, accelerator)
    blob = encode(staged, WORLD.block(TOKENS, seed=1, first_token=FIRST)).blob
    blob[-20] ^= 1
    before = [codec.decodes for codec in getattr(fake_nvcomp.Codec, "made", [])]
    with pytest.raises(Corrupt):
        staged.inflate(parse(memoryview(blob)), HeapScratch())

    assert [codec.decodes for codec in getattr(fake_nvcomp.Codec, "made", [])] == before


@pytest.mark.parametrize("read_by", ["cpu", "device"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_no_tensor_is_left_on_another_device(folder, choice, read_by) -> None:
    raw = WORLD.block(TOKENS, seed=1, first_token=FIRST)
    plain = codec_for(WORLD.identity, choice, folder)
    want = encode(plain, raw)
    with SecondDevice():
        staged = codec_for(WORLD.identity, choice, folder, Accelerator(DEVICE))
        got = encode(staged, raw)
        inflated = staged.inflate(parse(memoryview(got.blob)), HeapScratch())
        if read_by == "device":
            sections = [replace(part, data=part.data.to(DEVICE)) for part in inflated.symbols.sections]
            inflated = replace(inflated, symbols=replace(inflated.symbols, sections=sections))
        out = np.full(raw.numel(), 0xEE, np.uint8)
        inflated.synthesize(out)

    assert (got.codec, got.reason, got.blob) == (want.codec, want.reason, want.blob)
    assert np.array_equal(out, decode(plain, want.blob, raw.numel()))


@pytest.mark.parametrize("device", [DEVICE, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)])
def test_bases_that_come_and_go_change_nothing(folder, tmp_path, device) -> None:
    """Two codecs take turns where the budget has room for one basis."""
    raw, choices = WORLD.block(TOKENS, seed=1, first_token=FIRST), CHOICES[:2]
    want = {choice: encode(codec_for(WORLD.identity, choice, folder), raw) for choice in choices}
    blocks = {
        choice: decode(codec_for(WORLD.identity, choice, folder), want[choice].blob, raw.numel())
        for choice in choices
    }
    store(WORLD.profile()[1], tmp_path)
    residency, spared = Residency(), []
    with SecondDevice() if device == DEVICE else nullcontext():
        profiles = ProfileFolder(tmp_path, residency)
        accelerator = Accelerator(device, residency=residency, spared=spared.append)
        codecs = {choice: codec_for(WORLD.identity, choice, profiles, accelerator) for choice in choices}
        profile = profiles.find(WORLD.identity)
        sizes = [
            sum(stream.nbytes(device) for stream in streams.values())
            for streams in (profile.streams, profile.weighted)
        ]
        taken = residency.used(device)
        residency.limit(device, taken + max(sizes))
        for _ in range(3):
            for choice, codec in codecs.items():
                got = encode(codec, raw)
                block = decode(codec, want[choice].blob, raw.numel())
                if device.type == "cuda":
                    torch.cuda.synchronize()
                    one, other = (WORLD.values(torch.from_numpy(b), TOKENS) for b in (block, blocks[choice]))
                    assert all(centred_error(one[name], other[name]) < 0.01 for name in one)
                else:
                    assert got.blob == want[choice].blob
                    assert np.array_equal(block, blocks[choice])
                assert taken < residency.used(device) <= taken + max(sizes)

    assert sum(sizes) > max(sizes) > 0
    assert spared == []


@pytest.mark.gpu
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_gpu_and_a_cpu_read_each_others_blobs(folder, choice, monkeypatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(nvcomp, "CROSSOVER", 1)
    raw = WORLD.block(TOKENS, seed=1, first_token=FIRST)
    plain = codec_for(WORLD.identity, choice, folder)
    staged = codec_for(WORLD.identity, choice, folder, Accelerator.on(device, Residency()))
    want = WORLD.values(raw, TOKENS)
    packed = {"cpu": encode(plain, raw), "gpu": encode(staged, raw)}
    torch.cuda.synchronize()
    for writer, encoded in packed.items():
        blocks = [decode(codec, encoded.blob, raw.numel()) for codec in (plain, staged)]
        torch.cuda.synchronize()
        for block in blocks:
            if encoded.codec is CodecId.LOSSLESS:
                assert np.array_equal(block, raw.numpy()), writer
            else:
                one, other = (WORLD.values(torch.from_numpy(b), TOKENS) for b in (block, blocks[0]))
                assert all(centred_error(one[name], other[name]) < 0.01 for name in one), writer
                assert all(centred_error(one[name], want[name]) < 0.5 for name in one), writer
