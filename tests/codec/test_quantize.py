"""The rule of each width, written out again in plain Python and float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.codec.quantize import MAX_RANGE, dequantize, quantize, ranges

values = st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=16)


def half(x: float) -> float:
    """Round to float16."""
    return float(torch.tensor(x, dtype=torch.float64).to(torch.float16))


def reference(x: list[float], bits: int) -> list[float]:
    """Code and decode one group of one token."""
    if bits == 8:
        scale = max(half(max(abs(v) for v in x) / 448), 2.0**-24)
        return [e4m3(v / scale) * scale for v in x]
    low = half(min(x))
    scale = max(half((max(x) - min(x)) / (2**bits - 1)), 2.0**-24)
    return [min(max(round((v - low) / scale), 0), 2**bits - 1) * scale + low for v in x]


def e4m3(v: float) -> float:
    """Nearest E4M3 number, ties to even: 3 mantissa bits, smallest exponent -6, largest value 448."""
    if v == 0:
        return 0.0
    step = 2.0 ** (max(math.floor(math.log2(abs(v))), -6) - 3)
    return min(max(round(v / step) * step, -448.0), 448.0)


def coded(x: torch.Tensor, bits: int) -> torch.Tensor:
    scale, shift = ranges(x, bits)
    assert scale.dtype == shift.dtype == torch.float16
    codes = quantize(x, scale, shift, bits)
    assert codes.dtype == torch.uint8
    assert bits == 8 or int(codes.max()) < 2**bits
    return dequantize(codes, scale, shift, bits)


@given(x=values, bits=st.sampled_from([2, 4, 8]))
def test_coding_follows_the_rule(x, bits):
    got = coded(torch.tensor(x).view(1, -1, 1), bits).flatten().tolist()
    want = reference([float(torch.tensor(v)) for v in x], bits)
    # One code apart is allowed where float32 division rounds a tie the other way.
    step = (max(x) - min(x)) / (2**bits - 1) if bits < 8 else max(abs(v) for v in x) / 14
    for v, g, w in zip(x, got, want, strict=True):
        assert g == pytest.approx(w, rel=1e-5, abs=1e-5) or abs(abs(g - v) - abs(w - v)) <= 1e-3 * step + 1e-6


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_group_and_token_has_its_own_range(bits):
    x = torch.randn(5, 16, 11) * torch.logspace(-3, 3, 5)[:, None, None] * torch.logspace(0, 2, 11)
    whole = coded(x, bits)
    for n in range(5):
        for t in range(11):
            alone = coded(x[n : n + 1, :, t : t + 1], bits)
            assert torch.equal(alone[0, :, 0], whole[n, :, t])


@pytest.mark.parametrize(("bits", "bound"), [(2, 1 / 6), (4, 1 / 30)])
def test_integer_error_is_at_most_half_a_step_of_the_range(bits, bound):
    x = torch.randn(50, 64, 20)
    spread = x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
    assert ((coded(x, bits) - x).abs() <= bound * spread * 1.01 + 2e-3).all()


def test_e4m3_error_is_a_sixteenth_of_the_value():
    x = torch.randn(50, 64, 20)
    peak = x.abs().amax(1, keepdim=True)
    assert ((coded(x, 8) - x).abs() <= x.abs() / 15.5 + peak * 2.0**-10 / 448).all()


def test_all_e4m3_codes_decode_to_what_torch_says():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(1, -1, 1)
    one, zero = torch.ones(1, 1, dtype=torch.float16), torch.zeros(1, 1, dtype=torch.float16)
    assert torch.equal(dequantize(codes, one, zero, 8), codes.view(torch.float8_e4m3fn).to(torch.float32))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("constant", [0.0, 1.5, -300.0, 1e-7])
def test_a_constant_group_survives(bits, constant):
    got = coded(torch.full((1, 16, 3), constant), bits)
    assert torch.allclose(got, torch.full_like(got, constant), rtol=1e-3, atol=2.0**-23)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values_beyond_float16_come_back_as_its_ends_and_stay_finite(bits):
    x = torch.tensor([-1e30, -7e4, 0.0, 7e4, 1e30]).view(1, -1, 1)
    got = coded(x, bits)
    assert torch.isfinite(got).all()
    assert bits != 8 or got[0, [0, 4], 0].tolist() == [-448 * MAX_RANGE, 448 * MAX_RANGE]
    for i in range(5):
        alone = coded(x[:, i : i + 1], 2)
        assert float(alone) == float(x[0, i, 0].clamp(-MAX_RANGE, MAX_RANGE))


def test_ties_go_to_the_even_code():
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.0]).view(1, -1, 1)
    assert coded(x, 2).flatten().tolist() == [0, 0, 2, 2, 3]
