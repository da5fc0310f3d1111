"""A real vLLM engine, on a CPU, whose cache outlives it, by the tier and by the connector."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import pytest
import torch
from daemons import BOUND, KVTC2, holds, listen, new_daemon, settled, stored
from quality import TEXT, TOKEN_BYTES, divergence
from tiny_models import CACHED, lora, prompt, tiny
from transformers import AutoTokenizer, LlamaForCausalLM
from vllm_engine import CHUNK, WAYS, Engine

from kvtcd.codec.pages import page_map

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtcd.lab.daemon import Daemon

    Way = Callable[..., dict[str, Any]]

pytestmark = [
    pytest.mark.peers("vllm"),
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__),
]
CHUNKS = CACHED // CHUNK
"""Of a prompt."""


def test_a_prefix_outlives_engine_and_daemon(way: Way, folder: Path, daemon: Daemon, smollm2: Path) -> None:
    """Stored in one life of both, loaded in the next, and right while the daemon dies and comes back."""
    first, second = prompt(1, 40_000), prompt(2, 40_000)
    transfer = way(daemon.socket)
    with daemon:
        with Engine(smollm2, folder / "one.log", transfer) as engine:
            wanted = engine.read(first)
            assert wanted["cached"] == 0
            expected = engine.read(second)["tokens"]
            salted = engine.read(first, salt="a")
            assert salted["cached"] == 0  # another salt: nobody's tokens are its own
            holds(daemon, 3 * CHUNKS)
            engine.forget()
            assert engine.read(first, salt="b")["cached"] == 0
            engine.finds_again(first, wanted["tokens"], salt="a")
        settled(daemon)
        with daemon.client() as client:
            (info,) = client.namespaces()
            assert info.codec == "lossless"

    with daemon, Engine(smollm2, folder / "two.log", transfer) as engine:
        again = engine.read(first)
        assert engine.chunks() == {"hit": CHUNKS, "loaded": CHUNKS}
        assert (again["cached"], again["tokens"]) == (CACHED, wanted["tokens"])

        daemon.kill()
        engine.forget()
        without = engine.read(first)
        assert without["cached"] == 0
        assert without["tokens"] == wanted["tokens"]
        assert engine.read(second)["tokens"] == expected
        assert engine.chunks()["away"] > 0

        daemon.start()
        engine.finds_again(first, wanted["tokens"])


def test_engines_that_differ_never_share_a_hit(way: Way, folder: Path, daemon: Daemon) -> None:
    """Dtype, chunk, checkpoint under one name, overridden RoPE: never; the same engine again: always."""
    words = prompt(3)
    model, namesake = tiny(folder / "a" / "model", 1), tiny(folder / "b" / "model", 2)
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    plain, large = way(daemon.socket), way(daemon.socket, chunk=2 * CHUNK)
    others = {
        "dtype": (model, plain, {"dtype": "bfloat16"}),
        "chunk": (model, large, {}),
        "checkpoint": (namesake, plain, {}),
        "rope": (model, way(daemon.socket, variant="rope linear 2"), {"hf_overrides": scaled}),
    }
    with daemon:
        with Engine(model, folder / "first.log", plain) as engine:
            wanted = engine.read(words)
            assert wanted["cached"] == 0
            holds(daemon, count := CHUNKS)
        for name, (other, transfer, settings) in others.items():
            with Engine(other, folder / f"{name}.log", transfer, **settings) as engine:
                fresh = engine.read(words)
                assert fresh["cached"] == 0, name
                count += CHUNKS // 2 if transfer is large else CHUNKS
                holds(daemon, count)
                engine.forget()
                again = engine.read(words)
                assert (again["cached"], again["tokens"]) == (CACHED, fresh["tokens"]), name
        with Engine(model, folder / "again.log", plain) as engine:
            again = engine.read(words)
            assert (again["cached"], again["tokens"]) == (CACHED, wanted["tokens"])


def test_adapters_never_share_a_hit(way: Way, folder: Path, daemon: Daemon) -> None:
    """Two adapters and none on one prompt; then one of them replaced under its name and path."""
    words = prompt(4)
    model = tiny(folder / "model", 1)
    one, two = lora(folder / "one", 1), lora(folder / "two", 2)
    loras = [None] + [
        {"lora_name": path.name, "lora_int_id": number, "lora_path": str(path)}
        for number, path in enumerate((one, two), 1)
    ]
    transfer = way(daemon.socket, adapters=[str(one), str(two)])
    settings = {"enable_lora": True, "max_lora_rank": 8}
    with daemon:
        with Engine(model, folder / "first.log", transfer, **settings) as engine:
            answers = [engine.read(words, lora=adapter) for adapter in loras]
            assert [answer["cached"] for answer in answers] == [0, 0, 0]
            assert len({tuple(answer["tokens"]) for answer in answers}) == 3
            holds(daemon, 3 * CHUNKS)
        lora(one, 3)  # under the same name and path
        with Engine(model, folder / "replaced.log", transfer, **settings) as engine:
            replaced = engine.read(words, lora=loras[1])
            assert replaced["cached"] == 0
            assert replaced["tokens"] != answers[1]["tokens"]
        lora(one, 1)
        with Engine(model, folder / "again.log", transfer, **settings) as engine:
            again = [engine.read(words, lora=adapter) for adapter in loras]
            assert [answer["cached"] for answer in again] == [CACHED] * 3
            assert [answer["tokens"] for answer in again] == [answer["tokens"] for answer in answers]


@pytest.mark.model
def test_pages_go_through_the_transform_codec(way: Way, folder: Path, smollm2: Path, profiles: Path) -> None:
    """Pages of the engine, packed by kvtc2 to what the policy allows: the first token stays within it."""
    daemon = new_daemon(folder, host=512 << 20, profiles=profiles, policy=KVTC2)
    length, count = 650, 8
    tokens = AutoTokenizer.from_pretrained(smollm2)(TEXT.read_text()).input_ids
    prompts = [tokens[start : start + length] for start in range(0, count * 1500, 1500)]
    transfer = way(daemon.socket, memory=512 << 20)
    settings = {"max_logprobs": -1, "max_model_len": 1024}
    asked = {"max_tokens": 1, "logprobs": -1}
    with daemon:
        with Engine(smollm2, folder / "one.log", transfer, **settings) as engine:
            computed = [engine.read(words, **asked) for words in prompts]
            engine.read(prompts[0], max_tokens=8)  # vLLM offloads in the steps after a prompt's, if any come
            holds(daemon, count * (length // CHUNK))
        settled(daemon)
        with daemon.client() as client:
            (info,) = client.namespaces()
            assert info.codec.startswith("kvtc2"), info.codec_reason
            packed = client.stats()["tiers"]["disk"]["packed"]
    with daemon, Engine(smollm2, folder / "two.log", transfer, **settings) as engine:
        loaded = [engine.read(words, **asked) for words in prompts]
        fates = engine.chunks()
    assert [answer["cached"] for answer in loaded] == [length // CHUNK * CHUNK] * count, fates
    kl = [
        divergence(exact["logprobs"][0], lossy["logprobs"][0])
        for exact, lossy in zip(computed, loaded, strict=True)
    ]
    ratio = packed["blocks"] * CHUNK * TOKEN_BYTES / packed["bytes"]
    print(f"KL of the first token {mean(kl):.4f}, at most {max(kl):.4f}; ratio {ratio:.1f}")  # noqa: T201
    # The bound is one of the mean over all texts; that over these few is known to its standard error.
    unsure = 2 * stdev(kl) / math.sqrt(len(kl))
    assert 0 < mean(kl) <= BOUND + unsure
    assert ratio > 8


def test_pages_hold_what_transformers_computes(way: Way, folder: Path, daemon: Daemon) -> None:
    """The order of pages, their positions and their parents, of the vLLM that is installed."""
    model, words = tiny(folder / "model", 1), prompt(5)
    with torch.no_grad():
        cache = LlamaForCausalLM.from_pretrained(model)(torch.tensor([words])).past_key_values
    with daemon, daemon.client() as client:
        since = listen(daemon)
        with Engine(model, folder / "engine.log", way(daemon.socket)) as engine:
            engine.read(words)
            notices = {notice.first_token: notice for notice in stored(daemon, since, CHUNKS)}
        (info,) = client.namespaces()
        pages = page_map(info.identity)
        assert pages is not None
        raw = {first: bytes(client.get(info.name, notice.key)) for first, notice in notices.items()}

    assert sorted(raw) == list(range(0, CACHED, CHUNK))
    for first in range(CHUNK, CACHED, CHUNK):
        assert notices[first].parent == notices[first - CHUNK].key
    for first, data in raw.items():
        block = pages.to_canonical(torch.frombuffer(bytearray(data), dtype=torch.uint8), CHUNK)
        got = block.view(torch.float32).view(2, 2, CHUNK, 2, 64)  # streams, layers, tokens, heads, head_dim
        for layer, held in enumerate(cache.layers):
            for stream, wanted in enumerate((held.keys, held.values)):
                there = wanted[0, :, first : first + CHUNK].transpose(0, 1)
                assert torch.allclose(got[stream, layer], there, atol=1e-4)
