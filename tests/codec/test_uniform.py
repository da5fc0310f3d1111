"""Multiples of a step through their packed form and back; widths by brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.codec.uniform import LIMIT, Packed, multiples, packed, unpacked
from kvtcd.codec.widths import Widths
from kvtcd.core.errors import BadField

SPREAD = torch.tensor([40.0, 2.0, 1.29, 0.3, 0.25, 0.05, 0.157, 0.12, 0.2, 0.1, 0.0])
WIDTHS = {8: [0, 1], 4: [2, 3], 2: [4, 8], 1: [6, 7]}


def test_each_component_gets_the_width_of_its_spread():
    widths = Widths.of(SPREAD, 1.0)
    assert {bits: rows.tolist() for bits, rows in widths.rows.items()} == WIDTHS
    assert widths.rank == 9
    assert widths.uncoded.tolist() == [5]
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
    seed = data.draw(st.integers(0, 1000))
    whole = np.random.default_rng(seed).integers(-reach, reach + 1, (widths.rank, tokens))
    whole[5] = 0  # not coded
    rounded = torch.from_numpy(whole).float()
    coded = packed(rounded, widths)
    assert torch.equal(unpacked(coded, widths, tokens), rounded.int())
    beyond = 0
    for bits, rows in WIDTHS.items():
        zigzag = np.where(whole[rows] < 0, -2 * whole[rows] - 1, 2 * whole[rows])
        beyond += int((zigzag >= 2**bits - 1).sum())
        assert coded.codes[bits].shape == (len(rows), -(-tokens * bits // 8))
    assert len(coded.escapes) == beyond
    assert coded.escapes.numel() == 0 or int(coded.escapes.max()) < 2**16


@pytest.mark.parametrize(("value", "multiple"), [(0.24, 0), (0.26, 1), (0.25, 0), (0.75, 2), (-0.26, -1)])
def test_rounding_is_plain_and_ties_are_even(value, multiple):
    assert multiples(torch.tensor([[value]]), torch.tensor([0.5])).item() == multiple


def test_every_token_has_its_own_step():
    rounded = multiples(torch.tensor([[4.0, 4.0], [-2.0, -2.0]]), torch.tensor([1.0, 0.5]))
    assert rounded.tolist() == [[4.0, 8.0], [-2.0, -4.0]]


@pytest.mark.parametrize("change", [-1, 1])
def test_escapes_must_fit_their_codes(change):
    widths = Widths.of(SPREAD, 1.0)
    rounded = torch.zeros(widths.rank, 9)
    rounded[0, 3] = rounded[6, 2] = 1000.0
    coded = packed(rounded, widths)
    assert len(coded.escapes) == 2
    wrong = Packed(coded.codes, torch.arange(2 + change, dtype=torch.int32))
    with pytest.raises(BadField, match="escapes"):
        unpacked(wrong, widths, 9)
