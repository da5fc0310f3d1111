"""What a transformers configuration says about the caches of its model.

RoPE is read as `modeling_rope_utils` of transformers reads it. Which dimensions a model turns together, and
whether it turns all of them, is written in no configuration, only in its code: so the model types below are
those whose keys were compared with the formula. A guess would compress keys badly without any error.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvtcd.core.errors import BadIdentity, UnsupportedRope
from kvtcd.core.identity import Identity, Pairing, Rope, RopeKind
from kvtcd.core.layout import Dtype, Layout, kv_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig

ENGINE = "transformers"
HASH_SCHEME = "kvtcd-chain-v1"

_PAIRING = {
    Pairing.HALVES: (
        "arcee", "gemma", "gpt_neox", "granite", "granitemoe", "llama", "ministral3", "mistral", "mixtral",
        "nemotron", "olmo", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "seed_oss", "stablelm", "starcoder2",
    ),
    Pairing.NEIGHBOURS: ("cohere", "ernie4_5", "glm", "glm4"),
}  # fmt: skip
MODEL_TYPES = tuple(sorted(name for types in _PAIRING.values() for name in types))
"""Model types whose RoPE can be undone, if it is of a `RopeKind`."""
_PARTIAL = ("glm", "glm4", "gpt_neox", "nemotron", "phi", "phi3", "stablelm")
"""Model types that turn only the first `partial_rotary_factor` of each head; the others ignore the factor."""


def identity_of(
    config: PreTrainedConfig,
    *,
    weights: str,
    model: str,
    dtype: Dtype,
    adapter: str = "none",
    block_tokens: int = 256,
) -> Identity:
    """Return the identity of the caches that a model of this configuration makes.

    Args:
        config: the model's configuration; of a multimodal one the text part counts.
        weights: digest of the weight files, see `kvtcd.client.weights`.
        model: a name for people, part of the identity all the same.
        dtype: element type of the cache, that of the loaded model.
        adapter: digest of an active adapter's files, or ``none``.
        block_tokens: tokens of a full block.

    Raises:
        UnsupportedCache: a layer does not keep its whole past.
        UnsupportedRope: keys are rotated in a way that is unknown or cannot be undone exactly.
        BadIdentity: a value out of range.
    """
    return Identity(
        engine=ENGINE,
        hash_scheme=HASH_SCHEME,
        model=model,
        weights=weights,
        adapter=adapter,
        layout=layout_of(config, dtype),
        rope=rope_of(config),
        block_tokens=block_tokens,
    )


def layout_of(config: PreTrainedConfig, dtype: Dtype) -> Layout:
    """Return the layout of the caches: streams ``k``, rotated, and ``v``, in every layer.

    Raises:
        UnsupportedCache: a layer does not keep its whole past (sliding window, chunks, linear attention).
    """
    from transformers import DynamicCache  # noqa: PLC0415 - takes seconds

    from kvtcd.integrations.transformers_blocks import require_full_attention  # noqa: PLC0415 - loads torch

    text = config.get_text_config(decoder=True)
    require_full_attention(DynamicCache(config=text))
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return kv_layout(layers=text.num_hidden_layers, kv_heads=kv_heads, head_dim=_head_dim(text), dtype=dtype)


def rope_of(config: PreTrainedConfig) -> Rope:
    """Return how the model rotates its keys.

    Raises:
        UnsupportedRope: a model type whose pairing is not known here, or a RoPE type that cannot be undone.
    """
    text = config.get_text_config(decoder=True)
    pairing = next((pair for pair, types in _PAIRING.items() if text.model_type in types), None)
    if pairing is None:
        raise UnsupportedRope(f"model type {text.model_type}", MODEL_TYPES)
    given: Mapping[str, Any] = text.rope_parameters
    given = given.get("full_attention", given)  # the nested form has one entry for each type of layer
    kind = given.get("rope_type", "default")
    if kind not in tuple(RopeKind):
        raise UnsupportedRope(kind, tuple(RopeKind))
    fraction = given.get("partial_rotary_factor") or 1.0
    if fraction != 1.0 and text.model_type not in _PARTIAL:
        raise UnsupportedRope(f"partial rotation by model type {text.model_type}", _PARTIAL)
    return Rope(
        kind=RopeKind(kind),
        theta=float(given["rope_theta"]),
        rotary_dim=int(_head_dim(text) * fraction),
        pairing=pairing,
        **_scaling(RopeKind(kind), given, text),
    )


def _scaling(kind: RopeKind, given: Mapping[str, Any], text: PreTrainedConfig) -> dict[str, Any]:
    """Return the parameters that only this kind has."""
    match kind:
        case RopeKind.DEFAULT:
            return {}
        case RopeKind.LINEAR:
            return {"factor": float(given["factor"])}
        case RopeKind.LLAMA3:
            return {
                "factor": float(given["factor"]),
                "low_freq_factor": float(given["low_freq_factor"]),
                "high_freq_factor": float(given["high_freq_factor"]),
                "original_max_position": int(given["original_max_position_embeddings"]),
            }
        case RopeKind.YARN:
            original = int(given["original_max_position_embeddings"])
            factor = float(given["factor"] or text.max_position_embeddings / original)
            return {
                "factor": factor,
                "original_max_position": original,
                "beta_fast": float(given.get("beta_fast") or 32),
                "beta_slow": float(given.get("beta_slow") or 1),
                "attention_factor": _yarn_attention_factor(factor, given),
                "truncate": int(bool(given.get("truncate", True))),
            }


def _yarn_attention_factor(factor: float, given: Mapping[str, Any]) -> float:
    """YaRN (arXiv:2309.00071) section 3.4, with the two scales that DeepSeek added."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (stated := given.get("attention_factor")) is not None:
        return float(stated)
    if (mscale := given.get("mscale")) and (mscale_all := given.get("mscale_all_dim")):
        return scale(mscale) / scale(mscale_all)
    return scale(1.0)


def _head_dim(text: PreTrainedConfig) -> int:
    return getattr(text, "head_dim", None) or int(text.hidden_size // text.num_attention_heads)


def require_ours(identity: Identity) -> None:
    """Refuse an identity under which other programs keep other bytes or other keys.

    Raises:
        BadIdentity: it is one.
    """
    for field, want in (
        ("hash_scheme", HASH_SCHEME),
        ("page_format", "canonical"),
        ("parallel", "canonical"),
        ("scales", "none"),
    ):
        if getattr(identity, field) != want:
            raise BadIdentity(field, f"is {getattr(identity, field)!r}; caches of transformers need {want!r}")
