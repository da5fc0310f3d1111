"""Against transformers' own angles, and against rotation by complex multiplication."""

import dataclasses

import pytest
import torch
from support.codec_world import DEFAULT, LINEAR, LLAMA3, NEIGHBOURS, PARTIAL, YARN, rotated
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvtcd.codec.rope import Rotation, inverse_frequencies
from kvtcd.core.identity import Rope, RopeKind

UNTRUNCATED = dataclasses.replace(YARN, truncate=0)


def llama(rope: Rope, head_dim: int) -> LlamaConfig:
    names = {
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "truncate": None if rope.truncate is None else bool(rope.truncate),
    }
    parameters = {"rope_type": str(rope.kind), "rope_theta": rope.theta} | {
        name: value for name, value in names.items() if value is not None
    }
    if rope.rotary_dim != head_dim:
        parameters["partial_rotary_factor"] = rope.rotary_dim / head_dim
    return LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=256,
        rope_parameters=parameters,
    )  # fmt: skip


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3, YARN, UNTRUNCATED], ids=lambda r: f"{r.kind}-{r.truncate}")
@pytest.mark.parametrize("partial", [1, 2])
def test_frequencies_and_factor_are_those_of_transformers(rope, partial):
    theirs, factor = ROPE_INIT_FUNCTIONS[str(rope.kind)](llama(rope, rope.rotary_dim * partial))
    mine, my_factor = inverse_frequencies(rope)
    assert torch.equal(mine, theirs)
    assert my_factor == pytest.approx(factor)


@pytest.mark.parametrize("rope", [DEFAULT, LINEAR, LLAMA3, YARN], ids=lambda r: r.kind)
def test_rotation_is_what_a_llama_does_to_its_keys_even_far_out(rope):
    """At position 100,000 float32 angles are off by 0.004: only the very same ones agree to 1e-5."""
    embedding = LlamaRotaryEmbedding(llama(rope, rope.rotary_dim))
    keys = torch.randn(5, 7, 2, rope.rotary_dim)  # L T H D
    cos, sin = embedding(keys, torch.arange(100_003, 100_010)[None])
    theirs, _ = apply_rotary_pos_emb(keys.transpose(1, 2), keys.transpose(1, 2), cos, sin)
    mine = Rotation(rope, 100_003, 7, inverse=False)(keys)
    assert torch.allclose(mine.transpose(1, 2), theirs, atol=1e-5)


@pytest.mark.parametrize(
    "rope",
    [DEFAULT, LLAMA3, YARN, PARTIAL, NEIGHBOURS],
    ids=["default", "llama3", "yarn", "partial", "neighbours"],
)
@pytest.mark.parametrize("first_token", [0, 3_000])
def test_rotation_is_complex_multiplication_and_its_inverse_undoes_it(rope, first_token):
    x = torch.randn(2, 9, 3, 16)
    frequencies, factor = inverse_frequencies(rope)
    truth = rotated(x, rope, frequencies, factor, first_token)
    forward = Rotation(rope, first_token, 9, inverse=False)(x)
    assert torch.allclose(forward.double(), truth, atol=2e-3 if first_token else 1e-5)
    assert torch.allclose(Rotation(rope, first_token, 9, inverse=True)(forward), x, atol=1e-5)


def test_dimensions_beyond_the_rotary_ones_are_kept_bit_for_bit():
    x = torch.randn(4, 2, 16)
    out = Rotation(PARTIAL, 11, 4, inverse=False)(x)
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert not torch.allclose(out[..., :8], x[..., :8])


def test_yarn_scales_lengths_by_its_attention_factor():
    x = torch.randn(6, 2, 16)
    out = Rotation(YARN, 40, 6, inverse=False)(x)
    assert torch.allclose(out.norm(dim=-1) / x.norm(dim=-1), torch.tensor(YARN.attention_factor))


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 3e-7), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)]
)
def test_undoing_and_redoing_costs_no_more_than_the_rounding_of_the_dtype(dtype, bound):
    rope = Rope(RopeKind.DEFAULT, 100_000.0, 64)
    held = torch.randn(8, 256, 3, 64).to(dtype)
    plain = Rotation(rope, 5_000, 256, inverse=True)(held)
    back = Rotation(rope, 5_000, 256, inverse=False)(plain.to(dtype)).to(dtype)
    error = (back.float() - held.float()).norm() / held.float().norm()
    assert error < bound


def test_the_input_is_not_changed():
    x = torch.randn(3, 2, 16)
    before = x.clone()
    Rotation(DEFAULT, 8, 3, inverse=True)(x)
    assert torch.equal(x, before)
