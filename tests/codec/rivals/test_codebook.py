"""Codebooks and distortions against those that others have published."""

import pytest
import torch

from kvtcd.codec.rivals.codebook import beta, gaussian

LEVELS = {
    (1, 64): [0.801007],
    (1, 128): [0.799444],
    (1, 256): [0.798664],
    (2, 64): [0.452119, 1.499975],
    (2, 128): [0.452453, 1.505193],
    (2, 256): [0.452618, 1.507805],
    (3, 64): [0.243753, 0.750658, 1.329343, 2.111311],
    (3, 128): [0.244425, 0.753330, 1.336599, 2.131471],
    (3, 256): [0.244760, 0.754667, 1.340247, 2.141669],
    (4, 64): [0.127352, 0.384718, 0.650494, 0.931894, 1.239404, 1.590849, 2.023310, 2.646370],
    (4, 128): [0.127873, 0.386381, 0.653619, 0.937097, 1.247770, 1.604343, 2.045925, 2.688859],
    (4, 256): [0.128134, 0.387214, 0.655187, 0.939714, 1.251989, 1.611168, 2.057411, 2.710567],
}
"""Upper half, times the root of the dimensions; those of 128 are in the codebooks of 0xSero/turboquant."""
MAX_1960 = {
    1: [0.7979],
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}
"""Max, Quantizing for Minimum Distortion, table I."""
DISTORTIONS = {
    64: [0.358387, 0.114526, 0.033391, 0.009132],
    80: [0.359389, 0.115115, 0.033620, 0.009204],
    96: [0.360056, 0.115508, 0.033773, 0.009253],
    128: [0.360889, 0.116000, 0.033966, 0.009315],
    256: [0.362136, 0.116740, 0.034256, 0.009408],
    576: [0.362827, 0.117152, 0.034418, 0.009459],
}
GAUSSIAN = [0.363380, 0.117482, 0.034548, 0.009501, 2.50467e-3, 6.4424e-4, 1.63478e-4, 4.12247e-5]


@pytest.mark.parametrize(("bits", "dim"), LEVELS)
def test_levels_are_those_that_are_published(bits, dim):
    levels = beta(bits, dim).levels * dim**0.5
    assert levels[2 ** (bits - 1) :].tolist() == pytest.approx(LEVELS[bits, dim], rel=1e-4)
    assert torch.equal(levels, -levels.flip(0))


@pytest.mark.parametrize("bits", MAX_1960)
def test_levels_of_a_normal_coordinate_are_those_of_max(bits):
    assert gaussian(bits).levels[2 ** (bits - 1) :].tolist() == pytest.approx(MAX_1960[bits], rel=5e-4)


@pytest.mark.parametrize("dim", DISTORTIONS)
def test_distortions_are_those_that_are_published(dim):
    found = [beta(bits, dim).distortion for bits in range(1, 5)]
    assert found == pytest.approx(DISTORTIONS[dim], rel=1e-4)


def test_the_codebook_in_a_file_of_another_program_is_matched():
    """`codebook_d256_b4.json` of 0xSero/turboquant, which stopped a little before it converged."""
    found = beta(4, 256)
    published = [
        0.0080040506, 0.0241882281, 0.0409291597, 0.0587061675,
        0.0782193963, 0.1006663658, 0.1285573497, 0.1693834024,
    ]  # fmt: skip
    assert found.levels[8:].tolist() == pytest.approx(published, rel=6e-4)
    assert found.distortion == pytest.approx(0.009407533529, rel=1e-6)


def test_distortions_of_a_normal_coordinate_are_those_that_are_published():
    assert [gaussian(bits).distortion for bits in range(1, 8)] == pytest.approx(GAUSSIAN[:7], rel=1e-4)


@pytest.mark.parametrize("bits", range(1, 8))
def test_distortion_is_between_its_bounds(bits):
    """Shannon's below and Zador's, as TurboQuant has it in theorem 1, above: of a whole vector."""
    found = beta(bits, 128).distortion
    assert 4.0**-bits <= found <= 3**0.5 * torch.pi / 2 * 4.0**-bits


def test_a_value_gets_the_nearest_level():
    book = gaussian(4)
    x = torch.linspace(-5, 5, 2001)
    nearest = (x[:, None] - book.levels).abs().argmin(dim=1)
    codes = book.nearest(x)
    assert ((book.values(codes) - x).abs() <= (book.levels[nearest] - x).abs() + 1e-6).all()
    assert codes.dtype == torch.uint8


def test_few_dimensions_have_a_codebook_too():
    for dim in (1, 2, 3, 4):
        book = beta(3, dim)
        assert book.levels.diff().min() > 0
        assert 0 < book.distortion < 0.05
