"""A real daemon that keeps every bit, and a tiny model's prefix cache in it."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from kvtcd.core.layout import Dtype
from kvtcd.integrations.transformers_identity import identity_of
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from kvtcd.core.identity import Identity

BLOCK_TOKENS = 16


@contextmanager
def lossless_daemon() -> Iterator[Daemon]:
    """A running daemon that packs everything losslessly; its folder's path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name:
        folder = Path(name)
        policy = folder / "lossless.toml"
        policy.write_text('[codec]\nname = "lossless"\n')
        settings = {"host": 64 << 20, "disk": 256 << 20, "profiles": folder / "profiles"}
        with Daemon(folder, policy=policy, **settings) as daemon:
            yield daemon


def identity_for(model: PreTrainedModel, test: str) -> Identity:
    """An identity of a tiny float32 model that no other test has, so that each finds an empty namespace."""
    number = f"{abs(hash(test)):x}".zfill(64)[:64]
    return identity_of(model.config, weights=number, model="tiny", dtype=Dtype.F32, block_tokens=BLOCK_TOKENS)


def sequence(length: int, seed: int = 0) -> list[int]:
    """Random token ids below 64."""
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def read(model: PreTrainedModel, tokens: list[int]) -> DynamicCache:
    """The cache of one sequence, computed in one pass."""
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([tokens]), cache=cache)
    return cache


def assert_equal(one: DynamicCache, other: DynamicCache) -> None:
    """Two caches are the same, bit for bit."""
    for (keys, values, *_), (other_keys, other_values, *_) in zip(one, other, strict=True):
        assert torch.equal(keys, other_keys)
        assert torch.equal(values, other_values)
