"""KIVI's groups against the rule of its code, and what GEAR adds to them."""

import numpy as np
import pytest
import torch

from kvtcd.codec.rivals import narrow
from kvtcd.codec.rivals.gear import Gear, Outliers, make
from kvtcd.codec.rivals.groups import CHANNELS, TOKENS, Groups
from kvtcd.codec.rivals.method import F16, U8, Site
from kvtcd.codec.rivals.setting import Setting


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kivi(x: np.ndarray, bits: int, size: int, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values by `quant_and_pack_kcache` and `_vcache` of jy-yuan/KIVI, ranges in half precision."""
    moved = np.moveaxis(x.astype(np.float64), axis, -1)
    codes, values = np.zeros(moved.shape), np.zeros(moved.shape)
    for start in range(0, moved.shape[-1], size):
        group = moved[..., start : start + size]
        low, high = group.min(axis=-1, keepdims=True), group.max(axis=-1, keepdims=True)
        scale = np.maximum((high - low) / (2**bits - 1), 2.0**-24).astype(np.float16).astype(np.float64)
        low = low.astype(np.float16).astype(np.float64)
        code = np.clip(np.round((group - low) / scale), 0, 2**bits - 1)
        codes[..., start : start + size], values[..., start : start + size] = code, code * scale + low
    return np.moveaxis(codes, -1, axis), np.moveaxis(values, -1, axis)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("axis", [TOKENS, CHANNELS])
@pytest.mark.parametrize(("tokens", "dim"), [(64, 64), (50, 40), (1, 16), (33, 8)])
def test_codes_and_values_are_those_of_the_published_rule(bits, axis, tokens, dim):
    site = Site(layers=2, heads=3, dim=dim, key=axis == TOKENS)
    x = draw(2, tokens, 3, dim)
    groups = Groups(site, bits, 32, axis)
    arrays = groups.encode(x)
    codes, values = kivi(x.numpy(), bits, 32, axis)
    *packed, _, _ = arrays
    found = narrow.join(packed, bits, x.numel()).view(x.shape).numpy()
    # Float32 where this is float64: a code on the edge may fall to the other side.
    assert (found != codes).mean() < 2e-4
    assert np.abs(groups.decode(arrays, tokens).numpy() - values)[found == codes].max() < 1e-5
    assert [tuple(a.shape) for a in arrays] == [f.shape for f in groups.fields(tokens)]


@pytest.mark.parametrize(
    ("bits", "size", "error"),
    [(2, 32, 0.154), (2, 64, 0.203), (2, 128, 0.252), (4, 32, 0.0061), (4, 64, 0.0080), (4, 128, 0.0100)],
)
@pytest.mark.parametrize("axis", [TOKENS, CHANNELS])
def test_error_on_normal_values_is_that_which_is_known(bits, size, error, axis):
    x = draw(2, 512, 2, 128)
    groups = Groups(Site(2, 2, 128, key=True), bits, size, axis)
    found = (groups.decode(groups.encode(x), 512) - x).square().sum() / x.square().sum()
    assert float(found) == pytest.approx(error, rel=0.03)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_there_are_as_many_levels_as_codes(bits):
    """`bits^2 - 1` levels, as GEAR's code has them, is right at 2 and 4 alone."""
    x = torch.linspace(-1, 1, 64).view(1, 64, 1, 1)
    groups = Groups(Site(1, 1, 1, key=True), bits, 64, TOKENS)
    assert len(groups.decode(groups.encode(x), 64).unique()) == 2**bits


def test_tokens_of_one_group_are_not_exact():
    """A group of one token would be its own range, exact at the price of 2 bits and two numbers."""
    x = draw(1, 96, 1, 8)
    groups = Groups(Site(1, 1, 8, key=True), 2, 32, TOKENS)
    assert ((groups.decode(groups.encode(x), 96) - x).abs() > 1e-3).float().mean() > 0.5


@pytest.mark.parametrize("key", [True, False])
def test_outliers_come_back_exactly_and_in_their_place(key):
    site = Site(layers=2, heads=2, dim=64, key=key)
    x = draw(2, 256, 2, 64)
    x[0, 17, 1, 5], x[1, 200, 0, 63] = 100.0, -90.0
    arrays = make(Setting("gear", 2), site).encode(x)
    got = make(Setting("gear", 2), site).decode(arrays, 256)
    assert (got[0, 17, 1, 5], got[1, 200, 0, 63]) == (100.0, -90.0)
    values, places, rest = Outliers(site).take(x)
    length = 256 if key else 128
    assert values.shape[1] == places.shape[1] == 2 * int(0.01 * length)
    assert (values.dtype, places.dtype) == (F16, U8)
    exact = (got == x.half().float()).float().mean()
    assert exact >= values.shape[1] / length
    assert rest.abs().max() < 5


def test_low_rank_finds_what_has_four_components():
    """Groups of 7 bits miss little but the four directions put on top of them, far below their step."""
    site = Site(layers=1, heads=2, dim=64, key=True)
    method = make(Setting("gear", 2), site)
    assert isinstance(method, Gear)
    error = (draw(1, 2, 128, 4, seed=1) @ draw(1, 2, 4, 64, seed=2)) + 1e-4 * draw(1, 2, 128, 64, seed=3)
    left, right = method._low_rank(error)
    assert (left @ right.mT - error).norm() < 1e-3 * error.norm()
    best = torch.linalg.svdvals(draw(1, 2, 128, 64, seed=4)).square()
    noise = draw(1, 2, 128, 64, seed=4)
    left, right = method._low_rank(noise)
    assert (noise - left @ right.mT).square().sum() < 1.05 * best[..., 4:].sum()
