"""Pages as blocks, by index arithmetic, and identities that no two caches share which differ."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from support.models import tiny_llama_config
from support.sglang_twin import LAYERS, PAGE, ClosedPoolHost, MHATokenToKVPoolHost, OtherPoolHost

from kvtcd.core.errors import BadIdentity, BadRequest
from kvtcd.core.layout import Dtype, kv_layout
from kvtcd.integrations.sglang_identity import Parameters, Ranks, engine_key, identity_of, model_of
from kvtcd.integrations.sglang_pages import pages_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvtcd.core.identity import Identity

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
ALONE = Ranks(tp=(0, 1), pp=(0, 1), cp=(0, 1), dcp=(0, 1), replicated=False)
CONFIG = tiny_llama_config(num_hidden_layers=LAYERS)


def element(pool: MHATokenToKVPoolHost, stream: int, layer: int, token: int, head: int, dim: int) -> float:
    kv, (page, within) = pool.kv_buffer[stream], divmod(token, PAGE)
    at = {
        "layer_first": (layer, token, head, dim),
        "page_first": (token, layer, head, dim),
        "page_first_direct": (page, layer, within, head, dim),
        "page_head": (page, head, within, layer, dim),
    }[pool.layout]
    return float(kv[at])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_has_the_order_of_the_core(layout: str) -> None:
    pool = MHATokenToKVPoolHost(layout)
    pages = pages_of(pool, "kv", version="1")
    block = torch.zeros(pages.kind.layout.nbytes(PAGE), dtype=torch.uint8)
    pages.gather(2 * PAGE, block)

    assert (pages.kind.page_format, pages.kind.tokens) == ("canonical", PAGE)
    assert block.view(torch.float32).tolist() == [
        element(pool, stream, layer, 2 * PAGE + token, head, dim)
        for stream in range(2)
        for layer in range(LAYERS)
        for token in range(PAGE)
        for head in range(2)
        for dim in range(8)
    ]
    flat = torch.zeros_like(block)
    pages.pack(pool.get_data_page(2 * PAGE), flat)
    assert torch.equal(flat, block)


@pytest.mark.parametrize("cls", [MHATokenToKVPoolHost, OtherPoolHost])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_comes_back_and_nothing_else_changes(layout: str, cls: type[MHATokenToKVPoolHost]) -> None:
    source, target = cls(layout), cls(layout, filled=False)
    pages, others = pages_of(source, "kv", version="1"), pages_of(target, "kv", version="1")
    block = torch.zeros(pages.kind.layout.nbytes(PAGE), dtype=torch.uint8)
    pages.gather(PAGE, block)
    others.scatter(block, 3 * PAGE)

    assert torch.equal(target.get_data_page(3 * PAGE), source.get_data_page(PAGE))
    assert target.kv_buffer.count_nonzero() == source.get_data_page(PAGE).count_nonzero()
    flat = source.get_dummy_flat_data_page()
    pages.unpack(block, flat)
    assert torch.equal(flat, source.get_data_page(PAGE))


def test_a_pool_whose_shape_is_another_is_opaque() -> None:
    """A release of SGLang that orders a pool otherwise must not be read as this one does."""
    pool = MHATokenToKVPoolHost("page_first")
    pool.kv_buffer = pool.kv_buffer.transpose(2, 3).contiguous()

    kind = pages_of(pool, "kv", version="1").kind
    assert kind.page_format != "canonical"
    assert kind.layout.nbytes(PAGE) == kv_layout(
        layers=LAYERS, kv_heads=2, head_dim=8, dtype=Dtype.F32
    ).nbytes(PAGE)


def test_a_pool_that_gives_no_pages_is_refused() -> None:
    with pytest.raises(BadIdentity, match="ClosedPoolHost"):
        pages_of(ClosedPoolHost("page_first"), "kv", version="1")


def checkpoint(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.full((8,), float(seed))}, folder / "model.safetensors")
    CONFIG.save_pretrained(folder)
    return folder


def identity(
    folder: Path,
    pool: MHATokenToKVPoolHost | None = None,
    *,
    name: str = "kv",
    ranks: Ranks = ALONE,
    version: str = "1",
    **parameters: object,
) -> Identity:
    given = Parameters.of(parameters)
    model, _ = model_of(given, str(folder), lambda _: CONFIG)
    kind = pages_of(pool or MHATokenToKVPoolHost("page_first"), name, version=version).kind
    return identity_of(name, kind, ranks, model, variant=given.variant)


def test_everything_that_changes_the_cache_changes_the_identity(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", 0)
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_model.safetensors").write_bytes(b"one")
    other = OtherPoolHost("page_first")
    mla = replace(ALONE, replicated=True, dcp=(1, 2), tp=(1, 4))
    found = [
        identity(folder),
        identity(checkpoint(tmp_path / "n" / "m", 1)),
        identity(folder, MHATokenToKVPoolHost("page_first", dtype=torch.bfloat16)),
        identity(folder, MHATokenToKVPoolHost("page_first", heads=4)),
        identity(folder, MHATokenToKVPoolHost("page_first", layers=2)),
        identity(folder, other),
        identity(folder, other, version="2"),
        identity(folder, OtherPoolHost("layer_first")),
        identity(folder, name="swa"),
        identity(folder, ranks=replace(ALONE, tp=(0, 2))),
        identity(folder, ranks=replace(ALONE, tp=(1, 2))),
        identity(folder, ranks=replace(ALONE, pp=(1, 2))),
        identity(folder, ranks=replace(ALONE, cp=(1, 2))),
        identity(folder, ranks=mla),
        identity(folder, ranks=replace(mla, tp=(1, 2))),
        identity(folder, ranks=replace(mla, dcp=(0, 2))),
        identity(folder, variant="x"),
        identity(folder, adapters=[str(lora)]),
    ]
    (lora / "adapter_model.safetensors").write_bytes(b"two")
    found.append(identity(folder, adapters=[str(lora)]))

    assert len({one.digest for one in found}) == len(found)


def test_layouts_whose_order_is_known_are_one_identity_and_one_that_a_profile_fits(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", 0)
    found = {identity(folder, MHATokenToKVPoolHost(layout)) for layout in LAYOUTS}

    (one,) = found
    assert one.layout == kv_layout(layers=LAYERS, kv_heads=2, head_dim=8, dtype=Dtype.F32)
    assert one.rope is not None
    assert identity(folder, variant="overridden").rope is None


def test_ranks_that_hold_the_same_are_one(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", 0)
    ranks = [Ranks(tp=(rank, 2), pp=(0, 1), cp=(0, 1), dcp=(0, 1), replicated=True) for rank in range(2)]

    assert identity(folder, ranks=ranks[0]) == identity(folder, ranks=ranks[1])
    assert ranks[0].parallel(replicated=True) == "canonical"
    state = [identity(folder, name="mamba", ranks=one) for one in ranks]
    assert state[0] != state[1]


def test_an_encoding_that_the_pool_does_not_name_has_to_be(tmp_path: Path) -> None:
    folder, pool = checkpoint(tmp_path / "m", 0), OtherPoolHost("page_first", dtype=torch.uint8)
    with pytest.raises(BadRequest, match="kv-cache-dtype"):
        identity(folder, pool)
    assert identity(folder, pool, variant="fp8_e4m3") != identity(folder, pool, variant="fp8_e5m2")


def test_a_configuration_that_cannot_be_read_costs_the_rope_alone(tmp_path: Path) -> None:
    def broken(_: object) -> object:
        raise ValueError("of no kind that is known")

    model, _ = model_of(Parameters(), str(checkpoint(tmp_path / "m", 0)), broken)
    assert (model.layers, model.rope) == (None, None)
    unknown = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(num_hidden_layers=1))  # noqa: ARG005
    model, _ = model_of(Parameters(), str(tmp_path / "m"), lambda _: unknown)
    assert model.rope is None


def test_a_key_is_a_whole_hash() -> None:
    assert engine_key("ab" * 32) == b"\xab" * 32
    assert [engine_key(text) for text in ("ab", "AB" * 32, "ab" * 33, "", "ab" * 32 + "_L0-3")] == [None] * 5
