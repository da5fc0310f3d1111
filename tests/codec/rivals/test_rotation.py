"""Rotations turn, come back from their seed, and make coordinates alike."""

import hashlib

import pytest
import torch

from kvtcd.codec.rivals.codebook import beta
from kvtcd.codec.rivals.draws import Draw
from kvtcd.codec.rivals.rotation import haar, hadamard


@pytest.mark.parametrize("dim", [1, 2, 16, 64, 128])
@pytest.mark.parametrize("turn", [haar, hadamard])
def test_a_rotation_keeps_lengths_and_angles(turn, dim):
    found = turn(dim, Draw(1, 0))
    assert (found @ found.t() - torch.eye(dim)).abs().max() < 1e-5


@pytest.mark.parametrize("dim", [40, 80, 96])
def test_a_haar_rotation_has_any_number_of_dimensions(dim):
    found = haar(dim, Draw(1, 0))
    assert (found @ found.t() - torch.eye(dim)).abs().max() < 1e-5


def test_one_round_is_walsh_hadamard_after_random_signs():
    """Entry (i, j) is the sign of column j, turned by the parity of the bits that i and j share."""
    found = hadamard(16, Draw(3, 0)) * 4
    signs = found[0]
    assert set(signs.tolist()) == {-1.0, 1.0}
    for i in range(16):
        for j in range(16):
            assert found[i, j] == signs[j] * (-1) ** (i & j).bit_count()


def test_random_numbers_are_the_same_for_ever():
    """The bits of PCG64 as NumPy fixed them; normal numbers to what libraries may round."""
    signs = Draw(7, 2).signs(64)
    assert hashlib.sha256(signs.to(torch.int8).numpy().tobytes()).hexdigest()[:16] == "7f24cdc8fa0e0811"
    assert Draw(7, 2).normals(4).tolist() == pytest.approx(
        [-0.597253574037, 1.089760739763, 2.575849454395, 0.240817925630], abs=1e-9
    )


def test_uses_of_one_seed_are_independent():
    first, second = Draw(1, 0).normals(4096), Draw(1, 1).normals(4096)
    assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 0.05
    assert not torch.equal(first, Draw(2, 0).normals(4096))
    assert float(first.mean()) == pytest.approx(0, abs=0.06)
    assert float(first.std()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("rounds", "bits", "least", "most"), [(1, 2, 0.24, 0.27), (3, 2, 0.10, 0.135), (3, 3, 0.03, 0.04)]
)
def test_one_round_is_not_enough_for_a_single_coordinate(rounds, bits, least, most):
    """At two bits a one-hot vector keeps .255 of its energy behind one round; theory for any is .116."""
    book, errors = beta(bits, 128), []
    for seed in range(20):
        turned = hadamard(128, Draw(seed, 0), rounds)[:, seed].contiguous()
        errors.append(float((book.values(book.nearest(turned)) - turned).square().sum()))
    assert least < sum(errors) / len(errors) < most
