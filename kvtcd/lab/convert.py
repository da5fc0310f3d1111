"""From a GGUF file to a folder that transformers loads in seconds.

transformers can read GGUF itself, but slowly at every start, with the weights possibly left in their blocks,
and it refuses to save the result. Here each tensor is unpacked once, to bfloat16, and saved as safetensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvtcd.core.errors import Unavailable

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from rich.progress import Progress
    from transformers import PreTrainedConfig

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2"}
"""transformers' model type -> GGUF's architecture, for those whose differences `_as_transformers` undoes."""


def convert(gguf_file: Path, into: Path, progress: Progress) -> None:
    """Write `config.json`, bfloat16 `model.safetensors` and the tokenizer of `gguf_file` into folder `into`.

    The same file gives the same weights, byte for byte.

    Raises:
        Unavailable: the file is no model of a known architecture.
    """
    folder, file = gguf_file.parent, gguf_file.name
    config = AutoConfig.from_pretrained(folder, gguf_file=file, local_files_only=True)
    if config.model_type not in _ARCHITECTURES:
        raise Unavailable(
            f"{file} is a {config.model_type} model; only {', '.join(_ARCHITECTURES)} are converted"
        )
    with torch.device("meta"):
        wanted = AutoModelForCausalLM.from_config(config).state_dict()  # type: ignore[no-untyped-call]  # not annotated there
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == _ARCHITECTURES[config.model_type])
    gguf_names = get_tensor_name_map(arch, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in GGUFReader(gguf_file).tensors}
    task = progress.add_task("Converting model", total=len(wanted))
    tensors: dict[str, torch.Tensor] = {}
    for name, like in wanted.items():
        stem, _, suffix = name.rpartition(".")
        tensor = stored.get(f"{gguf_names.get_name(stem)}.{suffix}")
        if tensor is None:
            raise Unavailable(f"{file} has no tensor for {name}")
        unpacked = dequantize(tensor.data, tensor.tensor_type)
        values = _as_transformers(unpacked, name, config)
        if values.shape != tuple(like.shape):
            raise Unavailable(f"{file}: {name} is {values.shape}, expected {tuple(like.shape)}")
        tensors[name] = torch.tensor(values).to(torch.bfloat16)
        progress.advance(task)

    config.dtype = torch.bfloat16
    config.save_pretrained(into)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True).save_pretrained(into)


def _as_transformers(values: NDArray[np.float32], name: str, config: PreTrainedConfig) -> NDArray[np.float32]:
    """Undo what GGUF stores differently, for one tensor of transformers' name `name`.

    llama: rows of the query and key projections lie so that RoPE turns neighbours; transformers turns halves
    (`permute` in llama.cpp's convert_hf_to_gguf.py).
    """
    if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        planes = values.reshape(-1, config.head_dim // 2, 2, values.shape[-1])
        return planes.swapaxes(1, 2).reshape(values.shape)
    return values
