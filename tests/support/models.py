"""Models for tests: tiny random ones, and real ones that are skipped when they cannot be had."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvtcd.core.errors import Unavailable
from kvtcd.lab.models import LoadedModel, load, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def tiny_llama_config(**changes: object) -> LlamaConfig:
    """A llama of 3 layers, 4 query heads and 2 KV heads of 8."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return LlamaConfig(**(sizes | changes))


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model with random weights, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def real_model(alias: str) -> LoadedModel:
    """The model of an alias, loaded once; skips the test where it cannot be had."""
    model = _load_or_reason(alias)
    if isinstance(model, str):
        pytest.skip(model)
    return model


@functools.cache
def _load_or_reason(alias: str) -> LoadedModel | str:
    try:
        return load(resolve(alias))
    except Unavailable as error:
        return str(error)
