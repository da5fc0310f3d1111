import torch

from kvtcd.codec.coefficients import code, restore
from kvtcd.codec.plan import Group, Plan
from kvtcd.codec.quantize import dequantize, quantize, ranges

PLAN = Plan(
    (Group(0, 1, 2), Group(1, 1, 8), Group(2, 16, 8), Group(18, 16, 4), Group(34, 16, 4), Group(64, 64, 2))
)


def test_every_group_is_coded_as_if_it_were_alone():
    x = torch.randn(PLAN.rank, 13) * torch.linspace(5, 0.1, PLAN.rank)[:, None]
    back = restore(code(x, PLAN), PLAN)
    for group in PLAN.groups:
        part = x[group.start : group.start + group.size][None]
        scale, shift = ranges(part, group.bits)
        alone = dequantize(quantize(part, scale, shift, group.bits), scale, shift, group.bits)
        assert torch.equal(back[group.start : group.start + group.size], alone[0])


def test_components_of_no_group_come_back_as_zero():
    back = restore(code(torch.randn(PLAN.rank, 5), PLAN), PLAN)
    assert (back[50:64] == 0).all()


def test_codes_are_sorted_by_width_and_packed():
    coded = code(torch.randn(PLAN.rank, 13), PLAN)
    assert {bits: tuple(packed.shape) for bits, packed in coded.codes.items()} == {
        2: (65, 4),
        4: (32, 7),
        8: (17, 13),
    }
    assert coded.scales.shape == coded.shifts.shape == (6, 13)


def test_a_size_one_group_of_two_bits_keeps_its_coefficient_as_float16():
    x = torch.randn(1, 9) * 100
    plan = Plan((Group(0, 1, 2),))
    assert torch.allclose(restore(code(x, plan), plan), x.half().float(), atol=2.0**-22)


def test_an_empty_plan_stores_nothing():
    coded = code(torch.empty(0, 5), Plan(()))
    assert coded.codes == {}
    assert restore(coded, Plan(())).shape == (0, 5)
