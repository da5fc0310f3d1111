"""Multiples of a step through their packed form and back; widths by brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.codec.uniform import LIMIT, InTorch
from kvtcd.codec.widths import Widths

SPREAD = torch.tensor([40.0, 2.0, 1.29, 0.3, 0.25, 0.05, 0.157, 0.12, 0.2, 0.1, 0.0])
WIDTHS = {8: [0, 1], 4: [2, 3], 2: [4, 8], 1: [6, 7]}
IN_TORCH = InTorch()


def test_each_component_gets_the_width_of_its_spread():
    widths = Widths.of(SPREAD, 1.0)
    assert {bits: rows.tolist() for bits, rows in widths.rows.items()} == WIDTHS
    assert widths.rank == 9
    assert widths.uncoded.tolist() == [5]
    assert widths.order.tolist() == [6, 7, 4, 8, 2, 3, 0, 1]
    assert widths.sizes(9) == {1: 2 * 2, 2: 2 * 3, 4: 2 * 5, 8: 2 * 9}
    coarser = Widths.of(SPREAD, 100.0)
    assert {bits: rows.tolist() for bits, rows in coarser.rows.items()} == {4: [0]}
    nothing = Widths.of(SPREAD, 1e6)
    assert (nothing.rank, nothing.rows) == (0, {})


@given(
    data=st.data(),
    tokens=st.integers(1, 40),
    reach=st.sampled_from([0, 1, 3, 20, 300, LIMIT]),
)
def test_every_multiple_comes_back(data, tokens, reach):
    widths = Widths.of(SPREAD, 1.0)
    draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
    whole = draw.integers(-reach, reach + 1, (widths.rank, tokens))
    whole[5] = 0  # not coded
    steps = torch.from_numpy(2.0 ** draw.integers(-3, 4, tokens)).float()
    order = torch.from_numpy(draw.permutation(tokens))
    coefficients = torch.from_numpy(whole).float() * steps
    coded = IN_TORCH.quantise(coefficients, steps, order, widths)
    assert torch.equal(coded.lost, torch.zeros(tokens))
    restored = IN_TORCH.restore(coded.codes, coded.escapes, steps, order, widths)
    assert torch.equal(restored.coefficients, coefficients)
    beyond = 0
    for bits, rows in WIDTHS.items():
        zigzag = np.where(whole[rows] < 0, -2 * whole[rows] - 1, 2 * whole[rows])
        beyond += int((zigzag >= 2**bits - 1).sum())
    assert coded.found.tolist() == [beyond, 0]
    assert coded.escapes.shape == (2, beyond)
    assert coded.codes.numel() == sum(widths.sizes(tokens).values())
    assert restored.asked.item() == beyond


def test_tokens_are_packed_in_the_order_asked_for():
    widths = Widths.of(torch.tensor([40.0]), 1.0)
    order = torch.tensor([2, 0, 1])
    coded = IN_TORCH.quantise(torch.tensor([[1.0, 2.0, 300.0]]), torch.ones(3), order, widths)
    assert coded.codes.tolist() == [255, 2, 4]
    assert coded.escapes.tolist() == [[(600 - 255) & 255], [(600 - 255) >> 8]]


@pytest.mark.parametrize(("value", "multiple"), [(0.24, 0), (0.26, 1), (0.25, 0), (0.75, 2), (-0.26, -1)])
def test_rounding_is_plain_and_ties_are_even(value, multiple):
    widths, steps, order = Widths.of(torch.tensor([40.0]), 1.0), torch.tensor([0.5]), torch.tensor([0])
    coded = IN_TORCH.quantise(torch.tensor([[value]]), steps, order, widths)
    restored = IN_TORCH.restore(coded.codes, coded.escapes, steps, order, widths)
    assert restored.coefficients.item() == multiple * 0.5
    assert coded.lost.item() == pytest.approx((value - multiple * 0.5) ** 2, abs=1e-7)


@pytest.mark.parametrize(("component", "coded"), [(0, True), (5, False)])
@pytest.mark.parametrize("multiple", [LIMIT, LIMIT + 1, -LIMIT, -LIMIT - 1, 1e30, -np.inf])
def test_what_is_too_large_is_found_whether_it_is_coded_or_not(component, coded, multiple):
    widths = Widths.of(SPREAD, 1.0)
    coefficients = torch.zeros(widths.rank, 3)
    coefficients[component, 1] = multiple
    found = IN_TORCH.quantise(coefficients, torch.ones(3), torch.arange(3), widths).found.tolist()
    assert bool(found[1]) == (abs(multiple) > LIMIT)
    if abs(multiple) == LIMIT:
        assert found[0] == int(coded)


def test_where_nothing_is_coded_there_is_nothing():
    widths = Widths.of(SPREAD, 1e6)
    steps, order = torch.ones(5), torch.arange(5)
    coded = IN_TORCH.quantise(torch.empty(0, 5), steps, order, widths)
    assert (coded.codes.numel(), coded.escapes.shape, coded.found.tolist()) == (0, (2, 0), [0, 0])
    assert coded.lost.tolist() == [0.0] * 5
    assert IN_TORCH.restore(coded.codes, coded.escapes, steps, order, widths).coefficients.shape == (0, 5)


@pytest.mark.parametrize("change", [-1, 1])
def test_codes_say_how_many_escapes_they_ask_for_whatever_is_there(change):
    widths = Widths.of(SPREAD, 1.0)
    coefficients = torch.zeros(widths.rank, 9)
    coefficients[0, 3] = coefficients[6, 2] = 1000.0
    steps, order = torch.ones(9), torch.arange(9)
    coded = IN_TORCH.quantise(coefficients, steps, order, widths)
    assert coded.escapes.shape == (2, 2)
    wrong = torch.zeros(2, 2 + change, dtype=torch.uint8)
    assert IN_TORCH.restore(coded.codes, wrong, steps, order, widths).asked.item() == 2
