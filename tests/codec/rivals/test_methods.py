"""What only one rival does: outliers of `qjl`, bases of `sq`, layers of `xkv`, levels of `cachegen`."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from support.codec_world import World, kv

from kvtcd.codec.profile import StreamProfile
from kvtcd.codec.rivals import cachegen, fp8, qjl, rans, sq, xkv
from kvtcd.codec.rivals.draws import Draw
from kvtcd.codec.rivals.method import ANY, Centred, Site, Split
from kvtcd.codec.rivals.rotation import orthogonalised
from kvtcd.codec.rivals.setting import Setting
from kvtcd.codec.rivals.tq import make as make_tq
from kvtcd.core.errors import BadField


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def through(method, x):
    arrays = method.encode(x)
    for array, field in zip(arrays, method.fields(x.shape[1]), strict=True):
        assert array.dtype == field.dtype
        assert all(
            have in (want, have if want == ANY else want)
            for have, want in zip(array.shape, field.shape, strict=True)
        )
    return method.decode(arrays, x.shape[1])


def share(got, want):
    return float((got - want).square().sum() / want.square().sum())


# qjl


def test_large_channels_of_a_group_have_a_sketch_of_their_own():
    site = Site(layers=1, heads=2, dim=64, key=True)
    x = draw(1, 70, 2, 64)
    x[:, :32, 0, 5] += 40
    x[:, 32:, 0, 9] -= 40
    method = qjl.make(Setting("qjl", 2), site)
    channels = method.encode(x)[-1]
    assert channels.shape == (1, 3, 2, 8)
    assert 5 in channels[0, 0, 0].tolist()
    assert all(9 in channels[0, group, 0].tolist() for group in (1, 2))
    with_outliers = share(through(method, x)[:, :, 0], x[:, :, 0])
    plain = qjl.Qjl(site, method._inner, method._outer, 1)
    assert with_outliers < 0.12
    assert share(through(plain, x)[:, :, 1], x[:, :, 1]) > 0.2


@pytest.mark.parametrize("dim", [64, 300])
def test_a_channel_that_does_not_exist_is_refused(dim):
    method = qjl.make(Setting("qjl", 1), Site(layers=1, heads=1, dim=dim, key=True))
    *rest, channels = method.encode(draw(1, 32, 1, dim))
    with pytest.raises(BadField, match="channel"):
        method.decode([*rest, torch.full_like(channels, dim if dim > 256 else 200)], 32)


def test_inner_products_with_keys_are_right_on_average():
    site = Site(layers=1, heads=1, dim=64, key=True)
    k, q = draw(1, 32, 1, 64, seed=1), draw(64, seed=2)
    truth = (k @ q).flatten()
    found = torch.stack(
        [(through(qjl.make(Setting("qjl", 2, seed=seed), site), k) @ q).flatten() for seed in range(150)]
    )
    off = (found.mean(dim=0) - truth) / (found.std(dim=0) / 150**0.5)
    assert float(off.square().mean()) < 2  # of 32 tokens; 1 is expected
    assert abs(float((found.mean(dim=0) - truth).mean())) < 0.25


# sq


WORLD = World(kv(layers=3))


def site_of(profile, name, number):
    return Site(
        layers=3, heads=2, dim=16, key=name == "k", number=number, rope=None, profile=profile.streams[name]
    )


def test_the_basis_of_a_head_is_that_of_its_own_rows():
    """Fitted to the head's rows alone, here, and cut out of the basis over all heads and layers, there."""
    profile = WORLD.profile(ratios=(2,))[0]
    rows = WORLD.rows(600, seed=100)["k"].view(600, 3, 2, 16)
    bases, variances = sq.spectra(profile.streams["k"], 3, 2)
    for layer in range(3):
        for head in range(2):
            x = rows[:, layer, head].double()
            values, vectors = torch.linalg.eigh(torch.cov(x.t(), correction=0))
            first = vectors[:, -1].float()
            assert abs(float(bases[layer, head, 0] @ first)) > 0.98
            assert float(variances[layer, head, 0]) == pytest.approx(float(values[-1]), rel=0.05)
    assert (bases @ bases.mT - torch.eye(16)).abs().max() < 1e-5


def test_equal_variances_do_not_leave_the_basis_to_chance():
    """Components that only the order of a sum tells apart: the same vectors whatever it is."""
    rows = orthogonalised(Draw(1, 0).normals(16, 16))
    profile = StreamProfile(torch.zeros(16), rows, torch.full((16,), 0.1), 1.6, {})
    bases = []
    for seed in range(4):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
        shuffled = dataclasses.replace(profile, basis=rows[order])
        bases.append(sq.spectra(shuffled, 1, 1)[0])
    assert all((other - bases[0]).abs().max() < 1e-3 for other in bases)


def test_components_have_the_sign_that_makes_their_largest_entry_positive():
    bases, _ = sq.spectra(WORLD.profile()[0].streams["v"], 3, 2)
    assert (bases.gather(-1, bases.abs().argmax(dim=-1, keepdim=True)) > 0).all()


@pytest.mark.parametrize("options", [(), ("raw",)])
def test_bits_go_where_variance_is_and_errors_follow(options):
    profile = WORLD.profile()[0]
    raw = WORLD.block(400, seed=3)
    x = WORLD.values(raw, 400)["v"]
    errors = [
        share(
            through(sq.make(Setting("sq", bits, frozenset(options)), site_of(profile, "v", 1)), x) - x + x, x
        )
        for bits in (2, 3, 4, 6)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3
    plain = share(through(make_tq(Setting("tq", 3), site_of(profile, "v", 1)), x), x)
    assert errors[1] < plain / 4


def test_lengths_are_kept_if_asked_for():
    profile = WORLD.profile()[0]
    x = WORLD.values(WORLD.block(100, seed=3), 100)["v"]
    mean = profile.streams["v"].mean.view(3, 1, 2, 16)
    lengths = (x - mean).norm(dim=-1)
    for options in (frozenset(), frozenset({"norm"})):
        got = through(sq.make(Setting("sq", 2, options), site_of(profile, "v", 1)), x)
        off = ((got - mean).norm(dim=-1) / lengths - 1).abs().max()
        assert (off < 2e-3) == bool(options)


def test_the_basis_of_keys_is_not_good_for_values():
    profile = WORLD.profile()[0]
    x = WORLD.values(WORLD.block(400, seed=3), 400)["v"]
    right = share(through(sq.make(Setting("sq", 3), site_of(profile, "v", 1)), x), x)
    wrong = share(through(sq.make(Setting("sq", 3), site_of(profile, "k", 1)), x), x)
    assert wrong > 5 * right


# xkv


@pytest.mark.parametrize("layers", [3, 4, 6, 9])
@pytest.mark.parametrize("key", [True, False])
def test_layers_side_by_side_are_approximated_as_well_as_can_be(layers, key):
    x = draw(layers, 48, 2, 16, seed=layers)
    method = xkv.make(Setting("xkv", 2.0), Site(layers=layers, heads=2, dim=16, key=key))
    got = through(method, x)
    for start in range(0, layers, 4):
        group = x[start : start + 4].transpose(0, 1).reshape(48, -1)
        rank = int((0.8 if key else 1.2) * 48 * group.shape[1] / (2 * (48 + group.shape[1])))
        left = float(torch.linalg.svdvals(group).square()[rank:].sum())
        error = float((got[start : start + 4] - x[start : start + 4]).square().sum())
        assert error == pytest.approx(left, rel=2e-3)


def test_the_ratio_is_that_of_values_to_factors():
    wide = 4 * 8 * 128
    for ratio in (2, 4, 8):
        nbytes = sum(
            field.item
            for key in (True, False)
            for field in xkv.make(
                Setting("xkv", float(ratio)), Site(layers=32, heads=8, dim=128, key=key)
            ).fields(256)
        )
        assert 2 * 32 * 256 * 8 * 128 * 2 / nbytes == pytest.approx(ratio, rel=0.05)
    # Half a ratio of 1 at the rank of the paper's runs: at 256 tokens that is no compression.
    assert 256 * wide / (512 * (256 + wide)) == pytest.approx(0.47, abs=0.01)


# cachegen


def bins_of(level, key, layer):
    published = {
        1: {True: [16] * 10 + [16] * 10 + [12] * 20, False: [16] * 2 + [12] * 38},
        2: {True: [32] * 10 + [16] * 30, False: [32] * 2 + [16] * 38},
        3: {True: [32] * 40, False: [32] * 40},
    }
    return published[level][key][layer]


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("key", [True, False])
def test_levels_are_those_of_the_published_code(level, key):
    """`C = bins // 2 - 1`, `round(x C / max + C)`, back by `(code - C) / C max`, the largest of all heads."""
    layers, tokens = 24, 40
    x = draw(layers, tokens, 2, 16, seed=level)
    got = through(cachegen.make(Setting("cachegen", level), Site(layers=layers, heads=2, dim=16, key=key)), x)
    for layer in range(layers):
        half = bins_of(level, key, layer) // 2 - 1
        top = x[layer].abs().amax(dim=(1, 2), keepdim=True).half().float()
        want = (x[layer] * half / top).round().clamp(-half, half) / half * top
        assert (got[layer] - want).abs().max() < 1e-5 * float(top.max()) + float(top.max()) / half * 1e-3


def test_what_is_stored_is_the_entropy_the_distributions_and_the_states():
    layers, tokens = 12, 256
    x = draw(layers, tokens, 2, 32, seed=5)
    words, states, counts, tops = cachegen.make(
        Setting("cachegen", 2), Site(layers=layers, heads=2, dim=32, key=True)
    ).encode(x)
    lanes = layers * 64
    assert states.numel() == rans.STATE_BYTES * lanes
    assert counts.numel() == 64 * (10 * (31 - 1) + 2 * (15 - 1))
    assert tops.shape == (layers, tokens)
    half = torch.tensor([15] * 10 + [7] * 2)[:, None, None, None]
    codes = (x * half / x.abs().amax(dim=(2, 3), keepdim=True)).round().transpose(0, 1).flatten(1)
    entropy = 0.0
    for lane in codes.t():
        share_of = np.unique(lane.numpy(), return_counts=True)[1] / tokens
        entropy -= tokens * float((share_of * np.log2(share_of)).sum())
    assert entropy * 0.98 - 40 * lanes < 16 * len(words) < entropy * 1.05


def test_deltas_are_to_the_first_of_ten_tokens_as_it_is_decoded():
    site = Site(layers=2, heads=2, dim=16, key=True)
    base = 50 * draw(2, 1, 2, 16, seed=6)
    x = base + 0.1 * draw(2, 35, 2, 16, seed=7)
    plain = through(cachegen.make(Setting("cachegen", 1), site), x)
    delta = through(cachegen.make(Setting("cachegen", 1, frozenset({"delta"})), site), x)
    rest = [token for token in range(35) if token % 10]
    assert share(delta[:, rest], x[:, rest]) < share(plain[:, rest], x[:, rest]) / 20
    anchors = x[:, ::10]
    top = anchors.abs().amax(dim=(2, 3), keepdim=True)
    assert ((delta[:, ::10] - anchors).abs() <= top * (0.5 / 127 + 1e-3)).all()


@pytest.mark.parametrize("tokens", [1, 2, 10, 11])
@pytest.mark.parametrize("options", [(), ("delta",)])
def test_few_tokens_are_coded_too(tokens, options):
    site = Site(layers=2, heads=1, dim=8, key=False)
    x = draw(2, tokens, 1, 8)
    assert share(through(cachegen.make(Setting("cachegen", 3, frozenset(options)), site), x), x) < 0.02


# fp8


def test_fp8_is_the_nearest_of_e4m3():
    """Against all its 254 numbers, written out."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3 & 15).astype(int), bits & 7
    values = np.where(exponent, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    values = np.where(bits & 128, -values, values)[(bits & 127) != 127]
    x = draw(2, 30, 2, 16)
    x[1] *= 1e-3
    got = through(fp8.make(Setting("fp8"), Site(layers=2, heads=2, dim=16, key=True)), x)
    for layer in range(2):
        scale = float(x[layer].abs().max()) / 448
        scaled = x[layer].flatten().double().numpy() / scale
        nearest = np.abs(scaled[:, None] - values).min(axis=1)
        found = np.abs(got[layer].flatten().double().numpy() / scale - scaled)
        assert (found <= nearest + 1e-4).all()


# around all


def test_a_mean_is_taken_out_of_each_channel():
    site = Site(layers=2, heads=2, dim=64, key=True)
    x = draw(2, 256, 2, 64) + 30 * draw(2, 1, 2, 64, seed=1)
    inner = make_tq(Setting("tq", 3), site)
    assert share(through(inner, x), x) == pytest.approx(0.0334, rel=0.3)
    assert share(through(Centred(site, inner), x), x) < 1e-4
    mean = Centred(site, inner).encode(x)[0]
    assert torch.equal(mean, x.mean(dim=1).half())


def test_rotated_dimensions_and_others_do_not_mix():
    """One part a hundred times the other: with norms of their own both come back."""
    site = dataclasses.replace(Site(layers=1, heads=1, dim=48, key=True), rope=World(kv()).rope)
    x = draw(1, 500, 1, 48)
    x[..., :16] *= 100
    method = make_tq(Setting("tq", 4), site)
    assert isinstance(method, Split)
    got = through(method, x)
    assert share(got[..., :16], x[..., :16]) < 0.012
    assert share(got[..., 16:], x[..., 16:]) < 0.012
    assert math.isclose(method.fields(500)[-1].item, 1000)
