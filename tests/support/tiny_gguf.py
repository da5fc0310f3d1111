"""A tiny model file for llama.cpp: a random llama of two layers that reads and says bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf import GGUFWriter

if TYPE_CHECKING:
    from pathlib import Path

_LAYERS, _WIDTH, _HEADS, _KV_HEADS, _INNER = 2, 64, 4, 2, 96
_CONTROL, _UNKNOWN, _BYTE = 3, 2, 6


def write_tiny_gguf(path: Path, seed: int = 0, head: int = 32) -> Path:
    """Write the file; another seed gives another model of the same shape. `head` is the width of a head."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(4096)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    rng = np.random.default_rng(seed)
    for name, shape in _tensors(len(tokens), head).items():
        ones = np.ones(shape, np.float32)
        drawn = rng.standard_normal(shape).astype(np.float32) * 1.5 / shape[-1] ** 0.5
        writer.add_tensor(name, ones if len(shape) == 1 else drawn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(vocabulary: int, head: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary, _WIDTH),
        "output_norm.weight": (_WIDTH,),
        "output.weight": (vocabulary, _WIDTH),
    }
    for layer in range(_LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (_WIDTH,),
                "attn_q": (_HEADS * head, _WIDTH),
                "attn_k": (_KV_HEADS * head, _WIDTH),
                "attn_v": (_KV_HEADS * head, _WIDTH),
                "attn_output": (_WIDTH, _HEADS * head),
                "ffn_norm": (_WIDTH,),
                "ffn_gate": (_INNER, _WIDTH),
                "ffn_up": (_INNER, _WIDTH),
                "ffn_down": (_WIDTH, _INNER),
            }.items()
        }
    return shapes
