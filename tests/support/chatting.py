"""A tiny model that can chat: random weights, a token for each character, and a chat template."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from support.models import random_model, tiny_llama_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtcd.lab.models import LoadedModel

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WINDOW = 512
"""Tokens that the model can read."""


def chatting_model(folder: Path) -> LoadedModel:
    """The model, in float32. It says characters until it is stopped, and never a special token."""
    specials = ["<|im_start|>", "<|im_end|>"]
    characters = [*string.ascii_letters, *string.digits, *"?!.,Ġ", "Ċ"]
    tokens = Tokenizer(models.BPE({text: n for n, text in enumerate(specials + characters)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=specials[1], additional_special_tokens=specials[:1]
    )
    tokenizer.chat_template = _TEMPLATE
    size = len(specials) + len(characters)
    model = random_model(tiny_llama_config(vocab_size=size, max_position_embeddings=WINDOW), seed=5)
    with torch.no_grad():
        model.lm_head.weight[: len(specials)] = 0
    model.save_pretrained(folder)
    return LoadedModel(model, tokenizer, folder)
