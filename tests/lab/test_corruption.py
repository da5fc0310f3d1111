"""What each corruption does to a cache, and that it does no more."""

import pytest
import torch

from kvtcd.lab.corruption import CORRUPTIONS

LAYERS, MIDDLE = 5, 2


@pytest.fixture
def layers():
    draw = torch.Generator().manual_seed(0)
    return [
        tuple((torch.randn(3, 40, 8, generator=draw) * 2 + 1).bfloat16() for _ in range(2))
        for _ in range(LAYERS)
    ]


def corrupted(layers, name):
    changed = [tuple(tensor.clone() for tensor in layer) for layer in layers]
    CORRUPTIONS[name](changed, torch.Generator().manual_seed(1))
    return changed


def where(layers, changed):
    return {
        (index, "kv"[which])
        for index, (before, after) in enumerate(zip(layers, changed, strict=True))
        for which in (0, 1)
        if not torch.equal(before[which], after[which])
    }


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_stays_in_its_layer_and_comes_out_the_same_again(layers, name: str) -> None:
    changed = corrupted(layers, name)
    expected = {(index, s) for index in range(LAYERS) for s in "kv"}
    if not name.startswith("all"):
        expected = {(MIDDLE, "k")} if name in {"keys x 4", "one NaN"} else {(MIDDLE, "k"), (MIDDLE, "v")}
    assert where(layers, changed) == expected
    again = corrupted(layers, name)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for x, y in zip(changed, again, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_what_they_do(layers) -> None:
    keys, values = layers[MIDDLE]
    assert torch.equal(corrupted(layers, "keys x 4")[MIDDLE][0], keys * 4)
    assert not any(tensor.any() for tensor in corrupted(layers, "layer zeroed")[MIDDLE])
    assert int(corrupted(layers, "one NaN")[MIDDLE][0].isnan().sum()) == 1
    permuted = corrupted(layers, "head permuted")[MIDDLE]
    for before, after in zip((keys, values), permuted, strict=True):
        assert torch.equal(before[1:], after[1:])
        assert torch.equal(before[0].sort(dim=-1).values, after[0].sort(dim=-1).values)
    for name, index, size in (("layer + 3 sigma", MIDDLE, 3), ("all + 0.5 sigma", 0, 0.5)):
        for before, after in zip(layers[index], corrupted(layers, name)[index], strict=True):
            added = (after.float() - before.float()) / before.float().std(dim=1, keepdim=True)
            assert float(added.std()) == pytest.approx(size, rel=0.1)
