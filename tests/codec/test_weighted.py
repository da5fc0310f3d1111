"""The weighted basis, against definitions worked out in float64, and its part of a profile's file."""

import dataclasses

import pytest
import torch
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from support.codec_world import World, kv, mla

from kvtcd.codec.profile import load
from kvtcd.codec.weighted import by_head, root
from kvtcd.core.errors import BadField
from kvtcd.core.layout import Dtype

WORLD = World(kv(Dtype.F32))


@pytest.fixture(scope="module")
def made():
    return WORLD.profile()


def dense(root_):
    """A block-diagonal matrix of all heads, float64 ``[p, p]``."""
    return torch.block_diag(*root_.double().flatten(0, 1))


@pytest.mark.parametrize("world", [WORLD, World(mla())], ids=["kv", "mla"])
def test_the_root_squares_to_moment_and_ridge(world):
    for name, moment in world.weights().items():
        got = root(moment).double()
        eye = torch.eye(moment.shape[-1], dtype=torch.float64)
        want = moment.double()
        want = want + 0.05 * want.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * eye
        assert torch.allclose(got @ got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max())), name
        assert torch.equal(got, got.mT)


def test_a_head_without_gradients_still_has_a_root():
    moment = WORLD.weights()["k"].clone()
    moment[1, 0] = 0.0
    found = root(moment)
    assert torch.isfinite(torch.linalg.inv(found)).all()
    assert torch.isfinite(root(torch.zeros_like(moment))).all()


def test_each_head_meets_its_own_matrix(made):
    rows = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    got = by_head(rows, made[0].weighted["k"].root)
    assert torch.allclose(got.double(), rows.double() @ dense(made[0].weighted["k"].root), atol=1e-4)


def test_components_are_those_of_the_weighted_rows(made):
    rows = WORLD.rows(600, seed=100)
    for name, own in made[0].weighted.items():
        x = rows[name].double()
        y = (x - x.mean(0)) @ dense(own.root)
        variances = torch.linalg.eigvalsh(y.t() @ y / len(y)).flip(0)
        along = (y @ own.basis.double().t()).square().mean(0)
        kept = variances > 1e-4 * variances[0]
        assert torch.allclose(along[kept], variances[kept], rtol=0.02)


def test_spread_is_the_mean_magnitude_on_held_out_rows_in_steps_of_their_classes(made):
    samples = {name: x[:200].double() for name, x in WORLD.rows(600, seed=100).items()}
    profile = made[0]
    centred = {name: x - profile.streams[name].mean.double() for name, x in samples.items()}
    offsets = sum(centred[n] @ profile.weighted[n].tokens.double().t() for n in centred)
    for index, (name, own) in enumerate(profile.weighted.items()):
        classes = (offsets[:, index] + float(own.level)).round()
        c = centred[name] @ dense(own.root) @ own.basis.double().t()
        want = (c * 2.0 ** (classes / 2)[:, None]).abs().mean(0)
        assert torch.allclose(own.spread.double(), want, rtol=0.02, atol=1e-3 * float(want.max()))
        assert abs(float((offsets[:, index] + float(own.level)).mean())) < 1e-3


def test_decoding_undoes_encoding_within_the_basis(made):
    for own in made[0].weighted.values():
        transform = own.transform(torch.device("cpu"))
        c = torch.randn(len(own.basis), 7, generator=torch.Generator().manual_seed(1))
        out = torch.empty((3, 7, 2, 16))
        transform.inverse(c, None, out)
        again = transform.forward(transform.centred(out, None), len(own.basis))
        assert (again - c).abs().max() < 0.05 * c.abs().max()


def test_the_sketch_estimates_what_the_first_components_leave_out(made):
    rows = WORLD.rows(400, seed=55)["k"]
    own = made[0].weighted["k"]
    mean = own.mean
    y = (rows - mean).double() @ dense(own.root)
    for rank in (0, 3, 12):
        basis = own.basis[:rank].double()
        left = (y - y @ basis.t() @ basis).square().sum(1)
        estimate = ((rows - mean) @ own.sketch(rank).t()).square().sum(1)
        assert float(estimate.mean()) == pytest.approx(float(left.mean()), rel=0.15)


def set_(name, value):
    def change(tensors):
        tensors[name] = value(tensors[name])

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("weighted.k.root"),
        lambda t: [t.pop(name) for name in list(t) if name.startswith("weighted.v.")],
        set_("weighted.k.basis", lambda b: b.float()),
        set_("weighted.k.basis", lambda b: b * 2),
        set_("weighted.k.basis", lambda b: b[:-1].contiguous()),
        set_("weighted.v.spread", lambda s: s * float("nan")),
        set_("weighted.v.root", lambda r: -r),
        set_("weighted.v.root", lambda r: r + torch.eye(16).roll(1, 0)),
        set_("weighted.v.root", lambda r: r[:2].contiguous()),
        set_("weighted.k.tokens", lambda t: t[:1].contiguous()),
        set_("weighted.k.level", lambda _: torch.zeros(2)),
    ],
)
def test_a_profile_with_a_weighted_basis_out_of_place_is_refused(made, tmp_path, change):
    data = made[1]
    tensors = read_tensors(data)
    size = int.from_bytes(data[:8], "little")
    import json  # noqa: PLC0415 - only here

    body = json.loads(data[8 : 8 + size])["__metadata__"]
    change(tensors)
    path = tmp_path / "p.safetensors"
    path.write_bytes(write_tensors(tensors, body))
    with pytest.raises(BadField):
        load(path)


def test_a_weighted_basis_survives_its_file(made, tmp_path):
    path = tmp_path / "p.safetensors"
    path.write_bytes(made[1])
    for name, own in load(path).weighted.items():
        for field in dataclasses.fields(own):
            if field.init:
                assert torch.equal(getattr(own, field.name), getattr(made[0].weighted[name], field.name))


def test_a_trimmed_basis_ends_with_the_last_component_that_is_coded(made):
    own = made[0].weighted["k"]
    spread = own.spread.clone()
    spread[5:] = 1.0
    spread[9] = 5.0
    trimmed = dataclasses.replace(own, spread=spread).trimmed(step=10.0)
    assert (len(trimmed.basis), len(trimmed.spread)) == (10, 10)
    assert torch.equal(trimmed.basis, own.basis[:10])
