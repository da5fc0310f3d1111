"""Which codec a namespace gets, through the interface the engine uses: numpy bytes in host memory."""

import dataclasses

import numpy as np
import pytest
import torch
from support.codec_reference import content
from support.codec_world import DEFAULT, World, centred_error, kv, mla

from kvtcd.codec.choose import bound, codec_for
from kvtcd.codec.profile import build, store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.residency import Residency
from kvtcd.codec.scratch import HeapScratch
from kvtcd.core.blob import CodecId, Kind, parse
from kvtcd.core.layout import Dtype
from kvtcd.core.policy import CodecChoice

WORLD = World(kv())


def encode(codec, raw, **place):
    return codec.analyze(raw, **place, scratch=HeapScratch()).deflate()


def decode(codec, blob, out):
    codec.inflate(parse(memoryview(blob)), HeapScratch()).synthesize(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles")
    store(WORLD.profile()[1], path)
    return ProfileFolder(path)


def test_a_profile_that_fits_is_used_and_what_it_wrote_is_read(folder):
    codec = codec_for(WORLD.identity, CodecChoice("kvtc", 4, window=0), folder)
    assert (codec.name, codec.reason) == ("kvtc 4", None)
    raw = WORLD.block(32, seed=1, first_token=64)
    packed = encode(codec, raw.numpy(), tokens=32, first_token=64, after=0)
    assert packed.codec is CodecId.KVTC
    out = np.zeros(raw.numel(), np.uint8)
    decode(codec, packed.blob, out)
    got, want = WORLD.values(WORLD.block(32, 1, 64).new_tensor(out), 32), WORLD.values(raw, 32)
    assert centred_error(got["v"], want["v"]) < 0.15


@pytest.mark.parametrize(
    ("identity", "choice", "reason"),
    [
        (World(kv(layers=2)).identity, CodecChoice(), "no profile"),
        (WORLD.identity, CodecChoice("kvtc", 5), "plans for 4, 8, not for 5"),
        (
            dataclasses.replace(WORLD.identity, page_format="vllm-nhd"),
            CodecChoice("kvtc", 4),
            "page format vllm-nhd",
        ),
        (dataclasses.replace(WORLD.identity, scales="fp8"), CodecChoice("kvtc", 4), "no profile"),
        (
            WORLD.identity,
            CodecChoice("gear", None, bits=2),
            "gear needs blocks of 64 tokens, and these have 32",
        ),
        (World(kv(layers=2)).identity, CodecChoice("sq", None, bits=2), "no profile"),
        (WORLD.identity, CodecChoice("kvtc2", 50), "ratio 50 is outside of what was measured"),
        (WORLD.identity, CodecChoice("kvtc2", None, max_kl=0.001), "0.001 nats per token is outside"),
    ],
)
def test_what_has_no_profile_is_stored_losslessly_with_the_reason(folder, identity, choice, reason):
    codec = codec_for(identity, choice, folder)
    assert codec.name == "lossless"
    assert reason in codec.reason
    raw = World(identity.layout).block(8, seed=2).numpy()
    packed = encode(codec, raw, tokens=8, first_token=0, after=0)
    out = np.empty_like(raw)
    decode(codec, packed.blob, out)
    assert (out == raw).all()


def test_each_part_of_kvtc2_can_be_switched_off(folder):
    raw = WORLD.block(32, seed=1, first_token=64)
    noise = torch.randn(raw.numel() // 2, generator=torch.Generator().manual_seed(1)) * 4
    noise = noise.to(torch.bfloat16).view(torch.uint8)

    def blob(*options: str, data: torch.Tensor = raw) -> tuple[set[int], set[int], float]:
        codec = codec_for(WORLD.identity, CodecChoice("kvtc2", 12, window=8, options=options), folder)
        packed = encode(codec, data.numpy(), tokens=32, first_token=64, after=0)
        out = np.zeros(raw.numel(), np.uint8)
        decode(codec_for(WORLD.identity, CodecChoice("lossless"), folder), packed.blob, out)
        parsed = parse(memoryview(packed.blob))
        sections = [section for section in parsed.sections if section.kind is Kind.CLASSES]
        classes = {
            int(value)
            for section in sections
            for value in content(parsed, Kind.CLASSES, section.stream, section.part, section.token_start)
        }
        return classes, {section.part for section in sections}, parsed.header.step

    classes, runs, step = blob()
    assert (len(classes) > 2, runs, step) == (True, {16, 24}, 1.0)
    assert blob("no-classes")[:2] == ({16, 24}, {16, 24})
    assert blob("no-classes", "no-recent")[:2] == ({16}, {16})
    assert blob("no-recent")[1] == {16}
    assert blob(data=noise)[2] != 1.0, "the guard has taken a finer step, or refused"
    assert blob("no-guard", data=noise)[2] == 1.0


@pytest.mark.parametrize(
    ("choice", "name", "step"),
    [
        (CodecChoice("kvtc2", 12, window=0), "kvtc2 12", 1.0),
        (CodecChoice("kvtc2", None, max_kl=0.1, window=0), "kvtc2 KL 0.1", 2.0),
        (CodecChoice("kvtc2", None, max_kl=0.9, window=0), "kvtc2 KL 0.9", 2.0),
    ],
)
def test_the_dial_of_kvtc2_is_read_off_the_profile(folder, choice, name, step):
    codec = codec_for(WORLD.identity, choice, folder)
    assert (codec.name, codec.reason) == (name, None)
    raw = WORLD.block(32, seed=1, first_token=64)
    packed = encode(codec, raw.numpy(), tokens=32, first_token=64, after=0)
    assert packed.codec is CodecId.KVTC2
    assert parse(memoryview(packed.blob)).header.step == pytest.approx(step)
    out = np.zeros(raw.numel(), np.uint8)
    decode(codec, packed.blob, out)
    plain = codec_for(WORLD.identity, CodecChoice(name="lossless"), folder)
    same = np.empty_like(out)
    decode(plain, packed.blob, same)
    assert (out == same).all()


@pytest.mark.parametrize(
    ("choice", "name", "codec"),
    [
        (CodecChoice("tq", None, bits=3, window=0), "tq 3 bits", CodecId.TQ),
        (
            CodecChoice("tq", None, bits=3, window=0, options=("mean", "haar")),
            "tq 3 bits mean haar",
            CodecId.TQ,
        ),
        (CodecChoice("xkv", 4, window=0), "xkv 4", CodecId.XKV),
        (CodecChoice("cachegen", None, level=2, window=0), "cachegen level 2", CodecId.CACHEGEN),
        (CodecChoice("fp8", None, window=0), "fp8", CodecId.FP8),
    ],
)
def test_rivals_need_no_profile_and_every_decoder_reads_them(tmp_path, choice, name, codec):
    profiles = ProfileFolder(tmp_path)
    found = codec_for(WORLD.identity, choice, profiles)
    assert (found.name, found.reason) == (name, None)
    raw = WORLD.block(120, seed=1, first_token=64)
    packed = encode(found, raw.numpy(), tokens=120, first_token=64, after=0)
    assert packed.codec is codec
    out = np.zeros(raw.numel(), np.uint8)
    decode(codec_for(WORLD.identity, CodecChoice("lossless"), profiles), packed.blob, out)
    got, want = WORLD.values(raw.new_tensor(out), 120), WORLD.values(raw, 120)
    assert all((got[s] - want[s]).norm() < 0.3 * want[s].norm() for s in want)


def test_a_codec_says_with_which_profile_it_packs_and_what_its_curve_promises(folder):
    profile = WORLD.profile()[0]
    first, *_, last = profile.origin.curve[1:]
    for row in (first, last):
        found = codec_for(WORLD.identity, CodecChoice("kvtc2", float(row["ratio"])), folder)
        assert found.profile == profile.digest.hex()
        assert found.expected_kl == pytest.approx(float(row["kl"]), rel=1e-6)

    plain = codec_for(WORLD.identity, CodecChoice("kvtc", 4), folder)
    assert (plain.profile, plain.expected_kl) == (profile.digest.hex(), None)
    exact = codec_for(WORLD.identity, CodecChoice("lossless"), folder)
    assert (exact.profile, exact.expected_kl) == (None, None)


def test_a_profile_without_a_curve_has_no_dial(tmp_path):
    profile = WORLD.profile()[0]
    bare = dataclasses.replace(profile.origin, curve=())
    store(build(bare, profile.streams, profile.weighted)[1], tmp_path)
    codec = codec_for(WORLD.identity, CodecChoice("kvtc2", 12), ProfileFolder(tmp_path))
    assert codec.name == "lossless"
    assert "no rate-quality curve" in codec.reason


@pytest.mark.parametrize(
    ("name", "ratio", "max_kl"),
    [("kvtc2", None, None), ("kvtc2", 8, 0.1), ("kvtc", 8, 0.1), ("kvtc", None, 0.1)],
)
def test_a_choice_has_exactly_one_dial(name, ratio, max_kl):
    with pytest.raises(ValueError, match="ratio"):
        CodecChoice(name, ratio, max_kl=max_kl)


def test_a_ratio_that_leaves_no_bits_is_stored_losslessly(tmp_path):
    """Groups cost at least 34 bits: a toy model at a high ratio has none to give."""
    tiny = World(kv(layers=1))
    store(tiny.profile(ratios=(500,))[1], tmp_path)
    codec = codec_for(tiny.identity, CodecChoice("kvtc", 500, window=0), ProfileFolder(tmp_path))
    assert "no bit to code with" in codec.reason
    raw = tiny.block(32, seed=1, first_token=64)
    packed = encode(codec, raw.numpy(), tokens=32, first_token=64, after=0)
    out = np.zeros(raw.numel(), np.uint8)
    decode(codec, packed.blob, out)
    assert (out == raw.numpy()).all()


def test_a_lossless_policy_needs_no_reason_and_still_reads_coded_blobs(folder):
    coding = codec_for(WORLD.identity, CodecChoice("kvtc", 4), folder)
    plain = codec_for(WORLD.identity, CodecChoice(name="lossless"), folder)
    assert (plain.name, plain.reason) == ("lossless", None)
    raw = WORLD.block(200, seed=3).numpy()
    packed = encode(coding, raw, tokens=200, first_token=0, after=0)
    assert packed.codec is CodecId.KVTC
    out, same = np.empty_like(raw), np.empty_like(raw)
    decode(plain, packed.blob, out)
    decode(coding, packed.blob, same)
    assert (out == same).all()


@pytest.mark.parametrize("choice", [CodecChoice("kvtc", 4), CodecChoice("kvtc2", 12)], ids=lambda c: c.name)
def test_on_a_cpu_nothing_is_left_for_the_first_block_to_wait_for(tmp_path, choice):
    """A daemon that was started anew gives its first block as fast as the next."""
    store(WORLD.profile()[1], tmp_path)
    residency = Residency()
    codec = codec_for(WORLD.identity, choice, ProfileFolder(tmp_path, residency))
    held = residency.used(torch.device("cpu"))
    assert held > 0
    raw = WORLD.block(32, seed=1).numpy()
    packed = encode(codec, raw, tokens=32, first_token=0, after=200)
    decode(codec, packed.blob, np.empty_like(raw))
    assert residency.used(torch.device("cpu")) == held


@pytest.mark.parametrize(
    "world",
    [World(kv(d)) for d in Dtype] + [World(mla(Dtype.F32), DEFAULT)],
    ids=["f32", "bf16", "f16", "mla"],
)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_no_blob_exceeds_the_bound_not_even_of_noise(tmp_path, world, tokens):
    store(world.profile(ratios=(1, 4))[1], tmp_path)
    profiles = ProfileFolder(tmp_path)
    noise = np.random.default_rng(1).integers(0, 256, world.layout.nbytes(tokens), dtype=np.uint8)
    real = world.block(tokens, seed=4, first_token=2).numpy()
    for choice in (
        CodecChoice("kvtc", 1, window=1),
        CodecChoice("kvtc", 4, window=1),
        CodecChoice("kvtc2", 8, window=1),
        CodecChoice(name="lossless"),
        CodecChoice("gear", None, window=1, bits=7),
        CodecChoice("xkv", 1.01, window=1),
        CodecChoice("cachegen", None, window=1, level=3, options=("delta", "mean")),
        CodecChoice("sq", None, window=1, bits=8),
    ):
        codec = codec_for(world.identity, choice, profiles)
        for raw in (noise, real):
            packed = encode(codec, raw, tokens=tokens, first_token=2, after=0)
            assert len(packed.blob) <= bound(raw.size)
