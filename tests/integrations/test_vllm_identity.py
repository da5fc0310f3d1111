"""Two engines whose pages differ never share an identity; the same engine twice always does."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from support.models import tiny_llama_config
from support.vllm_twin import OffloadingParallelConfig, OffloadingSpec, spec

from kvtcd.core.errors import BadIdentity, BadRequest, Unavailable
from kvtcd.core.layout import Dtype, kv_layout
from kvtcd.integrations.model_files import FileWatch, Settings, adapters_digest
from kvtcd.integrations.vllm_identity import attention_of, identities, pages_of
from kvtcd.integrations.vllm_model import model_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvtcd.core.identity import Identity

MODULES = ["daemon", "finder", "identity", "jobs", "lookups", "model", "planner", "steps", "threads"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder."""
    return checkpoint(tmp_path / "m", seed=0)


def checkpoint(folder: Path, seed: int, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights = torch.rand(64, generator=torch.Generator().manual_seed(seed))
    save_file({"w": weights}, folder / "model.safetensors")
    tiny_llama_config(**config).save_pretrained(folder)
    return folder


def adapter(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.full((4,), float(seed))}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))
    return folder


def identity(
    folder: Path,
    *,
    adapters: tuple[Path, ...] = (),
    variant: str = "",
    version: str = "1",
    device: str = "cpu",
    kernels: str = "vec",
    config: object = None,
    **engine: object,
) -> Identity:
    pages = pages_of(spec(str(folder), **engine), version=version, device=device, kernels=kernels)
    settings = Settings(folder=folder, adapters=adapters, variant=variant)
    attention = attention_of(config or tiny_llama_config())
    (only,) = identities(pages, model_of(settings, attention)).values()
    return only


def test_pages_of_the_plain_cpu_kernels_are_named_with_their_layout(folder: Path) -> None:
    found = identity(folder)

    assert found.layout == kv_layout(layers=3, kv_heads=2, head_dim=8, dtype=Dtype.F32)
    assert found.page_format == "vllm-cpu-vec:32"
    assert found.rope is not None
    assert found.block_tokens == 64
    assert found == identity(folder)


@pytest.mark.parametrize("kernels", ["FLASH_ATTN", "TRITON_ATTN"])
def test_pages_of_kernels_that_keep_keys_beside_values_are_named(folder: Path, kernels: str) -> None:
    found = identity(folder, device="cuda", kernels=kernels)

    assert found.page_format == "vllm-flash:32"
    assert found.layout == identity(folder).layout
    assert identity(folder, device="cuda", kernels=kernels, kv_cache_layout="LBNHC").rope is None


@pytest.mark.parametrize(
    "change",
    [
        {"kernels": "amx"},
        {"kernels": "FLASH_ATTN"},
        {"kernels": "FLASHINFER", "device": "cuda"},
        {"kernels": ""},
        {"device": "cuda"},
        {"kv_cache_layout": "BLHNC"},
        {"variant": "yarn by an argument"},
        {"layers": 4, "token_bytes": 4 * 128},
        {"config": tiny_llama_config(head_dim=16)},
        {"dtype": "fp8_e4m3", "token_bytes": 96},
    ],
)
def test_pages_whose_inside_is_not_known_are_opaque(folder: Path, change: dict[str, object]) -> None:
    found = identity(folder, **change)

    assert found.rope is None
    assert not any(stream.rope for stream in found.layout.streams)
    assert found.page_format.startswith("vllm-1-")
    assert found.layout.nbytes(64) == change.get("token_bytes", 384) * 64
    assert found != identity(folder, **(change | {"version": "2"}))  # a release may order them otherwise


def test_everything_that_changes_the_cache_changes_the_identity(folder: Path, tmp_path: Path) -> None:
    """Each line is a way in which some store was seen to give one engine the cache of another."""
    plain = identity(folder)
    first, second = adapter(tmp_path / "lora", 1), adapter(tmp_path / "other", 1)
    other = {
        "another dtype": identity(folder, dtype="bfloat16", token_bytes=192),
        "quantised": identity(folder, dtype="fp8_e4m3", token_bytes=96),
        "quantised otherwise": identity(folder, dtype="fp8_e5m2", token_bytes=96),
        "another engine block": identity(folder, block=64, per_chunk=1),
        "another chunk": identity(folder, per_chunk=4),
        "two ranks": identity(folder, parallel=OffloadingParallelConfig(world_size=2, tp_size=2)),
        "two stages": identity(folder, parallel=OffloadingParallelConfig(world_size=2, pp_size=2)),
        "canonical pages": identity(folder, canonical_layout=True),
        "another order": identity(folder, kv_cache_layout="BLHNC"),
        "no order that is known": identity(folder, kv_cache_layout=None),
        "an adapter": identity(folder, adapters=(first,)),
        "two adapters": identity(folder, adapters=(first, second)),
        "the same bytes elsewhere": identity(folder, adapters=(second,)),
        "an argument": identity(folder, variant="--hf-overrides …"),
        "another argument": identity(folder, variant="--quantization …"),
    }
    digests = {name: found.digest for name, found in other.items()} | {"plain": plain.digest}

    assert len(set(digests.values())) == len(digests)


def test_two_checkpoints_under_one_name(tmp_path: Path) -> None:
    one, two = (checkpoint(tmp_path / str(seed) / "same", seed) for seed in (1, 2))

    assert identity(one).model == identity(two).model
    assert identity(one).weights != identity(two).weights


def test_rope_scaled_otherwise_in_config_json(folder: Path) -> None:
    before = identity(folder)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    checkpoint(folder, seed=0, rope_parameters=scaled)

    assert identity(folder).digest != before.digest
    # even where the keys' rotation is not read at all
    opaque = identity(folder, kernels="amx")
    checkpoint(folder, seed=0)
    assert identity(folder, kernels="amx").digest != opaque.digest


def test_adapters_are_told_apart_by_path_and_bytes(tmp_path: Path) -> None:
    """VLLM's keys have name and path of an adapter, nothing of what is in it."""
    one, two = adapter(tmp_path / "one", 1), adapter(tmp_path / "two", 2)
    before = adapters_digest([one, two])
    assert before == adapters_digest([two, one])

    adapter(one, 2), adapter(two, 1)  # they have changed places
    assert adapters_digest([one, two]) != before
    adapter(one, 1), adapter(two, 2)
    assert adapters_digest([one, two]) == before
    (two / "adapter_config.json").write_text(json.dumps({"r": 8}))
    assert adapters_digest([one, two]) != before
    assert adapters_digest([]) == "none"


def test_an_adapter_replaced_under_a_running_engine_is_noticed(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora", 1)
    watch = FileWatch("an adapter", [folder])
    assert watch() == ""

    adapter(folder, 2)
    assert "changed" in watch()
    (folder / "adapter_model.safetensors").unlink()
    assert "changed" in watch()


def test_groups_are_namespaces_of_their_own(folder: Path) -> None:
    pages = pages_of(spec(str(folder), groups=2), version="1", device="cuda", kernels="")
    found = identities(pages, model_of(Settings(folder=folder), attention_of(tiny_llama_config())))

    assert sorted(found) == [0, 1]
    assert found[0].digest != found[1].digest
    assert found[0].rope is None


def test_a_model_that_is_no_folder_needs_one(tmp_path: Path) -> None:
    rest = {"adapters": (), "variant": "", "full_digest": False}
    with pytest.raises(BadRequest, match="weights"):
        Settings.of("org/model", weights=None, **rest)
    folder = checkpoint(tmp_path / "m", seed=0)
    assert Settings.of("org/model", weights=str(folder), **rest).folder == folder
    with pytest.raises(BadRequest, match="list of folders"):
        Settings.of(str(folder), weights=None, **(rest | {"adapters": str(folder)}))
    with pytest.raises(BadRequest, match="list of folders"):
        Settings.of(str(folder), weights=None, **(rest | {"adapters": [str(tmp_path / "none")]}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(Unavailable):
        model_of(Settings(folder=folder, adapters=(tmp_path / "empty",)), None)


def test_pages_that_do_not_divide_into_tokens_are_refused(folder: Path) -> None:
    with pytest.raises(BadIdentity, match="do not divide"):
        identity(folder, token_bytes=3)
    empty = spec(str(folder))
    with pytest.raises(BadIdentity, match="no cache"):
        pages_of(
            OffloadingSpec(replace(empty.config, worker_kv_bytes_per_block=0)),
            version="1", device="cpu", kernels="vec",
        )  # fmt: skip


def test_a_model_of_an_unknown_kind_has_no_attention() -> None:
    assert attention_of(tiny_llama_config()) is not None
    unknown = tiny_llama_config()
    unknown.model_type = "something_new"
    assert attention_of(unknown) is None


def test_what_runs_inside_an_engine_loads_nothing_heavy() -> None:
    """Numba before the workers start breaks vLLM on a CPU; torch and the rest cost a scheduler seconds."""
    heavy = {"torch", "numpy", "numba", "llvmlite", "transformers", "aiohttp", "pydantic", "safetensors"}
    names = ", ".join(f"kvtcd.integrations.vllm_{name}" for name in MODULES)
    code = f"import sys, {names}; found = {heavy} & set(sys.modules); sys.exit(str(found) if found else 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
