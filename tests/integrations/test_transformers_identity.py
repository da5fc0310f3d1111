"""The truth here is the models themselves.

A sequence that repeats one token has the same hidden state, and so the same key before RoPE, at every
position of every layer. Each key must then be the key of position 0, turned as the identity says.
"""

import math
import subprocess
import sys

import pytest
import torch
from support.models import random_model, tiny_llama_config
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvtcd.core.errors import BadIdentity, UnsupportedCache, UnsupportedRope
from kvtcd.core.identity import Identity, Pairing, Rope, RopeKind
from kvtcd.core.layout import Dtype, Stream
from kvtcd.integrations.transformers_identity import MODEL_TYPES, identity_of, layout_of, rope_of
from kvtcd.integrations.transformers_weights import identity_of_model

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
MORE = {
    "gpt_neox": {"num_key_value_heads": 4},  # it ignores the number
    "mistral": {"sliding_window": None},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}


def config_of(model_type: str, **changes: object) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **(SIZES | MORE.get(model_type, {}) | changes))


def cached_keys(config: PreTrainedConfig, tokens: int = 48) -> torch.Tensor:
    """Keys of a sequence of one repeated token, ``[L, H, T, D]``."""
    model = random_model(config)
    with torch.no_grad():
        cache = model(torch.full((1, tokens), 7), use_cache=True).cache
    return torch.stack([layer.keys[0].double() for layer in cache.layers])


def frequencies(rope: Rope) -> torch.Tensor:
    """Angle per position of each plane, float64, from the papers' formulas."""
    half = rope.rotary_dim // 2
    plain = [rope.theta ** (-2 * i / rope.rotary_dim) for i in range(half)]
    match rope.kind:
        case RopeKind.DEFAULT:
            turned = plain
        case RopeKind.LINEAR:
            turned = [f / rope.factor for f in plain]
        case RopeKind.LLAMA3:  # Llama 3.1: bands by wavelength, a ramp between them

            def llama3(f: float) -> float:
                turns = rope.original_max_position * f / (2 * math.pi)
                if turns < rope.low_freq_factor:
                    return f / rope.factor
                if turns > rope.high_freq_factor:
                    return f
                share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
                return (1 - share) * f / rope.factor + share * f

            turned = [llama3(f) for f in plain]
        case RopeKind.YARN:  # arXiv:2309.00071 section 3.2

            def dimension(turns: float) -> float:
                length = rope.original_max_position / (turns * 2 * math.pi)
                return rope.rotary_dim * math.log(length) / (2 * math.log(rope.theta))

            low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
            if rope.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, rope.rotary_dim - 1)
            ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(half)]
            turned = [f / rope.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]
    return torch.tensor(turned, dtype=torch.float64)


def rotated(first: torch.Tensor, rope: Rope, tokens: int) -> torch.Tensor:
    """Rotate ``[..., 1, D]`` to positions 0 to T-1: ``[..., T, D]``."""
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies(rope)
    half = rope.rotary_dim // 2
    if rope.pairing is Pairing.HALVES:
        one, two = slice(0, half), slice(half, rope.rotary_dim)
    else:
        one, two = slice(0, rope.rotary_dim, 2), slice(1, rope.rotary_dim, 2)
    out = first.expand(*first.shape[:-2], tokens, first.shape[-1]).clone()
    x, y = first[..., one], first[..., two]
    out[..., one] = x * angles.cos() - y * angles.sin()
    out[..., two] = y * angles.cos() + x * angles.sin()
    return out


def assert_keys_turn_as_the_identity_says(config: PreTrainedConfig) -> None:
    keys, rope, layout = cached_keys(config), rope_of(config), layout_of(config, Dtype.F32)
    stream = layout.streams[0]
    assert keys.shape == (layout.layers, stream.heads, 48, stream.head_dim)
    assert stream.rope
    expected = rotated(keys[:, :, :1], rope, 48)
    assert torch.allclose(keys, expected, atol=1e-4 * float(keys.abs().max()))
    assert not torch.allclose(keys[:, :, 0], keys[:, :, 1], atol=1e-2 * float(keys.abs().max()))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_keys_of_every_listed_model_type_turn_as_its_identity_says(model_type: str) -> None:
    assert_keys_turn_as_the_identity_says(config_of(model_type))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_weights_of_every_listed_model_type_are_those_of_its_files_once_loaded(model_type, tmp_path) -> None:
    random_model(config_of(model_type)).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert identity_of_model(loaded, 256).layout.dtype is Dtype.BF16
    with torch.no_grad():
        next(one for name, one in loaded.named_parameters() if "o_proj" in name or "dense" in name).mul_(2)
    with pytest.raises(BadIdentity, match="changed after loading"):
        identity_of_model(loaded, 256)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        LLAMA3,
        YARN,
        YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi", "glm"])
def test_keys_turn_as_every_supported_rope_type_says(model_type: str, parameters: dict) -> None:
    config = config_of(model_type, rope_parameters=dict(parameters), head_dim=32)
    assert rope_of(config).kind == parameters["rope_type"]
    assert_keys_turn_as_the_identity_says(config)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 1.0},
        {"attention_factor": 1.25},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"mscale": 1.0},
        {"mscale_all_dim": 0.7},
    ],
)
def test_yarn_attention_factor_is_that_of_transformers(changes: dict) -> None:
    config = tiny_llama_config(rope_parameters=YARN | changes)
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](config)
    assert rope_of(config).attention_factor == expected


def test_yarn_attention_factor_scales_the_cached_keys() -> None:
    config = tiny_llama_config(rope_parameters=YARN | {"attention_factor": 1.5})
    model, seen = random_model(config), []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *hook: seen.append(hook[2]))
    with torch.no_grad():
        cache = model(torch.tensor([[7]]), use_cache=True).cache
    assert torch.allclose(cache.layers[0].keys.flatten(), 1.5 * seen[0].flatten())
    assert rope_of(config).attention_factor == 1.5


def test_yarn_defaults_are_those_of_the_paper_and_the_ratio_of_lengths() -> None:
    config = tiny_llama_config(rope_parameters=dict(YARN), max_position_embeddings=8 * 4096)
    config.rope_parameters["factor"] = None
    rope = rope_of(config)
    assert (rope.factor, rope.beta_fast, rope.beta_slow, rope.truncate) == (8.0, 32.0, 1.0, 1)


def test_identity_carries_everything_and_survives_json() -> None:
    identity = identity_of(
        tiny_llama_config(rope_parameters=dict(LLAMA3)),
        weights="ab" * 32,
        adapter="cd" * 32,
        model="org/tiny",
        dtype=Dtype.BF16,
        block_tokens=64,
    )
    assert identity.layout.streams == (Stream("k", 2, 8, rope=True), Stream("v", 2, 8, rope=False))
    assert identity.layout.layers == 3
    assert identity.layout.dtype is Dtype.BF16
    assert identity.rope == Rope(
        RopeKind.LLAMA3,
        5e5,
        8,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=64,
    )
    assert (identity.engine, identity.hash_scheme) == ("transformers", "kvtcd-chain-v1")
    assert (identity.weights, identity.adapter) == ("ab" * 32, "cd" * 32)
    assert (identity.model, identity.block_tokens) == ("org/tiny", 64)
    assert Identity.from_json(identity.to_json()) == identity


def test_rope_types_that_change_with_length_are_refused() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedRope, match="'dynamic' cannot be undone exactly"):
        rope_of(tiny_llama_config(rope_parameters=dynamic))
    longrope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        "factor": 2.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    with pytest.raises(UnsupportedRope, match="'longrope' cannot be undone exactly"):
        rope_of(config_of("phi3", rope_parameters=longrope))


@pytest.mark.parametrize("model_type", ["gpt2", "smollm3", "nanochat"])
def test_model_types_that_turn_otherwise_or_not_at_all_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedRope, match=f"'model type {model_type}' cannot be undone.*llama"):
        rope_of(config_of(model_type))


def test_a_partial_factor_that_the_model_ignores_is_refused() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedRope, match="partial rotation by model type llama"):
        rope_of(tiny_llama_config(rope_parameters=parameters))


def test_an_odd_number_of_rotated_dimensions_is_refused() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}
    with pytest.raises(BadIdentity, match="rotary_dim"):
        rope_of(config_of("phi", rope_parameters=parameters, hidden_size=32))


@pytest.mark.parametrize(
    ("model_type", "changes", "layer"),
    [
        ("mistral", {"sliding_window": 16}, "2 of its 2 layers, the first of them layer 0, are sliding"),
        (
            "gemma3_text",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "1 of its 2 .* layer 1",
        ),
        ("llama4_text", {"layer_types": ["chunked_attention"] * 2}, "layer 0, .* or chunks"),
        (
            "lfm2",
            {"layer_types": ["full_attention", "conv"]},
            "1, are linear attention.* Qwen2",
        ),
    ],
)
def test_caches_that_lose_their_past_are_refused(model_type: str, changes: dict, layer: str) -> None:
    with pytest.raises(UnsupportedCache, match=layer):
        layout_of(config_of(model_type, **changes), Dtype.BF16)


def test_importing_the_module_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, kvtcd.integrations.transformers_identity;"
        "sys.exit(sorted({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
