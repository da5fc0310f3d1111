"""A cache is of the weights that computed it: what changes in memory is refused, or has a name of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.models import random_model, tiny_llama_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvtcd.client import Client
from kvtcd.core.errors import BadIdentity, BadRequest
from kvtcd.integrations.transformers_cache import PrefixCache
from kvtcd.integrations.transformers_weights import identity_of_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model(tiny_llama_config()).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def value_weight(model: PreTrainedModel) -> torch.nn.Parameter:
    return model.model.layers[1].self_attn.v_proj.weight


def quantised(model: PreTrainedModel) -> None:
    """As `torch.ao.quantization.quantize_dynamic` does: a module without a weight in the place of another."""
    attention = model.model.layers[0].self_attn
    attention.k_proj = torch.nn.Sequential()


def quantised_at_loading(model: PreTrainedModel) -> None:
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}


class Packed(torch.Tensor):
    """As torchao's tensors: a class of its own in the place of a plain one."""


def packed(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(Packed))


def added_in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        value_weight(model).add_(0.5)


def merged(model: PreTrainedModel) -> None:
    """As merging an adapter does: around the count of writes."""
    value_weight(model).data += 0.5


def replaced(model: PreTrainedModel) -> None:
    value_weight(model).data = torch.zeros_like(value_weight(model))


def resized(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(80)


@pytest.mark.parametrize("change", [quantised, quantised_at_loading, packed, added_in_place, merged, resized])
def test_weights_that_are_not_those_of_the_files_need_a_name(folder: Path, change) -> None:
    model = loaded(folder)
    plain = identity_of_model(model, 256)
    change(model)

    with pytest.raises(BadIdentity, match=r"weights: .*give `variant`"):
        identity_of_model(model, 256)
    named = {identity_of_model(model, 256, variant=text).weights for text in ("int8", "merged")}
    assert len(named | {plain.weights}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_as_loaded_are_those_of_the_files(folder: Path, dtype: torch.dtype) -> None:
    assert identity_of_model(loaded(folder, dtype), 256).layout.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("tied", [False, True])
def test_files_of_the_base_model_and_tied_weights_are_known(tmp_path: Path, tied) -> None:
    model = random_model(tiny_llama_config(tie_word_embeddings=tied))
    model.model.save_pretrained(tmp_path / "base")
    of_base = loaded(tmp_path / "base")
    identity_of_model(of_base, 256)
    merged(of_base)
    with pytest.raises(BadIdentity, match=r"changed after loading: model\.layers\.1"):
        identity_of_model(of_base, 256)


def test_weights_that_were_quantised_in_their_files_are_those_of_the_files(folder: Path) -> None:
    model = loaded(folder)
    quantised_at_loading(model)
    model.config.save_pretrained(folder)
    identity_of_model(model, 256)


@pytest.mark.parametrize("change", [added_in_place, merged, replaced, quantised])
def test_weights_that_change_later_are_refused_at_each_load_and_save(folder: Path, change) -> None:
    model = loaded(folder)
    with Client(folder / "none.sock") as client:  # no daemon is needed to know it
        prefixes = PrefixCache(client, model)
        model.to(torch.device("cpu"))
        cache = prefixes.load([1, 2, 3]).cache
        change(model)
        for ask in (lambda: prefixes.load([1, 2, 3]), lambda: prefixes.save(cache, [1, 2, 3])):
            with pytest.raises(BadIdentity, match="changed in memory"):
                ask()


def test_a_variant_is_for_models_alone(folder: Path) -> None:
    with Client(folder / "none.sock") as client, pytest.raises(BadRequest, match="variant"):
        PrefixCache(client, identity_of_model(loaded(folder), 256), variant="int8")
