"""What engines read: random models of two layers, adapters of them, and random prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

VOCABULARY = 512
LENGTH = 300
CACHED = 256
"""Tokens of a prompt in whole chunks."""
WINDOW = 64


def prompt(seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, vocabulary) for _ in range(LENGTH)]


def tiny(folder: Path, seed: int) -> Path:
    """Write a model into a folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def hybrid(folder: Path, seed: int) -> Path:
    """Write a model of which half the layers look back over `WINDOW` tokens, and half over all."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = Gemma3TextConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
            sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2,
        )  # fmt: skip
        Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def lora(folder: Path, seed: int) -> Path:
    """Write an adapter of `tiny` that changes keys and values."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name in ("k_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(8, 256, generator=draw)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(128, 8, generator=draw)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
