"""A tiny model is written as GGUF by the rules of llama.cpp, and must come back as it was."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from rich.progress import Progress
from support.models import random_model, tiny_llama_config
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config

from kvtcd.core.errors import Unavailable
from kvtcd.lab.convert import convert

WORDS = ["<s>", "</s>", "a", "b", "c", "ab", *(chr(0x21 + i) for i in range(58))]


def llama_cpp_permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write_gguf(model: PreTrainedModel, arch: str, path: Path, leave_out: str = "") -> Path:
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(WORDS) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.LLAMA if arch == "llama" else gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            values = llama_cpp_permute(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            values = llama_cpp_permute(values, config.num_key_value_heads)
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_weights_come_back_rounded_to_bfloat16_and_nothing_else(
    tmp_path: Path, into: Path, arch: str, tied: bool
) -> None:
    config = tiny_llama_config(tie_word_embeddings=tied)
    if arch == "qwen2":
        sizes = {
            k: v for k, v in config.to_dict().items() if k not in {"model_type", "architectures", "head_dim"}
        }
        config = Qwen2Config(**sizes)
    model = random_model(config)
    with torch.no_grad():
        for bias in (p for n, p in model.named_parameters() if n.endswith("bias")):
            bias.normal_()
    progress = Progress(disable=True)
    convert(write_gguf(model, arch, tmp_path / "model.gguf"), into, progress)
    assert progress.finished
    back, info = AutoModelForCausalLM.from_pretrained(into, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert back.config.tie_word_embeddings == tied
    wanted = model.state_dict()
    assert set(back.state_dict()) == set(wanted)
    for name, tensor in back.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, wanted[name].bfloat16()), name
    assert AutoTokenizer.from_pretrained(into)("cab").input_ids == [4, 5]


def test_the_same_file_gives_the_same_bytes(tmp_path: Path, into: Path) -> None:
    file = write_gguf(random_model(tiny_llama_config()), "llama", tmp_path / "model.gguf")
    convert(file, into, Progress(disable=True))
    first = (into / "model.safetensors").read_bytes()
    convert(file, into, Progress(disable=True))
    assert (into / "model.safetensors").read_bytes() == first


def test_a_missing_tensor_is_named(tmp_path: Path, into: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    file = write_gguf(random_model(tiny_llama_config()), "llama", tmp_path / "model.gguf", leave_out=name)
    with pytest.raises(
        Unavailable, match=r"model\.gguf has no tensor for model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        convert(file, into, Progress(disable=True))


def test_an_architecture_whose_differences_are_not_known_is_refused(tmp_path: Path, into: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "starcoder2")
    writer.add_vocab_size(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(Unavailable, match=r"is a starcoder2 model; only llama, qwen2 are converted"):
        convert(tmp_path / "model.gguf", into, Progress(disable=True))
