"""What is usual of a head, against variances worked out from rows that follow the basis."""

import dataclasses

import pytest
import torch
from support.codec_world import World, kv, mla

from kvtcd.codec.usual import SAMPLE, Usual
from kvtcd.codec.weighted import Weighted, by_head
from kvtcd.core.layout import Dtype

WORLDS = {"kv": World(kv(Dtype.F32)), "mla": World(mla(Dtype.F32))}
CPU = torch.device("cpu")


@pytest.fixture(params=WORLDS, scope="module")
def world(request):
    return WORLDS[request.param]


@pytest.fixture(scope="module")
def made(world):
    return world.profile()[0]


def centred(world, made, name, seed=77, count=400):
    return world.rows(count, seed=seed)[name] - made.weighted[name].mean


def test_rows_like_those_of_calibration_hold(world, made):
    for name, own in made.weighted.items():
        for seed in range(70, 75):
            assert Usual.of(own, CPU).holds(centred(world, made, name, seed)), name


@pytest.mark.parametrize("rank", [24, 16, 4])
def test_variances_of_features_are_between_the_bounds(rank):
    draw = torch.Generator().manual_seed(3)
    features, dim = 24, 8
    basis = torch.linalg.qr(torch.randn(features, features, generator=draw)).Q
    deviations = torch.logspace(1, -1, features)
    roots = torch.randn(3, 1, dim, dim, generator=draw)
    roots = roots @ roots.mT + torch.eye(dim)
    normal = torch.randn(20_000, features, generator=draw)
    rows = by_head(normal * deviations @ basis, torch.linalg.inv(roots))
    spread = deviations * (2 / torch.pi) ** 0.5
    own = Weighted(
        torch.zeros(features),
        basis[:rank].half(),
        roots,
        spread[:rank],
        torch.zeros(1, features),
        torch.zeros(1),
    )
    usual = Usual.of(own, CPU)
    true = rows.square().mean(0).view(3, dim)
    floor = 0.025 * true.mean(-1, keepdim=True)
    assert (usual.least <= 1.05 * true + floor).all()
    assert (usual.most >= 0.95 * true).all()
    if rank == features:
        assert torch.allclose(usual.least, usual.most, rtol=1e-2)
        assert (usual.most <= 1.05 * true + floor).all()


def test_a_basis_of_few_components_raises_no_alarm(world, made):
    for name, own in made.weighted.items():
        few = dataclasses.replace(own, basis=own.basis[:4], spread=own.spread[:4])
        assert Usual.of(few, CPU).holds(centred(world, made, name)), name


@pytest.mark.parametrize(
    "change",
    [lambda head: head.mul_(4), lambda head: head.zero_(), lambda head: head.add_(4 * head.std())],
    ids=["scaled", "nothing", "moved"],
)
def test_one_head_that_is_not_as_usual_is_seen(world, made, change):
    for name, own in made.weighted.items():
        rows = centred(world, made, name)
        usual = Usual.of(own, CPU)
        heads, dim = usual.least.shape
        change(rows.view(-1, heads, dim)[:, heads // 2])
        assert not usual.holds(rows), name


def test_a_few_tokens_say_too_little(made):
    own = made.weighted[next(iter(made.weighted))]
    rows = torch.full((SAMPLE, own.basis.shape[1]), 1e4)
    assert Usual.of(own, CPU).holds(rows[:-1])
    assert not Usual.of(own, CPU).holds(rows)
