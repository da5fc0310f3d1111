"""Schemes made of factors, against the codecs of the daemon, plain loops, and what the papers prove."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtcd.codec.rivals.codebook import beta, gaussian
from kvtcd.codec.rivals.draws import Draw
from kvtcd.codec.rivals.method import Site
from kvtcd.codec.rivals.rotation import haar, hadamard
from kvtcd.codec.rivals.sketch import Sketch
from kvtcd.codec.rivals.tq import Tq
from kvtcd.codec.rivals.tq_prod import TqProd
from kvtcd.lab.ablate.levels import fitted
from kvtcd.lab.ablate.measures import of_keys, of_output, of_values
from kvtcd.lab.ablate.regimes import REGIMES, Problem, Shape, draw
from kvtcd.lab.ablate.schemes import EIGHT, NAMED, factors, grid
from kvtcd.lab.ablate.sides import KEYS, VALUES, Side, allocated, band, code
from kvtcd.lab.ablate.spread import split
from kvtcd.lab.ablate.twins import divergences

SHAPE = Shape(dim=32, tokens=48, queries=4, rows=128)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return draw("fattail", SHAPE, seed=1, trials=range(3))


def coded(side: Side, problem: Problem, bits: int = 3, which: int = KEYS):
    return code(side, which, problem.keys, problem.key_rows, bits=bits, seeds=problem.seeds)


@pytest.mark.parametrize("scale", ["raw", "norm", "unbiased"])
@pytest.mark.parametrize("rotation", ["rht1", "rht3", "haar"])
def test_with_the_factors_of_tq_it_is_the_codec_of_the_daemon(problem, scale, rotation):
    found = coded(Side(rotation=rotation, scale=scale), problem)
    for seed, keys, decoded in zip(problem.seeds, problem.keys, found.decoded, strict=True):
        turn = (
            haar(32, Draw(seed, 0)) if rotation == "haar" else hadamard(32, Draw(seed, 0), int(rotation[-1]))
        )
        method = Tq(Site(1, 1, 32, key=True), 3, turn, scale)
        want = method.decode(method.encode(keys[None, :, None]), 48)[0, :, 0]
        assert torch.allclose(decoded, want, atol=1e-5)
    assert found.bits == 3 * 32 + 16


def test_with_a_sketch_it_is_tq_prod(problem):
    found = coded(Side(correction="qjl"), problem)
    for seed, keys, decoded in zip(problem.seeds, problem.keys, found.decoded, strict=True):
        site = Site(1, 1, 32, key=True)
        coarse = Tq(site, 2, hadamard(32, Draw(seed, 0)))
        method = TqProd(site, coarse, Sketch.normal(32, 32, Draw(seed, 1)))
        want = method.decode(method.encode(keys[None, :, None]), 48)[0, :, 0]
        assert torch.allclose(decoded, want, atol=1e-5)
    assert found.bits == 3 * 32 + 2 * 16


def test_bits_count_all_that_is_stored_with_a_vector(problem):
    words = {
        Side(): 16, Side(normalise="none"): 0, Side(levels="uniform"): 32, Side(correction="full"): 16,
        Side(correction="qjl-orth"): 32, Side(normalise="channel-mean"): 16 + 16 * 32 / 48,
        Side(rotation="eigen", levels="gauss", allocation="fill"): 16,
        Side(rotation="eigen", levels="gauss", allocation="fill", normalise="none"): 16,
        Side(rotation="eigen", levels="gauss", allocation="band"): 16,
    }  # fmt: skip
    for side, side_bits in words.items():
        assert coded(side, problem).bits == pytest.approx(3 * 32 + side_bits), side


def test_components_are_rounded_one_by_one_as_a_loop_would(problem):
    side = Side(rotation="eigen", levels="gauss", allocation="fill")
    found = coded(side, problem).decoded[1]
    rows = problem.key_rows[1] / problem.key_rows[1].norm(dim=1, keepdim=True)
    variances, vectors = np.linalg.eigh((rows.T @ rows / len(rows)).double().numpy())
    variances, vectors = variances[::-1].copy(), vectors[:, ::-1]
    bits = [0] * 32
    for _ in range(3 * 32):
        place = max(range(32), key=lambda i: (variances[i] / 4 ** bits[i], -i))
        bits[place] += 1
    for token, key in enumerate(problem.keys[1].double().numpy()):
        norm = np.linalg.norm(key)
        total = np.zeros(32)
        for i in range(32):
            if bits[i]:
                levels = gaussian(bits[i]).levels.double().numpy()
                z = vectors[:, i] @ key / norm / variances[i] ** 0.5
                total += levels[np.abs(levels - z).argmin()] * variances[i] ** 0.5 * vectors[:, i]
        assert np.allclose(total * float(np.float16(norm)), found[token].numpy(), atol=2e-3 * norm)


def test_every_factor_can_be_had_and_changes_something(problem):
    plain = coded(Side(), problem).decoded
    for factor, words in factors().items():
        base = Side(rotation="eigen", levels="gauss") if factor == "allocation" else Side()
        for word in words:
            side = replace(base, **{factor: word})
            found = coded(side, problem).decoded
            assert torch.isfinite(found).all()
            assert side == Side() or not torch.equal(found, plain), word


def test_a_foreign_basis_is_that_of_the_other_side():
    problem = draw("lowrank_misalign", SHAPE, seed=2, trials=range(2))
    side = Side(rotation="eigen", levels="gauss", allocation="fill")
    own = code(side, VALUES, problem.values, problem.value_rows, bits=2, seeds=problem.seeds).decoded
    foreign = code(side, VALUES, problem.values, problem.key_rows, bits=2, seeds=problem.seeds).decoded
    assert (foreign - problem.values).norm() > 5 * (own - problem.values).norm()


def test_filling_the_first_components_keeps_their_sum():
    variances = torch.tensor([[64.0, 16.0, 4.0, 1.0, 0.5, 0.1, 0.1, 0.1]])
    assert band(variances[0]) == 2
    widths = allocated(variances, "band", 3, 0)
    assert widths.tolist() == [[4, 2, 3, 3, 3, 3, 3, 3]]
    assert allocated(variances, "fill", 3, 24).sum() == 24
    assert allocated(variances, "uniform", 3, 0).tolist() == [[3] * 8]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_of_a_normal_sample_lose_no_more_than_those_of_the_law(bits):
    sample = torch.randn(8192, generator=torch.Generator().manual_seed(3))
    found = fitted(sample, bits)
    lost = [
        float((book.values(book.nearest(sample)) - sample).square().mean())
        for book in (found, gaussian(bits))
    ]
    assert lost[0] < 1.005 * lost[1]
    assert found.distortion == pytest.approx(lost[0] / float(sample.square().mean()), rel=0.02)


def test_levels_of_a_sample_that_is_not_normal_lose_less():
    sample = torch.where(torch.arange(8192) % 2 == 0, 1.0, -3.0)
    assert fitted(sample, 1).levels.tolist() == pytest.approx([-3, 1])


@pytest.mark.parametrize("bits", [2, 4])
def test_distortion_on_the_sphere_is_that_of_the_codebook(bits):
    problem = draw("unit_sphere", Shape(dim=64, tokens=512, queries=2, rows=8), seed=3, trials=range(2))
    found = coded(Side(), problem, bits)
    error = of_keys(problem, found.decoded)["key_mse"]
    assert float(error.mean()) == pytest.approx(beta(bits, 64).distortion, rel=0.03)


@pytest.mark.parametrize("regime", REGIMES)
def test_trials_do_not_depend_on_which_are_drawn_with_them(regime):
    whole, part = (draw(regime, SHAPE, seed=7, trials=trials) for trials in (range(3), range(1, 2)))
    for name in ("keys", "values", "queries", "key_rows", "value_rows"):
        assert torch.equal(getattr(whole, name)[1:2], getattr(part, name)), name
    assert whole.seeds[1:2] == part.seeds
    assert len(set(whole.seeds)) == 3
    assert not torch.equal(draw(regime, SHAPE, seed=8, trials=range(1)).keys, whole.keys[:1])


def test_regimes_are_what_they_say():
    shape = Shape(dim=64, tokens=2000, queries=2, rows=2000)
    made = {regime: draw(regime, shape, seed=0, trials=range(1)) for regime in REGIMES}
    for regime, problem in made.items():
        energy = problem.keys.square().sum(dim=2).mean() / 64
        assert float(energy) == pytest.approx(1, rel=0.3 if regime == "fattail" else 0.1), regime
    assert made["unit_sphere"].keys.norm(dim=2).std() < 1e-4
    assert made["fattail"].keys.abs().max() > 20

    def basis(rows):
        return torch.linalg.eigh(rows[0].T @ rows[0]).eigenvectors[:, -8:]

    def overlap(problem):
        return float((basis(problem.key_rows).T @ basis(problem.value_rows)).square().sum() / 8)

    assert overlap(made["lowrank_aligned"]) > 0.99
    assert overlap(made["lowrank_misalign"]) < 0.01
    assert 0.02 < overlap(made["lowrank"]) < 0.5
    held = basis(made["lowrank"].key_rows)
    assert float((made["lowrank"].keys[0] @ held).square().sum() / made["lowrank"].keys.square().sum()) > 0.95


def test_measures_are_those_of_plain_loops(problem):
    decoded = problem.keys + 0.1 * torch.randn(problem.keys.shape, generator=torch.Generator().manual_seed(1))
    values = problem.values * 1.1
    found = {**of_keys(problem, decoded), **of_values(problem, values), **of_output(problem, decoded, values)}
    n, q, k, v = (x[0].double().numpy() for x in (decoded, problem.queries, problem.keys, problem.values))
    kl, agree, outs = [], [], []
    for query in q:
        p, r = (
            np.exp(x - x.max()) / np.exp(x - x.max()).sum()
            for x in (k @ query / 32**0.5, n @ query / 32**0.5)
        )
        kl.append((p * np.log(p / r)).sum())
        agree.append(p.argmax() == r.argmax())
        outs.append((p @ v, r @ v * 1.1))
    assert float(found["kl"][0]) == pytest.approx(np.mean(kl), rel=1e-5)
    assert float(found["top1"][0]) == np.mean(agree)
    true, got = (np.stack(x) for x in zip(*outs, strict=True))
    assert float(found["output"][0]) == pytest.approx(
        np.linalg.norm(got - true) / np.linalg.norm(true), rel=1e-4
    )
    assert float(found["value_mse"][0]) == pytest.approx(0.01, rel=1e-3)
    assert float(found["value_norm"][0]) == pytest.approx(0.1, rel=1e-4)
    assert float(found["value_direction"][0]) == pytest.approx(0, abs=1e-6)


def test_the_eight_schemes_and_every_factor_are_in_the_grid():
    whole = grid()
    assert set(NAMED) <= set(whole)
    assert EIGHT == ("plain-kv", "tq-kv", "tq-qkv", "tq-fkv", "tq-kqv", "tq-qkqv", "tq-kfv", "tq-fkfv")
    assert [name for name in NAMED if NAMED[name].sketches_values] == [
        "tq-kqv",
        "tq-qkqv",
        "tq-kfv",
        "tq-fkfv",
    ]
    assert len(set(whole.values())) == len(whole)
    for factor, words in factors().items():
        used = {getattr(side, factor) for scheme in whole.values() for side in (scheme.keys, scheme.values)}
        assert used == set(words)


def test_two_implementations_of_one_codec_are_one_codec():
    problem = draw("unit_sphere", Shape(dim=64, tokens=64, queries=4, rows=2), seed=4, trials=range(6))
    found = split(divergences(problem, 4))
    assert found.delta < 1e-3
    assert found.p_same < 1e-6
