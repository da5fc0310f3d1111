import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import random_model, real_model, tiny_llama_config
from transformers import MistralConfig

from kvtcd.core.errors import UnsupportedCache
from kvtcd.core.layout import Dtype, kv_layout
from kvtcd.integrations.transformers_blocks import raw_block
from kvtcd.lab.capture import kv_rows, prefill, windows
from kvtcd.lab.models import LoadedModel, tokenize


@pytest.fixture
def tiny(tmp_path) -> LoadedModel:
    return LoadedModel(random_model(tiny_llama_config()), None, tmp_path)


def test_windows_are_dealt_out_in_turn_one_of_each_text() -> None:
    texts = [range(7), range(100, 103), range(200, 211)]
    assert [(i, list(w)) for i, w in windows(texts, 3)] == [
        (0, [0, 1, 2]),
        (1, [100, 101, 102]),
        (2, [200, 201, 202]),
        (0, [3, 4, 5]),
        (2, [203, 204, 205]),
        (2, [206, 207, 208]),
    ]


def test_a_number_of_windows_per_text_spreads_them_over_it() -> None:
    texts = [range(100), range(1000, 1015)]
    assert [(i, w[0]) for i, w in windows(texts, 10, per_text=4)] == [
        (0, 0),
        (1, 1000),
        (0, 20),
        (0, 50),
        (0, 70),
    ]


@given(
    sizes=st.lists(st.integers(0, 60), max_size=4),
    length=st.integers(1, 9),
    per_text=st.none() | st.integers(0, 8),
)
def test_windows_are_whole_disjoint_and_in_order(sizes: list[int], length: int, per_text: int | None) -> None:
    texts = [range(1000 * n, 1000 * n + size) for n, size in enumerate(sizes)]
    dealt = list(windows(texts, length, per_text))
    for n, text in enumerate(texts):
        mine = [window for index, window in dealt if index == n]
        bound = len(text) // length
        assert len(mine) == (bound if per_text is None else min(per_text, bound))
        tokens = [token for window in mine for token in window]
        assert all(len(window) == length for window in mine)
        assert tokens == sorted(set(tokens) & set(text))


def test_no_text_gives_no_window() -> None:
    assert list(windows([], 8)) == []


def test_rows_are_the_cache_by_token_layer_head_and_dimension(tiny: LoadedModel) -> None:
    tokens = [5, 9, 1, 33, 2, 7]
    rows, cache = kv_rows(tiny, tokens), prefill(tiny, tokens)
    assert set(rows) == {"k", "v"}
    for name, field in (("k", "keys"), ("v", "values")):
        assert rows[name].shape == (6, 3, 2, 8)
        assert rows[name].is_contiguous()
        assert not rows[name].requires_grad
        for layer in range(3):
            for head in range(2):
                assert torch.equal(rows[name][:, layer, head], getattr(cache.layers[layer], field)[0, head])


def test_rows_and_raw_block_hold_the_same_values(tiny: LoadedModel) -> None:
    tokens = list(range(10))
    layout = kv_layout(layers=3, kv_heads=2, head_dim=8, dtype=Dtype.F32)
    raw = raw_block(prefill(tiny, tokens), 0, 10, layout)
    rows = kv_rows(tiny, tokens)
    expected = torch.cat([rows[name].transpose(0, 1).reshape(-1) for name in ("k", "v")])
    assert torch.equal(raw.view(torch.float32), expected)


def test_a_model_with_a_sliding_window_is_refused(tmp_path) -> None:
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    with pytest.raises(UnsupportedCache, match="layer 0, are sliding windows"):
        kv_rows(LoadedModel(random_model(config), None, tmp_path), [1, 2, 3])


@pytest.mark.model
def test_rows_of_a_real_model_are_bfloat16_at_positions_from_zero() -> None:
    loaded = real_model("smollm2")
    tokens = tokenize(loaded, "It was the best of times, it was the worst of times.")
    rows = kv_rows(loaded, tokens)
    assert rows["k"].shape == rows["v"].shape == (len(tokens), 30, 3, 64)
    assert rows["k"].dtype == torch.bfloat16
    seen = []
    hook = loaded.model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *h: seen.append(h[2]))
    kv_rows(loaded, tokens)
    hook.remove()
    before_rope = seen[0].view(len(tokens), 3, 64)
    assert torch.equal(rows["k"][0, 0], before_rope[0])  # position 0 is not turned
    assert not torch.allclose(rows["k"][1, 0], before_rope[1], atol=0.1)
