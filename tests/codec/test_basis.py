"""Against numpy's exact singular value decomposition in float64."""

import numpy as np
import pytest
import torch

from kvtcd.codec.basis import Moments, principal


def sample(n: int, p: int, decay: float, offset: float = 0.0) -> torch.Tensor:
    mix = torch.linalg.qr(torch.randn(p, p)).Q * torch.arange(1, p + 1) ** -decay
    return torch.randn(n, p) @ mix.t() + offset * torch.randn(p)


def gathered(rows: torch.Tensor, batch: int) -> Moments:
    first, *rest = rows.split(batch)
    moments = Moments.from_rows(first)
    for part in rest:
        moments.add(part)
    return moments


def exact(rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Right singular vectors, a row each, and variances, of the centred rows."""
    x = rows.double().numpy()
    _, s, vt = np.linalg.svd(x - x.mean(0), full_matrices=False)
    return vt, s**2 / len(x)


def test_mean_and_covariance_are_those_of_all_rows():
    rows = sample(1000, 30, 0.5, offset=4.0)
    moments = gathered(rows, 130)
    want = np.cov(rows.double().numpy().T, bias=True)
    assert int(moments.count) == 1000
    assert np.allclose(moments.mean, rows.double().mean(0), atol=1e-5)
    assert np.allclose(moments.covariance(), want, atol=1e-4 * want.max())


def test_a_giant_offset_does_not_drown_the_signal():
    """As in keys with a bias: 99.99 % of the energy is constant."""
    rows = sample(2000, 24, 0.3) + 300.0 * torch.randn(24)
    want = np.cov(rows.double().numpy().T, bias=True)
    assert np.allclose(gathered(rows, 200).covariance(), want, atol=2e-4 * want.max())


def test_merging_is_having_seen_both():
    left, right = sample(300, 20, 0.5, offset=2.0), sample(500, 20, 0.5, offset=-2.0)
    merged = gathered(left, 100)
    merged.merge(gathered(right, 250))
    together = gathered(torch.cat((left, right)), 100)
    assert int(merged.count) == 800
    assert torch.allclose(merged.mean, together.mean, atol=1e-5)
    assert torch.allclose(merged.covariance(), together.covariance(), atol=1e-3)


@pytest.mark.parametrize(("p", "rank"), [(40, 40), (40, 12), (300, 64), (300, 290)])
def test_the_leading_subspace_is_that_of_the_exact_decomposition(p, rank):
    rows = sample(4 * p, p, 0.8, offset=1.0)
    vt, variances = exact(rows)
    basis, spectrum = principal(gathered(rows, 97), rank)
    assert basis.shape == (rank, p)
    assert np.allclose(spectrum, variances[:rank], rtol=2e-3, atol=1e-5 * variances[0])
    captured = float((torch.from_numpy(vt[:rank]).float() @ basis.t()).square().sum())
    assert captured > rank * (1 - 2e-3)
    for leading in range(3):
        assert abs(float(basis[leading] @ torch.from_numpy(vt[leading]).float())) > 0.999
    assert torch.allclose(basis @ basis.t(), torch.eye(rank), atol=1e-4)


def test_subspace_iteration_captures_the_energy_of_a_slow_spectrum():
    """Variances fall by 1/i over 1,000 components: they mix at the edge, the energy must not suffer."""
    rows = sample(3000, 1000, 0.5)
    _, variances = exact(rows)
    _, spectrum = principal(gathered(rows, 1000), 200)
    assert float(spectrum.sum()) > 0.999 * variances[:200].sum()


def test_one_power_iteration_less_than_needed_is_visible():
    """The control of the test above: without power iterations much energy is missed."""
    rows = sample(3000, 1000, 0.5)
    _, variances = exact(rows)
    _, spectrum = principal(gathered(rows, 1000), 200, iterations=0, oversample=0)
    assert float(spectrum.sum()) < 0.97 * variances[:200].sum()


def test_equal_input_gives_equal_output_and_signs_are_fixed():
    moments = gathered(sample(200, 50, 0.5), 50)
    basis, _ = principal(moments, 10, seed=3)
    again, _ = principal(moments, 10, seed=3)
    other, _ = principal(moments, 10, seed=4)
    assert torch.equal(basis, again)
    assert torch.allclose(basis, other, atol=0.02)
    assert (basis.gather(1, basis.abs().argmax(1, keepdim=True)) > 0).all()


def test_a_row_that_counts_twice_is_a_row_that_comes_twice() -> None:
    draw = torch.Generator().manual_seed(3)
    rows, weights = torch.randn(40, 6, generator=draw) + 5, torch.tensor([1.0, 2.0, 3.0, 0.0] * 10)
    weighed = Moments.from_rows(rows[:8], weights[:8])
    weighed.add(rows[8:], weights[8:])
    repeated = Moments.from_rows(rows.repeat_interleave(weights.long(), dim=0))
    assert float(weighed.count) == 60
    assert torch.allclose(weighed.mean, repeated.mean, atol=1e-5)
    assert torch.allclose(weighed.covariance(), repeated.covariance(), atol=1e-4)
