"""The weighted codec as a whole: what stays exact, how errors are bounded, what is refused."""

import dataclasses

import pytest
import torch
from safetensors.torch import load
from support import kvtc2_reference as reference
from support.codec_blobs import reassembled
from support.codec_world import (
    DEFAULT,
    LLAMA3,
    NEIGHBOURS,
    PARTIAL,
    YARN,
    World,
    centred_error,
    kv,
    mla,
)  # fmt: skip

from kvtcd.codec.choose import Decoder
from kvtcd.codec.kvtc2 import Kvtc2
from kvtcd.codec.ports import Reason
from kvtcd.codec.profile import build
from kvtcd.codec.rope import inverse_frequencies
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.stepped import Run, Span, Stepped
from kvtcd.codec.transform import rows, views
from kvtcd.core.blob import BasisId, CodecId, Kind, parse
from kvtcd.core.errors import BadField, Corrupt, ProfileMismatch
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
STEP = 0.5


@pytest.fixture(params=WORLDS, scope="module")
def world(request):
    return WORLDS[request.param]


@pytest.fixture(scope="module")
def made(world):
    return world.profile()


def encode(world, profile, raw, *, first_token=0, after=1000, step=STEP, tokens=TOKENS, **options):
    codec = Kvtc2(world.layout, world.rope, profile, step, **{"sinks": 4, "window": 16} | options)
    return codec.encode(raw, tokens=tokens, first_token=first_token, after=after)


def decode(world, profile, data, tokens=TOKENS):
    out = torch.full((world.layout.nbytes(tokens),), 0xAA, dtype=torch.uint8)
    Decoder(world.layout, world.rope, lambda _: profile).decode(parse(memoryview(data)), out)
    return out


@pytest.mark.parametrize("first_token", [0, 2, 200])
def test_a_finer_step_takes_more_bytes_and_leaves_less_error(world, made, first_token):
    raw = world.block(TOKENS, seed=5, first_token=first_token)
    sizes, errors = [], []
    for step in (2.0, 0.5, 0.125):
        encoded = encode(world, made[0], raw, first_token=first_token, step=step)
        assert (encoded.codec, encoded.reason) == (CodecId.KVTC2, None)
        got = world.values(decode(world, made[0], encoded.blob), TOKENS)
        want = world.values(raw, TOKENS)
        sizes.append(len(encoded.blob))
        errors.append([centred_error(got[name], want[name]) for name in want])
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    assert max(errors[-1]) < 0.2


def test_a_decoder_written_from_the_format_alone_agrees(world, made):
    raw = world.block(TOKENS, seed=6, first_token=100)
    encoded = encode(world, made[0], raw, first_token=100, after=0)
    got = world.values(decode(world, made[0], encoded.blob), TOKENS)
    blob = parse(memoryview(encoded.blob))
    frequencies, factor = inverse_frequencies(world.rope)
    found = reference.decoded(blob, world, load(made[1]), frequencies, factor)
    assert [(start, count) for start, count, _ in found] == [(0, 32), (32, 16)]
    for start, count, streams in found:
        for name, want in streams.items():
            mine = got[name][:, start : start + count].double()
            assert (mine - want).abs().max() < 0.02 * want.abs().max(), name


WORLD = WORLDS["bf16"]
EXACT = WORLDS["f32"]


@pytest.fixture(scope="module")
def plain():
    return WORLD.profile()[0]


@pytest.fixture(scope="module")
def exact():
    return EXACT.profile()[0]


@pytest.mark.parametrize("uncoded", [None, 1])
def test_the_estimated_error_is_the_weighted_error(exact, uncoded):
    """The coder sees coefficients and a sketch of the rest; here the error is counted in full.

    Classes are all the middle one, so no token counts more than another.
    """
    tokens = 200
    unbiased = {
        name: dataclasses.replace(
            own, tokens=torch.zeros_like(own.tokens), level=torch.zeros(1), spread=own.spread.clone()
        )
        for name, own in exact.weighted.items()
    }
    if uncoded is not None:
        unbiased["k"].spread[uncoded] = 0.0  # as if it had never varied
    profile = build(exact.origin, exact.streams, unbiased)[0]
    raw = EXACT.block(tokens, seed=21, first_token=64)
    for step in (0.25, 1.0, 4.0):
        coder = Stepped(EXACT.layout, EXACT.rope, profile)
        run = coder.analyze(
            views(raw, EXACT.layout, tokens), Span(0, tokens), step, first_token=64, scratch=HeapScratch()
        )
        assert isinstance(run, Run)
        blob = encode(EXACT, profile, raw, first_token=64, step=step, tokens=tokens).blob
        got = decode(EXACT, profile, blob, tokens)
        # Errors are turned with the keys, moments are not: compare before RoPE.
        error = undone_error(EXACT, got, raw, tokens)
        assert float(run.error.mean()) == pytest.approx(float(error.mean()), rel=0.1)


def undone_error(world, got, want, tokens):
    from kvtcd.codec.rope import Rotation  # noqa: PLC0415 - only here

    undo = Rotation(world.rope, 64, tokens, inverse=True)
    total = torch.zeros(tokens, dtype=torch.float64)
    pairs = zip(
        world.layout.streams, views(got, world.layout, tokens), views(want, world.layout, tokens), strict=True
    )
    for stream, g, w in pairs:
        turn = undo if stream.rope else None
        d = (rows(g, turn) - rows(w, turn)).double().view(tokens, world.layout.layers, stream.heads, -1)
        moment = world.weights()[stream.name].double()
        ridge = (
            0.05 * moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * torch.eye(moment.shape[-1])
        )
        total += 0.5 * torch.einsum("tlhd,lhde,tlhe->t", d, moment + ridge, d)
    return total


def test_a_step_that_leaves_nothing_to_code_gives_the_mean(plain):
    raw = WORLD.block(TOKENS, seed=17, first_token=64)
    blob = encode(WORLD, plain, raw, first_token=64, step=1e6).blob
    assert not any(s.kind is Kind.CODES for s in parse(memoryview(blob)).sections)
    got = WORLD.values(decode(WORLD, plain, blob), TOKENS)["v"].transpose(0, 1).flatten(1)
    assert torch.allclose(got, plain.weighted["v"].mean.expand_as(got), rtol=0.01, atol=0.01)


def test_codes_that_take_more_room_than_the_values_are_not_kept(plain):
    raw = WORLD.block(TOKENS, seed=19, first_token=64)
    encoded = encode(WORLD, plain, raw, first_token=64, step=2e-3)
    assert (encoded.codec, encoded.reason) == (CodecId.LOSSLESS, Reason.RANGE)


def test_sinks_come_back_bit_for_bit_and_recent_tokens_finer(plain):
    raw = WORLD.block(TOKENS, seed=7)
    blob = encode(WORLD, plain, raw, after=0).blob
    got, want = (WORLD.values(x, TOKENS) for x in (decode(WORLD, plain, blob), raw))
    for name in want:
        assert torch.equal(got[name][:, :4], want[name][:, :4])
        body, recent = (
            float((got[name][:, part] - want[name][:, part]).square().mean())
            for part in (slice(4, 32), slice(32, 48))
        )
        assert 0 < recent < body / 2


@pytest.mark.parametrize(
    ("first_token", "after", "wanted"),
    [
        (0, 1000, [(4, 44)]),
        (0, 0, [(4, 28), (32, 16)]),
        (32, 0, [(0, 32), (32, 16)]),
        (2, 10, [(2, 40), (42, 6)]),
        (32, 16, [(0, 48)]),
        (3, 17, [(1, 47)]),
    ],
)
def test_position_and_what_follows_decide_what_is_finer(plain, first_token, after, wanted):
    raw = WORLD.block(TOKENS, seed=9, first_token=first_token)
    encoded = encode(WORLD, plain, raw, first_token=first_token, after=after)
    assert reference.runs(parse(memoryview(encoded.blob))) == wanted


def test_a_window_over_the_whole_block_is_one_finer_run(plain):
    encoded = encode(
        WORLD, plain, WORLD.block(TOKENS, seed=9, first_token=64), first_token=64, after=0, window=99
    )
    assert reference.runs(parse(memoryview(encoded.blob))) == [(0, 48)]


def test_tokens_that_are_predicted_to_matter_get_finer_steps(plain):
    """The predictor is known here: rows times features about the mean, in half octaves."""
    raw = WORLD.block(TOKENS, seed=30, first_token=64)
    blob = parse(memoryview(encode(WORLD, plain, raw, first_token=64).blob))
    from kvtcd.codec.rope import Rotation  # noqa: PLC0415 - only here

    undo = Rotation(WORLD.rope, 64, TOKENS, inverse=True)
    offsets = torch.stack([own.level for own in plain.weighted.values()])
    for stream, view in zip(WORLD.layout.streams, views(raw, WORLD.layout, TOKENS), strict=True):
        x = rows(view, undo if stream.rope else None) - plain.weighted[stream.name].mean
        offsets = offsets + plain.weighted[stream.name].tokens @ x.t()
    for index in range(2):
        section = next(s for s in blob.sections if (s.kind, s.stream) == (Kind.CLASSES, index))
        classes = list(reference.content(blob, Kind.CLASSES, index, section.part, 0))
        off = [abs(c - 16 - float(o)) for c, o in zip(classes, offsets[index], strict=True)]
        assert max(off) < 0.6  # half for rounding, the rest for products in bfloat16
        assert len(set(classes)) > 2


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 17, 33])
def test_blocks_of_any_length_are_coded(plain, tokens):
    raw = WORLD.block(tokens, seed=10, first_token=64)
    encoded = encode(WORLD, plain, raw, first_token=64, tokens=tokens, step=0.1)
    assert encoded.codec is CodecId.KVTC2
    got, want = (WORLD.values(x, tokens) for x in (decode(WORLD, plain, encoded.blob, tokens), raw))
    for name in want:
        assert (got[name] - want[name]).norm() < 0.1 * want[name].norm()


def poisoned(value: float, token: int) -> torch.Tensor:
    raw = WORLD.block(TOKENS, seed=11)
    raw.view(torch.bfloat16).view(2, 3, TOKENS, 2, 16)[1, 2, token, 1, 3] = value
    return raw


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first_token": None}, Reason.POSITION),
        ({"sinks": TOKENS}, Reason.WINDOW),
        ({"raw": poisoned(float("nan"), 20)}, Reason.NOT_FINITE),
        ({"raw": poisoned(float("-inf"), 20)}, Reason.NOT_FINITE),
        ({"raw": poisoned(1e9, 20)}, Reason.RANGE),
        ({"raw": poisoned(float("nan"), 47), "after": 0}, Reason.NOT_FINITE),
    ],
)
def test_what_cannot_be_coded_is_stored_losslessly_and_says_why(plain, change, reason):
    raw = change.pop("raw", WORLD.block(TOKENS, seed=12))
    encoded = encode(WORLD, plain, raw, **change)
    assert (encoded.codec, encoded.reason) == (CodecId.LOSSLESS, reason)
    assert torch.equal(decode(WORLD, plain, encoded.blob), raw)


def mean_error(profile, raw, step):
    coder = Stepped(WORLD.layout, WORLD.rope, profile)
    run = coder.analyze(
        views(raw, WORLD.layout, TOKENS), Span(0, TOKENS), step, first_token=64, scratch=HeapScratch()
    )
    return float(run.error.mean())


def test_the_guard_refines_the_step_and_gives_up_when_that_does_not_help(plain):
    raw = WORLD.block(TOKENS, seed=13, first_token=64)
    coarse, finer, finest = (mean_error(plain, raw, STEP * share) for share in (1, 0.5, 0.25))
    assert coarse > finer > finest
    for bound, step, reason in (
        (2 * coarse, STEP, None),
        ((coarse + finer) / 2, STEP / 2, Reason.FINER),
        ((finer + finest) / 2, STEP / 4, Reason.FINER),
    ):
        encoded = encode(WORLD, plain, raw, first_token=64, bound=bound)
        assert (encoded.codec, encoded.reason) == (CodecId.KVTC2, reason)
        assert parse(memoryview(encoded.blob)).header.step == pytest.approx(step)
        decode(WORLD, plain, encoded.blob)
    encoded = encode(WORLD, plain, raw, first_token=64, bound=finest / 2)
    assert (encoded.codec, encoded.reason) == (CodecId.LOSSLESS, Reason.ERROR)
    assert torch.equal(decode(WORLD, plain, encoded.blob), raw)


def test_foreign_values_are_caught_although_the_basis_cannot_see_them(plain):
    """Noise in all directions: most of its energy is outside of the basis, where only the sketch looks."""
    raw = WORLD.block(TOKENS, seed=14, first_token=64)
    usual = mean_error(plain, raw, STEP)
    noise = torch.randn(2 * 3 * TOKENS * 2 * 16, generator=torch.Generator().manual_seed(1))
    foreign = (raw.view(torch.bfloat16).float() + 3 * noise).bfloat16().view(torch.uint8)
    assert mean_error(plain, foreign, STEP) > 10 * usual
    encoded = encode(WORLD, plain, foreign, first_token=64, bound=4 * usual)
    assert encoded.reason in {Reason.FINER, Reason.ERROR, Reason.RANGE}


def test_a_block_with_a_broken_head_is_stored_losslessly_whatever_its_error(plain):
    raw = WORLD.block(TOKENS, seed=15, first_token=64)
    views(raw, WORLD.layout, TOKENS)[1][2, :, 0].mul_(8)
    encoded = encode(WORLD, plain, raw, first_token=64, bound=1e9)
    assert (encoded.codec, encoded.reason) == (CodecId.LOSSLESS, Reason.UNUSUAL)
    assert torch.equal(decode(WORLD, plain, encoded.blob), raw)
    unguarded = encode(WORLD, plain, raw, first_token=64, bound=None)
    assert (unguarded.codec, unguarded.reason) == (CodecId.KVTC2, None)


def without(kind, part=None):
    return lambda runs: [r for r in runs if not (r.kind is kind and (part is None or r.part == part))]


def changed(kind, **fields):
    return lambda runs: [dataclasses.replace(r, **fields) if r.kind is kind else r for r in runs]


@pytest.mark.parametrize(
    ("header", "sections"),
    [
        ({"step": 0.0}, None),
        ({"step": float("nan")}, None),
        ({"step": -1.0}, None),
        ({"step": STEP / 2}, None),
        ({"plan": 16}, None),
        ({"basis": BasisId.PLAIN}, None),
        ({"token_classes": 0}, None),
        ({"codec_version": 2}, None),
        ({"first_token": None}, None),
        ({"codec": CodecId.KVTC}, None),
        ({}, without(Kind.CLASSES)),
        ({}, without(Kind.CODES, 4)),
        ({}, without(Kind.ESCAPES)),
        ({}, changed(Kind.CLASSES, part=200)),
        ({}, changed(Kind.CLASSES, part=17)),
        ({}, changed(Kind.CODES, stream=3)),
        ({}, lambda runs: [*runs, runs[0]]),
    ],
)
def test_a_blob_that_contradicts_itself_is_refused(plain, header, sections):
    raw = WORLD.block(TOKENS, seed=15, first_token=64)
    data = encode(WORLD, plain, raw, first_token=64, step=0.2).blob
    assert any(s.kind is Kind.ESCAPES for s in parse(memoryview(data)).sections)
    blob = reassembled(data, header, sections)
    out = torch.empty(raw.numel(), dtype=torch.uint8)
    with pytest.raises(Corrupt):
        Decoder(WORLD.layout, WORLD.rope, lambda _: plain).decode(blob, out)


def test_escapes_of_a_byte_and_a_half_are_refused(plain):
    from kvtcd.core.blob import Chunk  # noqa: PLC0415 - only here

    raw = WORLD.block(TOKENS, seed=15, first_token=64)
    data = encode(WORLD, plain, raw, first_token=64, step=0.2).blob
    odd = changed(Kind.ESCAPES, chunks=[Chunk(bytes(3), stored=True)], raw_bytes=3)
    with pytest.raises(BadField, match="ESCAPES"):
        Decoder(WORLD.layout, WORLD.rope, lambda _: plain).decode(
            reassembled(data, None, odd), torch.empty(raw.numel(), dtype=torch.uint8)
        )


def test_a_class_that_does_not_exist_is_refused(plain):
    from kvtcd.core.blob import Chunk  # noqa: PLC0415 - only here

    raw = WORLD.block(TOKENS, seed=15, first_token=64)
    data = encode(WORLD, plain, raw, first_token=64).blob
    stored = changed(Kind.CLASSES, chunks=[Chunk(bytes([32] * TOKENS), stored=True)])
    with pytest.raises(BadField, match="class 32"):
        Decoder(WORLD.layout, WORLD.rope, lambda _: plain).decode(
            reassembled(data, None, stored), torch.empty(raw.numel(), dtype=torch.uint8)
        )


def test_a_profile_of_format_1_has_no_weighted_basis(plain):
    old = build(plain.origin, plain.streams, {})[0]
    with pytest.raises(ProfileMismatch, match="weighted"):
        Kvtc2(WORLD.layout, WORLD.rope, old, STEP)


def test_a_blob_of_another_profile_is_refused(plain):
    raw = WORLD.block(TOKENS, seed=16)
    blob = parse(memoryview(encode(WORLD, plain, raw).blob))
    other = WORLD.profile(ratios=(4,))[0]
    with pytest.raises(ProfileMismatch):
        Decoder(WORLD.layout, WORLD.rope, lambda _: other).check(blob)
