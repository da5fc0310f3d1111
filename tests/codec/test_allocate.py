"""The programme against exhaustive search, and against its own definition."""

import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtcd.codec.allocate import allocate, budget_of, squared_error
from kvtcd.codec.plan import SIZES, Group, Plan
from kvtcd.codec.quantize import dequantize, quantize, ranges

SMALL = (1, 2, 4)


def group_error(rows: torch.Tensor, group: Group) -> float:
    """Squared error of one group over rows ``[n, r]``."""
    x = rows[:, group.start : group.start + group.size].t()[None].contiguous()
    scale, shift = ranges(x, group.bits)
    coded = dequantize(quantize(x, scale, shift, group.bits), scale, shift, group.bits)
    return float((coded.double() - x.double()).square().sum())


def exhaustive(rows: torch.Tensor, budget: int, sizes: tuple[int, ...]) -> float:
    """Least squared error over every segmentation and every choice of widths."""
    energy = rows.double().square().sum(dim=0).tolist()
    components = len(energy)

    def best(start: int, bits_left: int) -> float:
        if start == components:
            return 0.0
        least = energy[start] + best(start + 1, bits_left)
        for size, bits in itertools.product(sizes, (2, 4, 8)):
            group = Group(start, size, bits)
            if start + size <= components and group.cost <= bits_left:
                least = min(least, group_error(rows, group) + best(start + size, bits_left - group.cost))
        return least

    return best(0, budget)


@settings(max_examples=60)
@given(
    components=st.integers(1, 5),
    tokens=st.integers(1, 6),
    budget=st.integers(0, 200),
    decay=st.floats(0, 2),
    seed=st.integers(0, 2**31),
)
def test_no_plan_is_better_than_the_one_found(components, tokens, budget, decay, seed):
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, components, generator=draw) * torch.arange(1, components + 1) ** -decay
    (plan,) = allocate(rows, [budget], sizes=SMALL, stride=1)
    assert plan.cost <= budget
    assert squared_error(rows, plan) == pytest.approx(exhaustive(rows, budget, SMALL), rel=1e-5, abs=1e-5)


def test_with_stride_one_a_group_starts_where_the_energy_is():
    rows = torch.zeros(20, 19)
    rows[:, 3:] = torch.randn(20, 16)
    assert allocate(rows, [64], stride=1) == (Plan((Group(3, 16, 2),)),)
    assert allocate(rows, [64], stride=16) == (Plan((Group(0, 16, 2),)),)


def test_one_table_gives_every_budget_the_plan_of_its_own_table():
    rows = torch.randn(50, 96) * torch.linspace(4, 0.05, 96)
    budgets = [0, 33, 34, 100, 401, 800]
    together = allocate(rows, budgets)
    apart = [allocate(rows, [budget])[0] for budget in budgets]
    assert list(together) == apart
    assert together[0] == together[1] == Plan(())
    assert [group.size for group in together[2].groups] == [1]


def test_more_budget_is_never_worse_and_is_used():
    rows = torch.randn(100, 256) * torch.arange(1, 257) ** -0.7
    plans = allocate(rows, [256, 512, 1024, 2048])
    errors = [squared_error(rows, plan) for plan in plans]
    assert errors == sorted(errors, reverse=True)
    for plan, budget in zip(plans, [256, 512, 1024, 2048], strict=True):
        assert budget - 34 < plan.cost <= budget


def test_groups_start_on_the_grid_and_nothing_trails():
    rows = torch.randn(64, 200) * torch.arange(1, 201) ** -1.0
    (plan,) = allocate(rows, [700])
    assert {group.size for group in plan.groups} <= set(SIZES)
    assert all(group.start % 16 == 0 for group in plan.groups if group.size > 1)
    assert plan.rank == plan.groups[-1].start + plan.groups[-1].size < 200


def test_a_component_without_energy_is_skipped():
    rows = torch.randn(40, 48)
    rows[:, 16:32] = 0
    (plan,) = allocate(rows, [2 * (16 * 4 + 32)])
    assert [(group.start, group.size) for group in plan.groups] == [(0, 16), (32, 16)]


def test_the_budget_is_sixteen_bits_per_feature_over_the_ratio():
    assert [budget_of(5760, ratio) for ratio in (8, 16, 32, 64)] == [11520, 5760, 2880, 1440]
    assert budget_of(100, 7) == 228


@pytest.mark.slow
def test_a_table_for_5760_components_takes_well_under_a_minute():
    rows = torch.randn(2000, 5760) * torch.arange(1, 5761) ** -0.6
    started = time.process_time()
    plans = allocate(rows, [11_520, 5_760, 2_880, 1_440])
    assert time.process_time() - started < 100
    assert all(
        plan.cost > 0.99 * budget for plan, budget in zip(plans, [11_520, 5_760, 2_880, 1_440], strict=True)
    )
