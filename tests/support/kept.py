"""The part of each engine that keeps something in a daemon: offered, and asked for again, prompt by prompt.

What is offered looks like keys and values of one synthetic model, so that there can be a profile of it.
"""

from __future__ import annotations

import hashlib
import logging
import math
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from safetensors.torch import save_file
from support.codec_world import World, centred_error
from support.llama_server import complete, llama_server
from support.models import tiny_llama_config
from support.patience import PATIENCE_S
from support.prefixes import BLOCK_TOKENS, sequence
from support.sglang_twin import PAGE, MHATokenToKVPoolHost
from support.tiny_gguf import write_tiny_gguf
from support.vllm_scheduler import ROW_BYTES, TOKENS, Scheduler, engine, keys_of

from kvtcd.client.weights import weights_digest
from kvtcd.codec.pages import page_map
from kvtcd.core.identity import Rope, RopeKind
from kvtcd.core.keys import EngineKey
from kvtcd.core.layout import Dtype, kv_layout
from kvtcd.integrations.link import Link
from kvtcd.integrations.llamacpp_server import LlamaServer
from kvtcd.integrations.llamacpp_slots import Model as LlamaModel
from kvtcd.integrations.llamacpp_slots import Slots
from kvtcd.integrations.lmcache_daemon import Daemon as Objects
from kvtcd.integrations.lmcache_daemon import Name, Object
from kvtcd.integrations.lmcache_identity import Facts, Place, Shape
from kvtcd.integrations.sglang_identity import Model, Parameters, Ranks
from kvtcd.integrations.sglang_pools import KV, Pools
from kvtcd.integrations.transformers_blocks import cache_from_raw, raw_block
from kvtcd.integrations.transformers_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from kvtcd.codec.origin import Origin
    from kvtcd.codec.pages import PageMap
    from kvtcd.core.identity import Identity
    from kvtcd.lab.daemon import Daemon

LOG = logging.getLogger("kvtcd.test")
COUNT = 4
"""Blocks of a prompt."""


@dataclass(frozen=True)
class Tiny(World):
    """The synthetic model, in the shape of `support.models.tiny_llama_config`.

    `of`: identity that its profile is for. `seed`: of the profile, so that there can be several.
    """

    of: Identity | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    @property
    def origin(self) -> Origin:
        """Where the profile for `of` comes from."""
        assert self.of is not None
        return replace(super().origin, weights=self.of.weights, adapter=self.of.adapter, seed=self.seed)


WORLD = Tiny(
    kv_layout(layers=3, kv_heads=2, head_dim=8, dtype=Dtype.F32), rope=Rope(RopeKind.DEFAULT, 10_000.0, 8)
)


class Kept(Protocol):
    """What one engine's part does; `weights` is in its identity, `found` in what its daemon answers."""

    weights: str

    def offer(self, prompt: int) -> None:
        """Offer all blocks of a prompt."""

    def back(self, prompt: int) -> list[float]:
        """Ask for all blocks of a prompt; return the error of each that comes back, 0 where it is exact."""


def blocks(prompt: int, tokens: int) -> list[Tensor]:
    """Return the blocks of a prompt as flat bytes in canonical order."""
    return [WORLD.block(tokens, 100 * prompt + i, i * tokens) for i in range(COUNT)]


def error(got: Tensor, want: Tensor, tokens: int) -> float:
    """Return how far a block is from what was offered."""
    if torch.equal(got, want):
        return 0.0
    ours, theirs = WORLD.values(got, tokens), WORLD.values(want, tokens)
    return max(centred_error(ours[name], theirs[name]) for name in theirs)


def checkpoint(folder: Path) -> str:
    """Write a model that no other test has; return the digest of its weights."""
    save_file({"w": torch.tensor(list(str(folder).encode()))}, folder / "model.safetensors")
    tiny_llama_config().save_pretrained(folder)
    return weights_digest(folder)


def made_up(folder: Path) -> str:
    """Return a digest of weights that no other test has."""
    return hashlib.sha256(str(folder).encode()).hexdigest()


@dataclass
class _Tier:
    weights: str
    scheduler: Scheduler
    pages: PageMap
    requests: Iterator[int] = field(default_factory=count)

    def _row(self, number: int) -> Tensor:
        return torch.from_numpy(self.scheduler.primary[number, :ROW_BYTES]).view(torch.uint8)

    def offer(self, prompt: int) -> None:
        keys, name = keys_of(COUNT, prompt), f"r{next(self.requests)}"
        self.scheduler.lookup(name, keys)
        for row, block in enumerate(blocks(prompt, TOKENS)):
            self.pages.to_pages(block, TOKENS, self._row(row))
        self.scheduler.transfer(name, keys, list(range(COUNT)), load=False)

    def back(self, prompt: int) -> list[float]:
        keys, name = keys_of(COUNT, prompt), f"r{next(self.requests)}"
        found = [i for i, answer in enumerate(self.scheduler.lookup(name, keys)) if answer == "HIT"]
        if not found:
            return []
        wanted, rows = [keys[i] for i in found], [COUNT + i for i in found]
        result, want = self.scheduler.transfer(name, wanted, rows, load=True), blocks(prompt, TOKENS)
        loaded = wanted if result.success else result.successful_keys or ()
        return [
            error(self.pages.to_canonical(self._row(COUNT + i), TOKENS), want[i], TOKENS)
            for i in found
            if keys[i] in loaded
        ]


@contextmanager
def vllm_tier(daemon: Daemon, folder: Path) -> Iterator[Kept]:
    weights = checkpoint(folder)
    with engine(daemon.socket, folder) as scheduler:
        with daemon.client() as client:
            (identity,) = [n.identity for n in client.namespaces() if n.identity.weights == weights]
        pages = page_map(identity)
        assert pages is not None
        yield _Tier(weights, scheduler, pages)


@dataclass
class _Objects:
    weights: str
    objects: Objects
    shape: Shape = field(default_factory=lambda: Shape.of([[2, 8, 16]], ["torch.bfloat16"], [2]))

    def _names(self, prompt: int) -> list[Name]:
        place = Place("model", 0x01000100, 0)
        return [Name(EngineKey(bytes([prompt, i]) * 16), place, b"") for i in range(COUNT)]

    def _bytes(self, prompt: int, number: int) -> bytes:
        return np.random.default_rng([prompt, number]).bytes(self.shape.nbytes)

    def offer(self, prompt: int) -> None:
        names = self._names(prompt)
        self.objects.find(names, {0: self.shape})
        data = [memoryview(bytearray(self._bytes(prompt, i))) for i in range(COUNT)]
        self.objects.store([Object(*two) for two in zip(names, [self.shape] * COUNT, data, strict=True)])

    def back(self, prompt: int) -> list[float]:
        names = self._names(prompt)
        there = self.objects.find(names, {0: self.shape})
        into = [Object(name, self.shape, memoryview(bytearray(self.shape.nbytes))) for name in names]
        loaded = self.objects.load(into)
        self.objects.release(names)
        assert loaded == there
        return [
            0.0 if into[i].memory == self._bytes(prompt, i) else math.inf
            for i, done in enumerate(loaded)
            if done
        ]


@contextmanager
def lmcache(daemon: Daemon, folder: Path) -> Iterator[Kept]:
    weights = made_up(folder)
    facts = Facts("m", weights, "s")
    objects = Objects(
        daemon.client(), lambda _: facts, version="1", lookup_seconds=PATIENCE_S, seconds=PATIENCE_S, log=LOG
    )
    yield _Objects(weights, objects)
    objects.link.close()


@dataclass
class _Pages:
    weights: str
    pools: Pools
    pool: MHATokenToKVPoolHost

    def _keys(self, prompt: int) -> list[str]:
        return [f"{prompt:02x}{i:02x}" * 16 for i in range(COUNT)]

    def _canonical(self, page: int) -> Tensor:
        """Return a page of the pool, which is `layer_first`, in canonical order."""
        rows = self.pool.kv_buffer[:, :, page * PAGE : (page + 1) * PAGE]
        return rows.contiguous().view(-1).view(torch.uint8)

    def offer(self, prompt: int) -> None:
        for page, block in enumerate(blocks(prompt, PAGE)):
            rows = self.pool.kv_buffer[:, :, page * PAGE : (page + 1) * PAGE]
            rows.copy_(block.view(torch.float32).view(rows.shape))
        self.pools.put(KV, self._keys(prompt), torch.arange(COUNT * PAGE), before=[])

    def back(self, prompt: int) -> list[float]:
        self.pool.kv_buffer.zero_()
        got = self.pools.fetch(KV, self._keys(prompt), torch.arange(COUNT * PAGE))
        want = blocks(prompt, PAGE)
        return [error(self._canonical(i), want[i], PAGE) for i, done in enumerate(got) if done]


@contextmanager
def sglang(daemon: Daemon, folder: Path) -> Iterator[Kept]:
    weights = made_up(folder)
    model = Model(name="m", weights=weights, settings="s", adapter="none", layers=3, rope=WORLD.rope)
    ranks = Ranks(tp=(0, 1), pp=(0, 1), cp=(0, 1), dcp=(0, 1), replicated=False)
    given = Parameters(timeout_seconds=PATIENCE_S)
    with daemon.client() as client:
        link = Link(client, LOG, seconds=PATIENCE_S)
        pools = Pools(link, given, ranks, model, writes=True, version="1", log=LOG)
        pool = MHATokenToKVPoolHost("layer_first")
        pools.register(KV, pool)
        yield _Pages(weights, pools, pool)


@dataclass
class _Prefixes:
    weights: str
    prefixes: PrefixCache

    def _tokens(self, prompt: int) -> list[int]:
        return sequence(COUNT * BLOCK_TOKENS, prompt)

    def offer(self, prompt: int) -> None:
        cache = cache_from_raw(blocks(prompt, BLOCK_TOKENS), WORLD.layout)
        self.prefixes.save(cache, self._tokens(prompt), partial=False)

    def back(self, prompt: int) -> list[float]:
        known = self.prefixes.load([*self._tokens(prompt), 7])
        found = known.tokens // BLOCK_TOKENS
        want, spans = (
            blocks(prompt, BLOCK_TOKENS),
            [(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS) for i in range(found)],
        )
        return [
            error(raw_block(known.cache, first, last, WORLD.layout), want[i], BLOCK_TOKENS)
            for i, (first, last) in enumerate(spans)
        ]


@contextmanager
def transformers(daemon: Daemon, folder: Path) -> Iterator[Kept]:
    weights = made_up(folder)
    identity = replace(WORLD.identity, weights=weights, block_tokens=BLOCK_TOKENS)
    with daemon.client() as client:
        yield _Prefixes(weights, PrefixCache(client, identity))


@dataclass
class _Slot:
    weights: str
    url: str
    slots: Slots

    def _tokens(self, prompt: int) -> list[int]:
        return [3 + token for token in sequence(200, prompt)]

    def offer(self, prompt: int) -> None:
        complete(self.url, self._tokens(prompt), 0)
        self.slots.save(0)

    def back(self, prompt: int) -> list[float]:
        tokens = self._tokens(prompt)
        other = [100] * 50
        complete(self.url, other, 0)  # the slot has something else
        restored = self.slots.restore(0, tokens).tokens
        answer: dict[str, Any] = complete(self.url, [*tokens, 9], 8)
        complete(self.url, other, 0)
        exact = complete(self.url, [*tokens, 9], 8)["tokens"] == answer["tokens"]
        assert answer["timings"]["cache_n"] >= restored
        return [0.0 if exact else math.inf] * (COUNT if restored == len(tokens) else 0)


@contextmanager
def llamacpp(daemon: Daemon, folder: Path) -> Iterator[Kept]:
    file, slots = write_tiny_gguf(folder / "tiny.gguf", seed=int(made_up(folder)[:6], 16)), folder / "slots"
    slots.mkdir()
    with llama_server(file, slots) as url, daemon.client() as client:
        yield _Slot(weights_digest(file), url, Slots(client, LlamaServer(url, slots), LlamaModel(file=file)))
