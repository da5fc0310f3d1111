"""The backend with SGLang's factory, pools, hashes and failure injector, on a daemon that is a process."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import random
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from daemons import (
    BOUND,
    KVTC2,
    LOSSLESS,
    REFUSING,
    emptied,
    listen,
    new_daemon,
    purged,
    settled,
    stored,
    told,
    until,
)
from quality import TEXT, TOKEN_BYTES, divergence
from safetensors.torch import save_file
from sglang_pools import (
    HEAD_DIM,
    HEADS,
    LATENT,
    LAYERS,
    LAYOUTS,
    PAGE,
    ROTATED,
    block,
    indices,
    installed,
    keys_and_values,
    latent,
    latent_block,
)
from support.models import tiny_llama_config
from support.patience import PATIENCE_S
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvtcd.client.weights import weights_digest
from kvtcd.core.errors import BadRequest
from kvtcd.core.identity import RopeKind
from kvtcd.core.layout import Dtype, kv_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtcd.lab.daemon import Daemon

pytestmark = [
    pytest.mark.peers("sglang"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what SGLang says while it is imported is not about us
]

LATENT_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
_SEEDS = itertools.count(1000)


@pytest.fixture(scope="module")
def sglang() -> Iterator[Any]:
    with installed() as found:
        yield found


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    with new_daemon(folder / "d") as daemon:
        yield daemon


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model that no other test has."""
    return checkpoint(tmp_path / "m", request.node.nodeid)


def checkpoint(folder: Path, name: str, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.tensor(list(name.encode()))}, folder / "model.safetensors")
    tiny_llama_config(num_hidden_layers=LAYERS, **config).save_pretrained(folder)
    return folder


def adapter(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.full((4,), float(seed))}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))
    return folder


def keys(sglang: Any, count: int, seed: int | None = None) -> list[str]:
    """Keys of a sequence of pages, by SGLang's own hash; of another one each time, but for the same seed."""
    prefix: str | None = None
    draw, made = random.Random(next(_SEEDS) if seed is None else seed), []
    for _ in range(count):
        prefix = sglang.hash([draw.randrange(1 << 17) for _ in range(PAGE)], prefix)
        made.append(prefix)
    return made


@contextmanager
def backend(sglang: Any, daemon: Daemon, model: Path, pool: Any, **changes: Any) -> Iterator[Any]:
    ours = {
        "backend_name": "kvtcd", "module_path": "kvtcd.integrations.sglang_hicache",
        "class_name": "KvtcdHiCache", "interface_v1": 1, "socket": str(daemon.socket),
        "timeout_seconds": PATIENCE_S,  # a busy machine must not turn hits into misses
    }  # fmt: skip
    facts = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True,
        "model_name": str(model),
    }  # fmt: skip
    known = set(inspect.signature(sglang.storage.HiCacheStorageConfig).parameters)
    facts |= {name: value for name, value in changes.items() if name in known}
    ours |= {name: value for name, value in changes.items() if name not in known}
    config = sglang.storage.HiCacheStorageConfig(**facts, extra_config=ours)
    made = sglang.factory.create_backend("dynamic", config, pool)
    try:
        made.register_mem_pool_host(pool)
        yield made
    finally:
        getattr(made, "_backend", made).close()


def held(daemon: Daemon, key: str) -> list[bytes]:
    """What the daemon has under a key, in any namespace."""
    with daemon.client() as client:
        return [
            bytes(client.get(info.name, bytes.fromhex(key)))
            for info in client.namespaces()
            if client.match(info.name, [bytes.fromhex(key)]).prefix
        ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_byte_for_byte(
    sglang: Any, daemon: Daemon, model: Path, layout: str, dtype: torch.dtype
) -> None:
    """Through the daemon into other places of a pool; what the daemon holds is the canonical block."""
    source = keys_and_values(sglang, layout, dtype=dtype, seed=1)
    target = keys_and_values(sglang, layout, dtype=dtype)
    given = keys(sglang, 5)
    with backend(sglang, daemon, model, source) as ours:
        assert ours.batch_exists(given) == 0
        assert ours.batch_set_v1(given, indices(3, 0, 7, 4, 9)) == [True] * 5
        assert ours.batch_exists(given) == 5
        assert held(daemon, given[2]) == [block(source, 7 * PAGE)]
    with backend(sglang, daemon, model, target) as ours:
        assert ours.batch_get_v1(given, indices(1, 2, 3, 4, 5)) == [True] * 5
    for number, page in enumerate((3, 0, 7, 4, 9)):
        assert block(target, (number + 1) * PAGE) == block(source, page * PAGE)
    assert not any(block(target, 6 * PAGE))  # nothing else was touched


def test_pools_of_different_layouts_share_blocks(sglang: Any, daemon: Daemon, model: Path) -> None:
    """An engine that was started with another layout goes on where the last one ended."""
    given = {layout: keys(sglang, 2) for layout in LAYOUTS}
    pools = {layout: keys_and_values(sglang, layout, seed=number) for number, layout in enumerate(LAYOUTS)}
    for layout, source in pools.items():
        with backend(sglang, daemon, model, source) as ours:
            assert ours.batch_set_v1(given[layout], indices(5, 6)) == [True] * 2
    for (layout, source), other in itertools.product(pools.items(), LAYOUTS):
        target = keys_and_values(sglang, other)
        with backend(sglang, daemon, model, target) as ours:
            assert ours.batch_get_v1(given[layout], indices(1, 2)) == [True] * 2
        assert block(target, PAGE) == block(source, 5 * PAGE), (layout, other)
        assert block(target, 2 * PAGE) == block(source, 6 * PAGE), (layout, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat_pages_are_the_same_blocks(sglang: Any, daemon: Daemon, model: Path, layout: str) -> None:
    """The interface before v1, where SGLang takes pages out of the pool itself."""
    source, target = keys_and_values(sglang, layout, seed=2), keys_and_values(sglang, layout)
    given = keys(sglang, 3)
    with backend(sglang, daemon, model, source) as ours:
        assert ours.batch_set(given[:2], [source.get_data_page(i * PAGE) for i in (4, 5)])
        assert ours.set(given[2], source.get_data_page(6 * PAGE))
        assert ours.exists(given[2])
        assert held(daemon, given[0]) == [block(source, 4 * PAGE)]
    with backend(sglang, daemon, model, target) as ours:
        pages = ours.batch_get(given[:2], [target.get_dummy_flat_data_page() for _ in range(2)])
        pages.append(ours.get(given[2]))
        for number, page in enumerate(pages):
            target.set_from_flat_data_page(number * PAGE, page)
        assert ours.get("ab" * 32) is None
    assert [block(target, i * PAGE) for i in range(3)] == [block(source, i * PAGE) for i in (4, 5, 6)]


def test_the_codec_sees_what_the_model_is(sglang: Any, daemon: Daemon, model: Path) -> None:
    """Layout and RoPE are in the identity, so that a profile of the model fits."""
    pool = keys_and_values(sglang, "page_first", seed=3)
    with backend(sglang, daemon, model, pool) as ours:
        assert ours.batch_set_v1(keys(sglang, 1), indices(0)) == [True]
    with daemon.client() as client:
        (info,) = [one for one in client.namespaces() if one.identity.weights == weights_digest(model)]
    identity = info.identity
    wanted = kv_layout(layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype=Dtype.BF16)
    assert (identity.layout, identity.page_format, identity.block_tokens) == (wanted, "canonical", PAGE)
    assert identity.rope is not None
    assert identity.rope.kind is RopeKind.DEFAULT


@pytest.mark.model
def test_pages_go_through_the_transform_codec(
    sglang: Any, folder: Path, smollm2: Path, profiles: Path
) -> None:
    """A model's cache from a pool of one layout, packed by kvtc2, into a pool of another."""
    page, count = 64, 10
    owner = new_daemon(folder / "codec", profiles=profiles, policy=KVTC2)
    words = AutoTokenizer.from_pretrained(smollm2)(TEXT.read_text()).input_ids[: page * count + 1]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    shape = {"dtype": torch.float32, "page": page, "layers": 30, "heads": 3, "head_dim": 64, "tokens": 1024}
    source = keys_and_values(sglang, "page_head", **shape)
    target = keys_and_values(sglang, "layer_first", **shape)

    def next_token(cache: DynamicCache) -> dict[str, float]:
        with torch.no_grad():
            logits = model(torch.tensor([words[-1:]]), past_key_values=cache).logits[0, -1]
        return {str(token): float(p) for token, p in enumerate(torch.log_softmax(logits, -1))}

    with torch.no_grad():
        cache = model(torch.tensor([words[:-1]])).past_key_values
    for layer, one in enumerate(cache.layers):
        for stream, tensor in enumerate((one.keys, one.values)):
            there = source.kv_buffer[stream, :count, :, :, layer]  # [pages, H, T, D]
            there.copy_(tensor[0].view(3, count, page, 64).permute(1, 0, 2, 3))
    exact = next_token(cache)

    given, at = keys(sglang, count), indices(*range(count), page=page)
    with owner:
        with backend(sglang, owner, smollm2, source) as ours:
            info = sglang.storage.HiCacheStorageExtraInfo(prefix_keys=[])
            assert ours.batch_set_v1(given, at, info) == [True] * count
        settled(owner)
        with owner.client() as client:
            (space,) = client.namespaces()
            assert space.codec.startswith("kvtc2"), space.codec_reason
            client.demote(space.name, [bytes.fromhex(key) for key in given])
            packed = client.stats()["tiers"]["disk"]["packed"]
        with backend(sglang, owner, smollm2, target) as ours:
            assert ours.batch_get_v1(given, at) == [True] * count
    held = target.kv_buffer[:, :, : count * page].permute(0, 1, 3, 2, 4).unsqueeze(2)  # [2, L, 1, H, T, D]
    lossy = next_token(DynamicCache(list(zip(held[0].clone(), held[1].clone(), strict=True))))

    ratio = count * page * TOKEN_BYTES / packed["bytes"]
    print(f"KL of the next token {divergence(exact, lossy):.4f}; {ratio:.1f} times smaller than 16 bit")  # noqa: T201
    assert 0 < divergence(exact, lossy) <= 5 * BOUND  # one token; the bound is for the mean of many
    assert ratio > 4


def test_prefix_keys_are_parents_and_positions(sglang: Any, folder: Path, model: Path) -> None:
    given = keys(sglang, 5)
    with new_daemon(folder / "parents") as owner:
        since = listen(owner)
        with backend(sglang, owner, model, keys_and_values(sglang, "page_first", seed=4)) as ours:
            info = sglang.storage.HiCacheStorageExtraInfo
            assert all(ours.batch_set_v1(given[:2], indices(0, 1), info(prefix_keys=[])))
            assert all(ours.batch_set_v1(given[1:4], indices(1, 2, 3), info(prefix_keys=given[:1])))
            assert all(ours.batch_set_v1(given[4:], indices(4), info(prefix_keys=None)))
        told = {notice.key.hex(): notice for notice in stored(owner, since, len(given))}

    assert [told[key].first_token for key in given] == [0, 16, 32, 48, None]
    parents = [told[key].parent for key in given]
    assert [parent.hex() if parent else None for parent in parents] == [None, *given[:3], None]


@pytest.mark.parametrize("layout", LATENT_LAYOUTS)
def test_pages_of_mla_have_one_writer_and_many_readers(
    sglang: Any, daemon: Daemon, model: Path, layout: str
) -> None:
    given, mla = keys(sglang, 3), {"is_mla_model": True, "tp_size": 2}
    source, target = latent(sglang, layout, seed=5), latent(sglang, "page_first")
    with backend(sglang, daemon, model, source, tp_rank=1, **mla) as reader:
        assert reader.batch_set_v1(given, indices(1, 2, 3)) == [True] * 3
        assert reader.batch_exists(given) == 0
    with backend(sglang, daemon, model, source, tp_rank=0, **mla) as writer:
        assert writer.batch_set_v1(given, indices(1, 2, 3)) == [True] * 3
        assert held(daemon, given[0]) == [latent_block(source, PAGE)]
    with backend(sglang, daemon, model, target, tp_rank=1, **mla) as reader:
        assert reader.batch_get_v1(given, indices(4, 5, 6)) == [True] * 3
    assert [latent_block(target, i * PAGE) for i in (4, 5, 6)] == [
        latent_block(source, i * PAGE) for i in (1, 2, 3)
    ]


@pytest.mark.parametrize("indexer", [False, True])
def test_pages_of_split_buffers(sglang: Any, daemon: Daemon, model: Path, *, indexer: bool) -> None:
    """``page_first_kv_split`` comes into being on NPUs alone; here its buffers are put into a pool."""

    def split(seed: int | None) -> Any:
        pool = latent(sglang, "page_first_direct", seed=seed)
        draw = torch.Generator().manual_seed(seed or 0)
        pool.layout = "page_first_kv_split"
        base = (pool.page_num, LAYERS, PAGE, 1)
        made = [torch.rand((*base, width), generator=draw) for width in (LATENT, ROTATED)]
        pool.k_buffer, pool.v_buffer = ((one * (seed is not None)).to(torch.bfloat16) for one in made)
        if indexer:
            shape = (pool.page_num, 1, PAGE, 1, 8)
            pool.index_k_buffer = (torch.rand(shape, generator=draw) * (seed is not None)).to(torch.bfloat16)
        return pool

    given, source, target = keys(sglang, 2), split(6), split(None)
    with backend(sglang, daemon, model, source, is_mla_model=True) as ours:
        assert ours.batch_set_v1(given, indices(1, 2)) == [True] * 2
    with backend(sglang, daemon, model, target, is_mla_model=True) as ours:
        assert ours.batch_get_v1(given, indices(7, 8)) == [True] * 2
    for name in ("k_buffer", "v_buffer") + ("index_k_buffer",) * indexer:
        assert torch.equal(getattr(target, name)[7:9], getattr(source, name)[1:3]), name
    if not indexer:  # the same blocks as those of the other layouts
        plain = latent(sglang, "layer_first")
        with backend(sglang, daemon, model, plain, is_mla_model=True) as ours:
            assert ours.batch_get_v1(given[:1], indices(0)) == [True]
        assert torch.equal(plain.kv_buffer[:, :PAGE, :, :LATENT], source.k_buffer[1])


def test_pages_in_fp8_are_opaque_and_say_which(sglang: Any, daemon: Daemon, model: Path) -> None:
    """SGLang's pool has bytes, whichever encoding they are of: only the operator knows (SGLang #33268)."""
    source = keys_and_values(sglang, "page_first", dtype=torch.float8_e4m3fn, seed=7)
    target = keys_and_values(sglang, "page_first", dtype=torch.float8_e5m2)
    assert source.dtype == target.dtype == torch.uint8
    given = keys(sglang, 2)
    with backend(sglang, daemon, model, source) as ours:  # nobody said which
        assert ours.batch_set_v1(given, indices(0, 1)) == [False] * 2
        assert ours.batch_exists(given) == 0
    with backend(sglang, daemon, model, source, variant="fp8_e4m3") as ours:
        assert ours.batch_set_v1(given, indices(0, 1)) == [True] * 2
    with backend(sglang, daemon, model, target, variant="fp8_e5m2") as ours:
        assert ours.batch_exists(given) == 0
    with backend(sglang, daemon, model, target, variant="fp8_e4m3") as ours:
        assert ours.batch_get_v1(given, indices(0, 1)) == [True] * 2
        assert block(target, 0) == block(source, 0)


def test_engines_that_differ_never_share_a_hit(
    sglang: Any, daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    """Dtype, shape, page, checkpoint under one name, RoPE, ranks, salts: never; the same: always."""
    given = keys(sglang, 2)
    make = lambda **changes: keys_and_values(sglang, "page_first", **{"seed": 8} | changes)  # noqa: E731
    lora = adapter(tmp_path / "lora", 1)
    others: dict[str, tuple[Path, Any, dict[str, Any]]] = {
        "dtype": (model, make(dtype=torch.float16), {}),
        "layers": (model, make(layers=2), {}),
        "heads": (model, make(heads=4), {}),
        "page": (model, make(page=32), {}),
        "weights": (checkpoint(tmp_path / "other" / "m", "other"), make(), {}),
        "rope": (
            checkpoint(tmp_path / "rope" / "m", model.parent.name, rope_parameters={
                "rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0,
            }), make(), {},
        ),
        "tp of 2": (model, make(), {"tp_size": 2}),
        "other rank": (model, make(), {"tp_size": 2, "tp_rank": 1}),
        "pp": (model, make(), {"pp_size": 2, "pp_rank": 1}),
        "cp": (model, make(), {"attn_cp_size": 2, "attn_cp_rank": 1}),
        "salt": (model, make(), {"salt": "a"}),
        "other salt": (model, make(), {"salt": "b"}),
        "variant": (model, make(), {"variant": "hf_overrides"}),
        "adapters": (model, make(), {"adapters": [str(lora)]}),
    }  # fmt: skip
    with backend(sglang, daemon, model, make()) as ours:
        assert ours.batch_set_v1(given, indices(0, 1)) == [True] * 2
    for name, (path, pool, changes) in others.items():
        with backend(sglang, daemon, path, pool, **changes) as ours:
            at = indices(0, 1, page=pool.page_size)
            assert ours.batch_exists(given) == 0, name
            assert ours.batch_get_v1(given, at) == [False] * 2, name
            assert ours.batch_set_v1(given, at) == [True] * 2, name
            assert ours.batch_exists(given) == 2, name
    adapter(lora, 2)  # another one under its name
    with backend(sglang, daemon, model, make(), adapters=[str(lora)]) as ours:
        assert ours.batch_exists(given) == 0
        adapter(lora, 3)  # while the engine runs
        assert ours.batch_set_v1(given, indices(0, 1)) == [False] * 2
    with backend(sglang, daemon, model, target := make(seed=None)) as ours:
        assert ours.batch_get_v1(given, indices(0, 1)) == [True] * 2
        assert block(target, 0) == block(make(), 0)


def test_keys_that_are_no_whole_hash_are_misses(sglang: Any, daemon: Daemon, model: Path) -> None:
    pool, good = keys_and_values(sglang, "page_first", seed=1), keys(sglang, 1)
    with backend(sglang, daemon, model, pool) as ours:
        assert ours.batch_set_v1([*good, "1f", "G" * 64], indices(0, 1, 2)) == [True, False, False]
        assert ours.batch_get_v1([*good, "1f"], indices(0, 1)) == [True, False]
        assert ours.batch_exists(["1f", *good]) == 0
        assert ours.batch_set_v1(good, indices(0, 1)) == [False]  # more places than keys
        assert not ours.set(good[0])


def test_a_page_that_is_gone_is_missing_alone(sglang: Any, daemon: Daemon, model: Path) -> None:
    source, target = keys_and_values(sglang, "layer_first", seed=1), keys_and_values(sglang, "layer_first")
    given = keys(sglang, 20)
    with backend(sglang, daemon, model, source) as ours:
        assert ours.batch_set_v1(given, indices(*range(4), *range(4, 20))) == [True] * 20
        with daemon.client() as client:
            for info in client.namespaces():
                client.delete(info.name, bytes.fromhex(given[17]))
        assert ours.batch_exists(given) == 17
    with backend(sglang, daemon, model, target) as ours:
        assert ours.batch_get_v1(given, indices(*range(20))) == [True] * 17 + [False] + [True] * 2
        assert block(target, 19 * PAGE) == block(source, 19 * PAGE)
        assert not any(block(target, 17 * PAGE))


def test_clear_removes_what_is_this_ones(sglang: Any, daemon: Daemon, model: Path) -> None:
    pool, given = keys_and_values(sglang, "page_first", seed=1), keys(sglang, 2)
    with (
        backend(sglang, daemon, model, pool) as ours,
        backend(sglang, daemon, model, pool, tp_size=2) as other,
    ):
        assert all(ours.batch_set_v1(given, indices(0, 1)))
        assert all(other.batch_set_v1(given, indices(0, 1)))
        assert ours.clear()
        assert ours.batch_exists(given) == 0
        assert other.batch_exists(given) == 2
        assert all(ours.batch_set_v1(given, indices(0, 1)))


def test_hits_of_several_pools_are_those_of_sglangs_own_backend(
    sglang: Any, daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    """Against `HiCacheFile`: a pool that every page needs, and one that only a prefix's end needs."""
    names, policies = sglang.storage.PoolName, sglang.storage.PoolHitPolicy
    transfer = sglang.storage.PoolTransfer
    pools = {
        name: keys_and_values(sglang, "page_first", seed=1) for name in (names.KV, names.SWA, names.INDEXER)
    }
    count, draw = 6, random.Random(13)
    for case in range(12):
        given = keys(sglang, count)
        with backend(sglang, daemon, model, pools[names.KV]) as ours:
            file = sglang.storage.HiCacheFile(
                sglang.storage.HiCacheStorageConfig(
                    0, 1, 0, 1, 0, 1, False, False, True, f"case{case}"
                ),
                str(tmp_path / f"files{case}"),
            )  # fmt: skip
            for both in (ours, file):
                both.register_mem_pool_host(pools[names.KV])
                for name, pool in pools.items():
                    both.register_mem_host_pool_v2(pool, name)
            for name in pools:
                some = [i for i in range(count) if draw.random() < 0.85]
                asked = [transfer(name, host_indices=indices(*some), keys=[given[i] for i in some])]
                for both in (ours, file):
                    assert both.batch_set_v2(asked) == {name: [True] * len(some)}
            wanted = [
                transfer(names.INDEXER, keys=given, hit_policy=policies.ALL_PAGES),
                transfer(names.SWA, keys=given[-2:], hit_policy=policies.TRAILING_PAGES),
            ]
            for asked in (wanted, wanted[:1], wanted[1:], []):
                found, expected = (both.batch_exists_v2(given, asked) for both in (ours, file))
                assert found.kv_hit_pages == expected.kv_hit_pages, case
                if found.kv_hit_pages:
                    assert found.restorable_prefix_pages == expected.restorable_prefix_pages, case
                    assert found.extra_pool_hit_pages == expected.extra_pool_hit_pages, case


def test_pools_beside_the_first_keep_their_own_pages(sglang: Any, daemon: Daemon, model: Path) -> None:
    names, transfer = sglang.storage.PoolName, sglang.storage.PoolTransfer
    kv, swa = (keys_and_values(sglang, "page_first", seed=seed) for seed in (1, 2))
    given = keys(sglang, 2)
    with backend(sglang, daemon, model, kv) as ours:
        ours.register_mem_host_pool_v2(swa, names.SWA)
        assert all(ours.batch_set_v1(given, indices(0, 1)))
        at = {"host_indices": indices(0, 1), "keys": given}
        assert ours.batch_set_v2([transfer(names.SWA, **at)]) == {names.SWA: [True] * 2}
        wanted = block(swa, 0)
        swa.kv_buffer.zero_()
        assert ours.batch_get_v2([transfer(names.SWA, **at)]) == {names.SWA: [True] * 2}
        assert block(swa, 0) == wanted
        assert ours.batch_get_v2([transfer(names.MAMBA, **at)]) == {names.MAMBA: [False] * 2}  # not ours


def test_injected_failures_cost_hits_and_nothing_else(
    sglang: Any, daemon: Daemon, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own injector around the backend, as its tests use it."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.4")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    source, target = (keys_and_values(sglang, "page_head", seed=seed) for seed in (1, None))
    with backend(sglang, daemon, model, source) as ours:
        assert type(ours).__name__ == "HiCacheStorageFailureInjector"
        ours._thread_local.random = random.Random(1)  # of this thread, for both backends
        for number in range(12):
            given = keys(sglang, 2, seed=200 + number)
            while not all(ours.batch_set_v1(given, indices(2, 3))):
                assert ours.batch_exists(given) in (0, 1, 2)
    fetched = 0
    with backend(sglang, daemon, model, target) as ours:
        for number in range(12):
            target.kv_buffer.zero_()
            got = ours.batch_get_v1(keys(sglang, 2, seed=200 + number), indices(4, 5))
            for page, done in enumerate(got):
                assert block(target, (4 + page) * PAGE) == (
                    block(source, (2 + page) * PAGE) if done else bytes(len(block(source, 0)))
                )
                fetched += done
    assert 0 < fetched < 24


def test_a_daemon_that_is_away_comes_back_or_hangs(sglang: Any, folder: Path, model: Path) -> None:
    source, target = (keys_and_values(sglang, "page_first", seed=seed) for seed in (1, None))
    given, owner = keys(sglang, 3), new_daemon(folder / "away")
    with backend(sglang, owner, model, source, timeout_seconds=5.0) as ours:  # it is not there yet
        assert ours.batch_exists(given) == 0
        assert ours.batch_set_v1(given, indices(0, 1, 2)) == [False] * 3
        with owner:
            until(lambda: all(ours.batch_set_v1(given, indices(0, 1, 2))))
            settled(owner)
            owner.kill()
            assert ours.batch_exists(given) == 0
            assert ours.batch_get_v1(given, indices(0, 1, 2)) == [False] * 3
            owner.start()
            with backend(sglang, owner, model, target, timeout_seconds=5.0) as other:
                until(lambda: all(other.batch_get_v1(given, indices(0, 1, 2))))
                assert block(target, 0) == block(source, 0)
                os.kill(owner.pid, signal.SIGSTOP)
                try:  # SGLang's ranks wait for each other: a call that hangs would hang them all
                    assert other.batch_get_v1(given, indices(0, 1, 2)) == [False] * 3
                    assert other.batch_exists(given) == 0
                finally:
                    os.kill(owner.pid, signal.SIGCONT)
                until(lambda: all(other.batch_get_v1(given, indices(0, 1, 2))))
                assert block(target, 2 * PAGE) == block(source, 2 * PAGE)


def test_a_daemon_that_changes_costs_misses_and_nothing_else(sglang: Any, folder: Path, model: Path) -> None:
    """Purged before a fetch, a store and SGLang's own purge, told to refuse, emptied: never an outage."""
    source, target = (keys_and_values(sglang, "page_first", seed=seed) for seed in (1, None))
    given, more = keys(sglang, 3), keys(sglang, 2)
    owner = new_daemon(folder / "changes", policy=LOSSLESS)
    with owner, backend(sglang, owner, model, source) as ours, backend(sglang, owner, model, target) as other:
        assert all(ours.batch_set_v1(given, indices(0, 1, 2)))
        purged(owner)
        assert other.batch_get_v1(given, indices(0, 1, 2)) == [False] * 3
        assert all(ours.batch_set_v1(given, indices(0, 1, 2)))
        purged(owner)
        assert all(ours.batch_set_v1(given, indices(0, 1, 2)))
        purged(owner)
        assert ours.clear()
        assert all(ours.batch_set_v1(given, indices(0, 1, 2)))
        told(owner, REFUSING)
        assert ours.batch_set_v1(more, indices(3, 4)) == [False] * 2
        assert (other.batch_exists(more), other.batch_exists(given)) == (0, 3)
        told(owner, LOSSLESS)
        emptied(owner)
        assert other.batch_exists(given) == 0
        until(lambda: all(ours.batch_set_v1(given, indices(0, 1, 2))))
        until(lambda: all(other.batch_get_v1(given, indices(0, 1, 2))))
        assert block(target, PAGE) == block(source, PAGE)


def test_settings_that_cannot_be_meant_end_the_start(sglang: Any, daemon: Daemon, tmp_path: Path) -> None:
    pool = keys_and_values(sglang, "page_first")
    model = checkpoint(tmp_path / "m", "m")
    for changes in (
        {"timeout_seconds": 0},
        {"adapters": "x"},
        {"adapters": ["nowhere"]},
        {"weights": "nowhere"},
    ):
        with pytest.raises(BadRequest), backend(sglang, daemon, model, pool, **changes):
            pass
