import pytest
import torch

from kvtcd.codec.plan import Band, Group, Plan
from kvtcd.core.errors import BadField

PLAN = Plan(
    (Group(0, 1, 2), Group(1, 1, 2), Group(16, 16, 8), Group(32, 16, 8), Group(48, 16, 4), Group(80, 16, 4))
)


def test_neighbours_of_one_size_and_width_form_a_band():
    assert PLAN.bands == (Band(0, 2, 1, 2), Band(16, 2, 16, 8), Band(48, 1, 16, 4), Band(80, 1, 16, 4))


def test_rank_cost_and_components_count_what_is_stored():
    assert PLAN.rank == 96
    assert PLAN.cost == 2 * 34 + 2 * (16 * 8 + 32) + 2 * (16 * 4 + 32)
    assert [PLAN.components(bits) for bits in (2, 4, 8)] == [2, 32, 32]
    assert Plan(()).rank == Plan(()).cost == 0


def test_a_plan_survives_its_tensor():
    assert Plan.from_tensor(PLAN.to_tensor()) == PLAN
    assert Plan.from_tensor(Plan(()).to_tensor()) == Plan(())


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 16, 3]],
        [[0, 0, 4]],
        [[-1, 16, 4]],
        [[0, 16, 4], [15, 1, 4]],
        [[16, 16, 4], [0, 16, 4]],
    ],
    ids=["width", "empty", "negative", "overlap", "order"],
)
def test_a_tensor_that_is_no_plan_is_refused(rows):
    with pytest.raises(BadField):
        Plan.from_tensor(torch.tensor(rows, dtype=torch.int32))


def test_a_tensor_of_another_shape_or_type_is_refused():
    with pytest.raises(BadField):
        Plan.from_tensor(torch.zeros((2, 4), dtype=torch.int32))
    with pytest.raises(BadField):
        Plan.from_tensor(torch.zeros((0, 3), dtype=torch.int64))
