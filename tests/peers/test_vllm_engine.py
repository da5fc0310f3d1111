"""A real vLLM engine, on a CPU, whose cache outlives it, by the tier and by the connector."""

from __future__ import annotations

import json
import math
import random
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from vllm_engine import CHUNK, TRANSFERS, Engine

from kvtcd.client import Notice, What
from kvtcd.client.weights import weights_digest
from kvtcd.codec.pages import page_map
from kvtcd.codec.profile import read_origin
from kvtcd.core.errors import Unavailable
from kvtcd.lab.daemon import Daemon
from kvtcd.lab.models import cache_folder, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.peers("vllm"), pytest.mark.slow, pytest.mark.timeout(3600)]

LOSSLESS = """
[match]
[codec]
name = "lossless"
"""
PROMPT = 300
CACHED = 256
"""Tokens of a prompt in whole chunks."""


def prompt(seed: int, vocabulary: int = 40_000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, vocabulary) for _ in range(PROMPT)]


@pytest.fixture(params=list(TRANSFERS))
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name:
        yield Path(name)


@pytest.fixture
def daemon(folder: Path) -> Daemon:
    (folder / "lossless.toml").write_text(LOSSLESS)
    return Daemon(
        folder, host=128 << 20, disk=1 << 30, profiles=folder / "profiles", policy=folder / "lossless.toml"
    )


@pytest.fixture(scope="session")
def smollm2() -> Path:
    try:
        return resolve("smollm2")
    except Unavailable as error:
        pytest.skip(str(error))


def settled(daemon: Daemon) -> None:
    """Wait until everything is on disk."""
    with daemon.client() as client:
        for namespace in client.namespaces():
            client.flush(namespace.name)


def test_a_prefix_outlives_engine_and_daemon(way: str, folder: Path, daemon: Daemon, smollm2: Path) -> None:
    """Stored in one life of both, loaded in the next, and right while the daemon dies and comes back."""
    first, second = prompt(1), prompt(2)
    with daemon:
        with Engine(smollm2, daemon.socket, folder / "one.log", way=way) as engine:
            wanted = engine.read(first)
            assert wanted["cached"] == 0
            expected = engine.read(second)["tokens"]
            salted = engine.read(first, salt="a")
            assert salted["cached"] == 0  # another salt: nobody's tokens are its own
            engine.forget()
            assert engine.read(first, salt="b")["cached"] == 0
            assert engine.read(first, salt="a")["cached"] == CACHED
            assert engine.read(first, salt="a")["tokens"] == wanted["tokens"]
        settled(daemon)
        with daemon.client() as client:
            (info,) = client.namespaces()
            assert info.codec == "lossless"

    with daemon, Engine(smollm2, daemon.socket, folder / "two.log", way=way) as engine:
        again = engine.read(first)
        assert again["cached"] == CACHED
        assert again["tokens"] == wanted["tokens"]
        assert engine.chunks() == {"hit": 4, "loaded": 4}

        daemon.kill()
        engine.forget()
        without = engine.read(first)
        assert without["cached"] == 0
        assert without["tokens"] == wanted["tokens"]
        assert engine.read(second)["tokens"] == expected
        counts = engine.chunks()
        assert counts["away"] > 0

        daemon.start()
        deadline = time.monotonic() + 30
        while True:  # the tier finds it by itself
            engine.forget()
            back = engine.read(first)
            assert back["tokens"] == wanted["tokens"]
            if back["cached"] == CACHED:
                break
            assert time.monotonic() < deadline, engine.chunks()
            time.sleep(0.5)


VOCABULARY = 512


def tiny(folder: Path, seed: int) -> Path:
    """A random model of two layers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def adapter(folder: Path, seed: int) -> Path:
    """A random adapter of `tiny` that changes keys and values."""
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


def test_engines_that_differ_never_share_a_hit(way: str, folder: Path, daemon: Daemon) -> None:
    """Dtype, chunk, checkpoint under one name, overridden RoPE: never; the same engine again: always."""
    words = prompt(3, VOCABULARY)
    model, namesake = tiny(folder / "a" / "model", 1), tiny(folder / "b" / "model", 2)
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    others = {
        "dtype": (model, {"dtype": "bfloat16"}),
        "chunk": (model, {"chunk": 128}),
        "checkpoint": (namesake, {}),
        "rope": (model, {"hf_overrides": scaled, "ours": {"variant": "rope linear 2"}}),
    }
    with daemon:
        with Engine(model, daemon.socket, folder / "first.log", way=way) as engine:
            wanted = engine.read(words)
            assert wanted["cached"] == 0
        for name, (other, settings) in others.items():
            with Engine(other, daemon.socket, folder / f"{name}.log", way=way, **settings) as engine:
                fresh = engine.read(words)
                assert fresh["cached"] == 0, name
                engine.forget()
                again = engine.read(words)
                assert (again["cached"], again["tokens"]) == (CACHED, fresh["tokens"]), name
        with Engine(model, daemon.socket, folder / "again.log", way=way) as engine:
            again = engine.read(words)
            assert (again["cached"], again["tokens"]) == (CACHED, wanted["tokens"])


def test_adapters_never_share_a_hit(way: str, folder: Path, daemon: Daemon) -> None:
    """Two adapters and none on one prompt; then one of them replaced under its name and path."""
    words = prompt(4, VOCABULARY)
    model = tiny(folder / "model", 1)
    one, two = adapter(folder / "one", 1), adapter(folder / "two", 2)
    loras = [None] + [
        {"lora_name": path.name, "lora_int_id": number, "lora_path": str(path)}
        for number, path in enumerate((one, two), 1)
    ]
    settings = {"enable_lora": True, "max_lora_rank": 8, "ours": {"adapters": [str(one), str(two)]}}
    with daemon:
        with Engine(model, daemon.socket, folder / "first.log", way=way, **settings) as engine:
            answers = [engine.read(words, lora=lora) for lora in loras]
            assert [answer["cached"] for answer in answers] == [0, 0, 0]
            assert len({tuple(answer["tokens"]) for answer in answers}) == 3
        adapter(one, 3)  # under the same name and path
        with Engine(model, daemon.socket, folder / "replaced.log", way=way, **settings) as engine:
            replaced = engine.read(words, lora=loras[1])
            assert replaced["cached"] == 0
            assert replaced["tokens"] != answers[1]["tokens"]
        adapter(one, 1)
        with Engine(model, daemon.socket, folder / "again.log", way=way, **settings) as engine:
            again = [engine.read(words, lora=lora) for lora in loras]
            assert [answer["cached"] for answer in again] == [CACHED] * 3
            assert [answer["tokens"] for answer in again] == [answer["tokens"] for answer in answers]


BOUND = 0.02
KVTC2 = f"""
[match]
[codec]
name = "kvtc2"
max_kl = {BOUND}
"""
TEXT = Path(__file__).parent.parent / "data" / "encyclopedia.txt"
LENGTH = 650


def profile_of(folder: Path) -> Path:
    """The folder of a profile that was calibrated for this model; skips the test where there is none."""
    weights = weights_digest(folder)
    found = (cache_folder() / "profiles").glob("*/*.safetensors")
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        origin = read_origin(path)
        if origin.weights == weights and origin.curve:
            return path.parent
    pytest.skip(
        "no profile of this model with a rate-quality curve was calibrated here; `kvtcd demo` makes one"
    )


def divergence(of: dict[str, float], from_: dict[str, float]) -> float:
    """KL of two distributions over one vocabulary, given as log probabilities: nats."""
    return sum(math.exp(log) * (log - from_[token]) for token, log in of.items())


@pytest.mark.model
def test_pages_go_through_the_transform_codec(way: str, folder: Path, smollm2: Path) -> None:
    """Pages of the engine, packed by kvtc2 to what the policy allows: the first token stays within it."""
    profiles = profile_of(smollm2)
    (folder / "kvtc2.toml").write_text(KVTC2)
    daemon = Daemon(folder, host=512 << 20, disk=1 << 30, profiles=profiles, policy=folder / "kvtc2.toml")
    tokens = AutoTokenizer.from_pretrained(smollm2)(TEXT.read_text()).input_ids
    prompts = [tokens[start : start + LENGTH] for start in range(0, 8 * 1500, 1500)]
    settings = {"max_logprobs": -1, "max_model_len": 1024, "cpu_bytes": 512 << 20}
    asked = {"max_tokens": 1, "logprobs": -1}
    with daemon:
        with Engine(smollm2, daemon.socket, folder / "one.log", way=way, **settings) as engine:
            computed = [engine.read(words, **asked) for words in prompts]
            engine.read(prompts[0], max_tokens=8)  # vLLM offloads in the steps after a prompt's, if any come
        settled(daemon)
        with daemon.client() as client:
            (info,) = client.namespaces()
            assert info.codec.startswith("kvtc2"), info.codec_reason
            packed = client.stats()["tiers"]["disk"]["packed"]
    with daemon, Engine(smollm2, daemon.socket, folder / "two.log", way=way, **settings) as engine:
        loaded = [engine.read(words, **asked) for words in prompts]
        fates = engine.chunks()
    assert [answer["cached"] for answer in loaded] == [LENGTH // CHUNK * CHUNK] * len(prompts), fates
    kl = [
        divergence(exact["logprobs"][0], lossy["logprobs"][0])
        for exact, lossy in zip(computed, loaded, strict=True)
    ]
    halves = packed["blocks"] * CHUNK * 23_040
    ratio = halves / packed["bytes"]
    print(f"KL of the first token {mean(kl):.4f}, at most {max(kl):.4f}; ratio {ratio:.1f}")  # noqa: T201
    # The bound is one of the mean over all texts; that over these few is known to its standard error.
    unsure = 2 * stdev(kl) / math.sqrt(len(kl))
    assert 0 < mean(kl) <= BOUND + unsure
    assert ratio > 8


def test_pages_hold_what_transformers_computes(way: str, folder: Path, daemon: Daemon) -> None:
    """The order of pages, their positions and their parents, of the vLLM that is installed."""
    model, words = tiny(folder / "model", 1), prompt(5, VOCABULARY)
    with torch.no_grad():
        cache = LlamaForCausalLM.from_pretrained(model)(torch.tensor([words])).past_key_values
    stored: list[Notice] = []

    def listen() -> None:
        with daemon.client() as client:
            stored.extend(notice for notice in client.events() if notice.what is What.STORED)

    with daemon:
        listener = threading.Thread(target=listen)
        listener.start()
        with Engine(model, daemon.socket, folder / "engine.log", way=way) as engine:
            engine.read(words)
        settled(daemon)
        with daemon.client() as client:
            (info,) = client.namespaces()
            pages = page_map(info.identity)
            assert pages is not None
            raw = {notice.first_token: bytes(client.get(info.name, notice.key)) for notice in list(stored)}
    listener.join()

    assert sorted(raw) == list(range(0, CACHED, CHUNK))
    ends = {notice.first_token: notice for notice in stored}
    for first in range(CHUNK, CACHED, CHUNK):
        assert ends[first].parent == ends[first - CHUNK].key
    for first, data in raw.items():
        block = pages.to_canonical(torch.frombuffer(bytearray(data), dtype=torch.uint8), CHUNK)
        got = block.view(torch.float32).view(2, 2, CHUNK, 2, 64)  # streams, layers, tokens, heads, head_dim
        for layer, held in enumerate(cache.layers):
            for stream, wanted in enumerate((held.keys, held.values)):
                there = wanted[0, :, first : first + CHUNK].transpose(0, 1)
                assert torch.allclose(got[stream, layer], there, atol=1e-4)
