"""The codec as a whole: what stays exact, what error there is, what is refused."""

import dataclasses
import itertools

import pytest
import torch
from safetensors.torch import load
from support.codec_blobs import reassembled
from support.codec_reference import coded_tokens, decoded
from support.codec_world import DEFAULT, LLAMA3, NEIGHBOURS, PARTIAL, YARN, World, centred_error, kv, mla

from kvtcd.codec.choose import Decoder
from kvtcd.codec.coded import Coder
from kvtcd.codec.kvtc import Kvtc
from kvtcd.codec.ports import Reason
from kvtcd.codec.rope import inverse_frequencies
from kvtcd.core.blob import BasisId, CodecId, Kind, parse
from kvtcd.core.errors import BadField, BlockMismatch, Corrupt, ProfileMismatch, UnknownProfile
from kvtcd.core.layout import Dtype

WORLDS = {
    "bf16": World(kv(Dtype.BF16)),
    "f16": World(kv(Dtype.F16)),
    "f32": World(kv(Dtype.F32)),
    "llama3": World(kv(), LLAMA3),
    "yarn": World(kv(), YARN),
    "partial": World(kv(), PARTIAL),
    "neighbours": World(kv(), NEIGHBOURS),
    "mla": World(mla(), DEFAULT),
    "mla-f32-yarn": World(mla(Dtype.F32), YARN),
}
TOKENS = 48


@pytest.fixture(params=WORLDS, scope="module")
def world(request):
    return WORLDS[request.param]


@pytest.fixture(scope="module")
def profile(world):
    return world.profile()[0]


def encode(world, profile, raw, *, first_token=0, after=1000, ratio=4, sinks=4, window=16, tokens=TOKENS):
    codec = Kvtc(world.layout, world.rope, profile, ratio, sinks=sinks, window=window)
    return codec.encode(raw, tokens=tokens, first_token=first_token, after=after)


def decode(world, profile, data, tokens=TOKENS):
    def lookup(digest):
        if digest != profile.digest:
            raise UnknownProfile(digest)
        return profile

    out = torch.full((world.layout.nbytes(tokens),), 0xAA, dtype=torch.uint8)
    Decoder(world.layout, world.rope, lookup).decode(parse(memoryview(data)), out)
    return out


@pytest.mark.parametrize("first_token", [0, 2, 200])
def test_the_error_is_that_of_the_noise_beyond_the_basis(world, profile, first_token):
    raw = world.block(TOKENS, seed=5, first_token=first_token)
    encoded = encode(world, profile, raw, first_token=first_token)
    assert (encoded.codec, encoded.reason) == (CodecId.KVTC, None)
    got = world.values(decode(world, profile, encoded.blob), TOKENS)
    for name, want in world.values(raw, TOKENS).items():
        assert centred_error(got[name], want) < 0.12, name


def test_a_decoder_written_from_the_format_alone_agrees(world, profile):
    raw = world.block(TOKENS, seed=6, first_token=100)
    encoded = encode(world, profile, raw, first_token=100, ratio=8)
    got = world.values(decode(world, profile, encoded.blob), TOKENS)
    blob = parse(memoryview(encoded.blob))
    frequencies, factor = inverse_frequencies(world.rope)
    reference = decoded(blob, world, load(world.profile()[1]), frequencies, factor)
    start, count = coded_tokens(blob)
    for name, want in reference.items():
        mine = got[name][:, start : start + count].double()
        assert (mine - want).abs().max() < 0.02 * want.abs().max(), name


def test_sinks_and_window_come_back_bit_for_bit_and_the_rest_does_not(world, profile):
    raw = world.block(TOKENS, seed=7)
    got = world.values(decode(world, profile, encode(world, profile, raw, after=0).blob), TOKENS)
    for name, want in world.values(raw, TOKENS).items():
        assert torch.equal(got[name][:, :4], want[:, :4])
        assert torch.equal(got[name][:, -16:], want[:, -16:])
        assert not torch.equal(got[name][:, 4:-16], want[:, 4:-16])


@pytest.mark.parametrize("ratio", [4, 8])
def test_a_blob_of_any_plan_of_the_profile_is_read_and_more_bits_are_better(world, profile, ratio):
    raw = world.block(TOKENS, seed=8, first_token=64)
    blob = encode(world, profile, raw, first_token=64, ratio=ratio).blob
    assert parse(memoryview(blob)).header.plan == ratio
    decode(world, profile, blob)
    if ratio == 8:
        return
    finer, coarser = (
        world.values(
            decode(world, profile, encode(world, profile, raw, first_token=64, ratio=r).blob), TOKENS
        )
        for r in (4, 8)
    )
    for name, want in world.values(raw, TOKENS).items():
        assert centred_error(finer[name], want) < centred_error(coarser[name], want)


WORLD = WORLDS["bf16"]


@pytest.fixture(scope="module")
def plain():
    return WORLD.profile()[0]


@pytest.mark.parametrize(
    ("first_token", "after", "run"),
    [
        (0, 1000, (4, 44)),
        (0, 0, (4, 28)),
        (32, 0, (0, 32)),
        (2, 10, (2, 40)),
        (32, 16, (0, 48)),
        (3, 17, (1, 47)),
    ],
)
def test_position_and_what_follows_decide_which_tokens_are_coded(plain, first_token, after, run):
    raw = WORLD.block(TOKENS, seed=9, first_token=first_token)
    encoded = encode(WORLD, plain, raw, first_token=first_token, after=after)
    assert coded_tokens(parse(memoryview(encoded.blob))) == run


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 17, 33])
def test_blocks_of_any_length_are_coded(plain, tokens):
    raw = WORLD.block(tokens, seed=10, first_token=64)
    encoded = encode(WORLD, plain, raw, first_token=64, tokens=tokens)
    assert encoded.codec is CodecId.KVTC
    got, want = (WORLD.values(x, tokens) for x in (decode(WORLD, plain, encoded.blob, tokens), raw))
    for name in want:
        # Against the offsets too: a single token has no spread of its own.
        assert (got[name] - want[name]).norm() < 0.05 * want[name].norm()


@pytest.mark.parametrize("first_token", [2**31, 2**53, 2**64 - 1])
def test_any_position_that_fits_the_header_is_coded(plain, first_token):
    raw = WORLD.block(TOKENS, seed=18)
    encoded = encode(WORLD, plain, raw, first_token=first_token)
    assert encoded.codec is CodecId.KVTC
    got = WORLD.values(decode(WORLD, plain, encoded.blob), TOKENS)["v"]
    assert centred_error(got, WORLD.values(raw, TOKENS)["v"]) < 0.12


def poisoned(value: float, token: int) -> torch.Tensor:
    raw = WORLD.block(TOKENS, seed=11)
    view = raw.view(torch.bfloat16).view(2, 3, TOKENS, 2, 16)
    view[1, 2, token, 1, 3] = value
    return raw


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first_token": None}, Reason.POSITION),
        ({"after": 0, "window": TOKENS}, Reason.WINDOW),
        ({"after": 0, "window": TOKENS - 4}, Reason.WINDOW),
        ({"raw": poisoned(float("nan"), 20)}, Reason.NOT_FINITE),
        ({"raw": poisoned(float("-inf"), 20)}, Reason.NOT_FINITE),
        ({"raw": poisoned(3e38, 20)}, Reason.RANGE),
        ({"raw": poisoned(1e6, 20)}, Reason.RANGE),
    ],
)
def test_what_cannot_be_coded_is_stored_losslessly_and_says_why(plain, change, reason):
    raw = change.pop("raw", WORLD.block(TOKENS, seed=12))
    encoded = encode(WORLD, plain, raw, **change)
    assert (encoded.codec, encoded.reason) == (CodecId.LOSSLESS, reason)
    assert torch.equal(decode(WORLD, plain, encoded.blob), raw)


@pytest.mark.parametrize("token", [0, 47])
def test_a_nan_among_exact_tokens_does_no_harm(plain, token):
    raw = poisoned(float("nan"), token)
    encoded = encode(WORLD, plain, raw, after=0)
    assert encoded.codec is CodecId.KVTC
    out = decode(WORLD, plain, encoded.blob)
    assert torch.equal(*(x.view(torch.int16).view(2, 3, TOKENS, 32)[:, :, token] for x in (raw, out)))


def test_a_value_near_the_end_of_float16_stays_finite():
    world = WORLDS["f16"]
    raw = world.block(TOKENS, seed=13)
    raw.view(torch.float16).view(2, 3, TOKENS, 2, 16)[0, :, 20] = 60_000.0
    profile = world.profile()[0]
    out = decode(world, profile, encode(world, profile, raw).blob)
    assert torch.isfinite(out.view(torch.float16)).all()


def test_encoding_does_not_change_the_block():
    world = WORLDS["f32"]
    raw = world.block(TOKENS, seed=14)
    before = raw.clone()
    encode(world, world.profile()[0], raw, after=0)
    assert torch.equal(raw, before)


def test_the_header_says_what_the_blob_is(plain):
    blob = parse(memoryview(encode(WORLD, plain, WORLD.block(TOKENS, 1, 32), first_token=32).blob))
    header = blob.header
    assert (header.codec, header.codec_version, header.basis, header.plan) == (
        CodecId.KVTC,
        1,
        BasisId.PLAIN,
        4,
    )
    assert (header.profile, header.layout) == (plain.digest, WORLD.layout.digest)
    assert (header.tokens, header.first_token, header.dtype) == (TOKENS, 32, Dtype.BF16)


def test_codes_cost_what_the_plan_says_before_the_entropy_stage(plain):
    blob = parse(memoryview(encode(WORLD, plain, WORLD.block(TOKENS, 1, 32), first_token=32).blob))
    for index, stream in enumerate(WORLD.layout.streams):
        bits = 8 * sum(
            s.raw_bytes for s in blob.sections if s.stream == index and s.kind in (Kind.CODES, Kind.RANGES)
        )
        assert bits == TOKENS * plain.streams[stream.name].plans[4].cost


def changed(which, **fields):
    def change(runs):
        i = next(i for i, run in enumerate(runs) if run.kind is which)
        return [*runs[:i], dataclasses.replace(runs[i], **fields), *runs[i + 1 :]]

    return change


def without(kind):
    def change(runs):
        i = next(i for i, run in enumerate(runs) if run.kind is kind)
        return runs[:i] + runs[i + 1 :]

    return change


@pytest.mark.parametrize(
    ("header", "sections"),
    [
        ({"plan": 5}, None),
        ({"plan": 8}, None),
        ({"basis": BasisId.WEIGHTED}, None),
        ({"codec_version": 9}, None),
        ({"first_token": None}, None),
        (None, without(Kind.CODES)),
        (None, without(Kind.RANGES)),
        (None, without(Kind.PLANE)),
        (None, changed(Kind.CODES, part=3)),
        (None, changed(Kind.CODES, stream=2)),
        (None, changed(Kind.RANGES, part=9)),
        (None, changed(Kind.CODES, kind=Kind.PLANE)),
        (None, changed(Kind.PLANE, token_count=5)),
        (None, lambda runs: [run for run in runs if run.kind is not Kind.PLANE]),
    ],
)
def test_a_blob_that_does_not_fit_profile_and_layout_is_refused(plain, header, sections):
    data = encode(WORLD, plain, WORLD.block(TOKENS, seed=15)).blob
    with pytest.raises(BadField):
        decode(WORLD, plain, reassembled(data, header, sections).data)


def test_blobs_of_other_layouts_and_profiles_are_refused_by_name(plain):
    data = encode(WORLD, plain, WORLD.block(TOKENS, seed=16)).blob
    with pytest.raises(UnknownProfile):
        decode(WORLD, plain, reassembled(data, {"profile": bytes(32)}).data)
    wider = World(kv(layers=4))
    with pytest.raises((BlockMismatch, ProfileMismatch)):
        decode(wider, plain, data)
    with pytest.raises(BlockMismatch):
        decode(World(kv(Dtype.F16)), plain, data)
    with pytest.raises(BadField):
        decode(WORLD, plain, reassembled(data, {"codec": CodecId.RAW}).data)


def test_a_coder_reads_no_blob_of_another_profile_of_its_model(plain):
    data = encode(WORLD, plain, WORLD.block(TOKENS, seed=16)).blob
    other = WORLD.profile(ratios=(4, 8, 16))[0]
    out = torch.empty(WORLD.layout.nbytes(TOKENS), dtype=torch.uint8)
    with pytest.raises(ProfileMismatch, match="digest"):
        Coder(WORLD.layout, WORLD.rope, other).decode(parse(memoryview(data)), out)


def test_any_flipped_bit_is_found(plain):
    """One in every 97 bytes, each of its bits in turn: nothing decodes quietly to something else."""
    raw = WORLD.block(TOKENS, seed=17)
    data = encode(WORLD, plain, raw, after=0).blob
    good = decode(WORLD, plain, data)
    for at, bit in zip(range(0, len(data), 97), itertools.cycle(range(8)), strict=False):
        damaged = bytearray(data)
        damaged[at] ^= 1 << bit
        with pytest.raises(Corrupt):
            decode(WORLD, plain, damaged)
    assert torch.equal(decode(WORLD, plain, data), good)
