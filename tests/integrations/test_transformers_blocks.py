import itertools
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import random_model, real_model, tiny_llama_config
from transformers import AutoConfig, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, Fp8QuantizedLayer

from kvtcd.core.errors import BlockMismatch, UnsupportedCache
from kvtcd.core.layout import Dtype, Layout, Stream, kv_layout
from kvtcd.integrations.transformers_blocks import cache_from_raw, raw_block, require_full_attention
from kvtcd.lab.models import identity

TOKENS, LAYERS, HEADS, HEAD_DIM = 11, 3, 2, 8


def layout(dtype: Dtype = Dtype.F32) -> Layout:
    return kv_layout(layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype=dtype)


def random_cache(tokens: int = TOKENS, dtype: torch.dtype = torch.float32, batch: int = 1) -> DynamicCache:
    generator = torch.Generator().manual_seed(3)
    shape = (2, LAYERS, batch, HEADS, tokens, HEAD_DIM)
    keys, values = torch.randn(shape, generator=generator).to(dtype)
    return DynamicCache(list(zip(keys, values, strict=True)))


def assert_same(one: DynamicCache, other: DynamicCache) -> None:
    assert len(one.layers) == len(other.layers)
    for a, b in zip(one.layers, other.layers, strict=True):
        assert type(a) is type(b) is DynamicLayer
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


def test_bytes_of_a_block_lie_as_the_layout_says() -> None:
    cache = random_cache()
    expected = b"".join(
        struct.pack("<f", float(getattr(cache.layers[layer], stream)[0, head, token, dim]))
        for stream in ("keys", "values")
        for layer in range(LAYERS)
        for token in range(2, 7)
        for head in range(HEADS)
        for dim in range(HEAD_DIM)
    )
    raw = raw_block(cache, 2, 7, layout())
    assert raw.dtype == torch.uint8
    assert raw.numpy().tobytes() == expected


@settings(max_examples=50)
@given(
    cuts=st.sets(st.integers(1, TOKENS - 1)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_cache_comes_back_bit_for_bit_from_any_cut_into_blocks(cuts: set[int], dtype: torch.dtype) -> None:
    cache, edges = random_cache(dtype=dtype), [0, *sorted(cuts), TOKENS]
    where = layout(Dtype(str(dtype).removeprefix("torch.")))
    blocks = [raw_block(cache, a, b, where) for a, b in itertools.pairwise(edges)]
    assert [block.numel() for block in blocks] == [where.nbytes(b - a) for a, b in itertools.pairwise(edges)]
    rebuilt = cache_from_raw(blocks, where)
    assert_same(rebuilt, cache)
    assert all(layer.keys.is_contiguous() and layer.values.is_contiguous() for layer in rebuilt.layers)
    assert rebuilt.get_seq_length() == TOKENS


def test_block_and_cache_share_no_memory() -> None:
    cache = random_cache()
    raw = raw_block(cache, 0, TOKENS, layout())
    before, rebuilt = raw.clone(), cache_from_raw([raw], layout())
    cache.layers[0].keys.zero_()
    assert torch.equal(raw, before)
    raw.zero_()
    assert_same(rebuilt, random_cache())


def test_a_block_may_begin_at_any_byte_of_a_larger_buffer() -> None:
    raw = raw_block(random_cache(), 0, TOKENS, layout())
    buffer = torch.cat([torch.zeros(3, dtype=torch.uint8), raw])
    assert_same(cache_from_raw([buffer[3:]], layout()), random_cache())


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (5, 4), (0, TOKENS + 1), (TOKENS, TOKENS + 1)])
def test_tokens_that_are_not_in_the_cache_are_refused(start: int, stop: int) -> None:
    with pytest.raises(BlockMismatch, match=rf"tokens: .*within 0:{TOKENS}, the request has {start}:{stop}"):
        raw_block(random_cache(), start, stop, layout())


@pytest.mark.parametrize(
    ("cache", "where", "message"),
    [
        (random_cache(batch=2), layout(), "k of layer 0"),
        (random_cache(), layout(Dtype.BF16), "k of layer 0: .*bfloat16.*float32"),
        (random_cache(), kv_layout(layers=4, kv_heads=2, head_dim=8, dtype=Dtype.F32), "layers.*4.*3"),
        (random_cache(), kv_layout(layers=3, kv_heads=1, head_dim=8, dtype=Dtype.F32), "k of layer 0"),
        (random_cache(), kv_layout(layers=3, kv_heads=2, head_dim=4, dtype=Dtype.F32), "k of layer 0"),
        (random_cache(), Layout((Stream("latent", 1, 32, rope=False),), 3, Dtype.F32), "streams.*latent"),
        (DynamicCache(), layout(), "layers.*3.*0"),
    ],
)
def test_a_cache_of_another_shape_or_dtype_is_refused(
    cache: DynamicCache, where: Layout, message: str
) -> None:
    with pytest.raises(BlockMismatch, match=message):
        raw_block(cache, 0, 1, where)


def test_a_layer_with_fewer_tokens_than_the_first_is_refused() -> None:
    cache = random_cache()
    cache.layers[2].values = cache.layers[2].values[:, :, :-1]
    with pytest.raises(BlockMismatch, match="v of layer 2"):
        raw_block(cache, 0, 1, layout())


def test_bytes_that_are_no_whole_number_of_tokens_are_refused() -> None:
    raw = raw_block(random_cache(), 0, 2, layout())
    with pytest.raises(BlockMismatch, match="multiple of 384, the request has 767"):
        cache_from_raw([raw[:-1]], layout())
    with pytest.raises(BlockMismatch, match="at least one block"):
        cache_from_raw([], layout())


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "gemma3_text",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer 1, are sliding windows",
        ),
        (
            "llama4_text",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer 1, are sliding windows",
        ),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layer 0, are linear attention"),
    ],
)
def test_layers_that_lose_their_past_are_refused(model_type: str, changes: dict, message: str) -> None:
    cache = DynamicCache(config=AutoConfig.for_model(model_type, num_hidden_layers=2, **changes))
    with pytest.raises(UnsupportedCache, match=message):
        raw_block(cache, 0, 1, layout())


def test_quantised_and_static_layers_are_refused() -> None:
    cache = random_cache()
    cache.layers[1] = Fp8QuantizedLayer()
    with pytest.raises(UnsupportedCache, match="layer 1, are quantised"):
        require_full_attention(cache)
    static = StaticCache(config=tiny_llama_config(), max_cache_len=32)
    with pytest.raises(UnsupportedCache, match="layer 0, are of a fixed size"):
        require_full_attention(static)


def test_a_tiny_model_goes_on_from_a_rebuilt_cache_as_from_its_own() -> None:
    model = random_model(tiny_llama_config())
    ids = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        own = model(ids[:, :-1], use_cache=True).cache
        blocks = [raw_block(own, a, b, layout()) for a, b in ((0, 16), (16, 32), (32, 39))]
        rebuilt = cache_from_raw(blocks, layout())
        expected = model(ids[:, -1:], cache=own, use_cache=True).logits
        assert torch.equal(model(ids[:, -1:], cache=rebuilt, use_cache=True).logits, expected)


@pytest.mark.model
def test_generation_from_a_rebuilt_cache_is_identical_to_the_uninterrupted_run() -> None:
    loaded = real_model("smollm2")
    where = identity(loaded).layout
    chat = [{"role": "user", "content": "Name the planets of the solar system, one a line, with a remark."}]
    ids = loaded.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        own = loaded.model(ids[:, :-1], use_cache=True, logits_to_keep=1).cache
    last = ids.shape[1] - 1
    blocks = [raw_block(own, a, min(a + 16, last), where) for a in range(0, last, 16)]
    rebuilt = cache_from_raw(blocks, where)
    runs = [
        loaded.model.generate(
            ids,
            cache=cache,
            max_new_tokens=24,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for cache in (own, rebuilt)
    ]
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert all(torch.equal(a, b) for a, b in zip(runs[0].logits, runs[1].logits, strict=True))
    assert "Mercury" in loaded.tokenizer.decode(runs[1].sequences[0])
