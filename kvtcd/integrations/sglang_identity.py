"""Whose pages an SGLang rank hands over: identities, from its host pools, its ranks and the model's files.

SGLang tells a storage backend the model's name and its ranks, and nothing of weights, RoPE or adapters; of a
cache in fp8 the pool does not even say which fp8. Those come from the model's folder and the backend's JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtcd.core.errors import BadRequest, KvtcdError, UnsupportedRope
from kvtcd.core.identity import Identity, Rope
from kvtcd.core.keys import EngineKey
from kvtcd.core.layout import Dtype, Layout
from kvtcd.integrations.model_files import FileWatch, Settings, adapters_digest, settings_digest
from kvtcd.integrations.options import read
from kvtcd.integrations.transformers_identity import rope_of

if TYPE_CHECKING:
    from kvtcd.integrations.sglang_pages import Kind

ENGINE = "sglang"
HASH_SCHEME = "sglang-sha256-le32"
"""SHA-256 of the parent's digest and the page's tokens, chained from a seed of LoRA, extra key and salt."""
_KEY = re.compile(r"[0-9a-f]{64}")
ROTATED = ("k", "k_pe")
SHARDED = ("mamba",)
"""Pools whose pages differ from rank to rank even where those of MLA do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The backend's own part of SGLang's extra configuration; whatever else is there is SGLang's.

    Attributes:
        socket: the daemon's address; default ``$KVTCD_SOCKET``, else ``/run/kvtcd/kvtcd.sock``.
        weights: folder of the model's weight files; default: the model's name, if it is one.
        adapters: folders of all adapters (LoRA) that are served.
        variant: names what else changes the cache, see `Settings`; needed for a cache in fp8 or fp4.
        full_digest: read every byte of the weights at start.
        salt: parts these pages from others of the same user.
        timeout_seconds: how long the daemon may take for each batch of pages.
    """

    socket: str | None = None
    weights: str | None = None
    adapters: tuple[str, ...] = ()
    variant: str = ""
    full_digest: bool = False
    salt: str = ""
    timeout_seconds: float = 5.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Parameters:
        """Read the JSON.

        Raises:
            BadRequest: a value cannot be meant, or a key is one of ours but for a letter.
        """
        return read(cls, given, shared=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How a cache is split, by SGLang's names; `replicated` where all ranks of a group hold the same."""

    tp: tuple[int, int]
    pp: tuple[int, int]
    cp: tuple[int, int]
    dcp: tuple[int, int]
    replicated: bool

    def parallel(self, *, replicated: bool) -> str:
        """Return the `parallel` of an identity: rank and size of each split that has more than one part."""
        split = {"pp": self.pp, "cp": self.cp, "dcp": self.dcp}
        parts = {"tp": self.tp} | split if not replicated else split
        words = [f"{name}{size}-rank{rank}" for name, (rank, size) in parts.items() if size > 1]
        words += [f"of-tp{self.tp[1]}"] if self.dcp[1] > 1 else []  # where shards lie follows from it
        return "-".join(words) or "canonical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model behind the pages, with its layers and how its keys are rotated, if that is known."""

    name: str
    weights: str
    settings: str
    adapter: str
    layers: int | None
    rope: Rope | None


def model_of(parameters: Parameters, served: str, config: Callable[[Any], Any]) -> tuple[Model, FileWatch]:
    """Return the model, and what notices when its adapters change.

    Args:
        parameters: of the backend.
        served: the model as SGLang names it.
        config: reads a folder's configuration as transformers does.

    Raises:
        BadRequest: no folder to take the weights from.
        Unavailable: a weight or adapter file is missing or cannot be read.
    """
    settings = Settings.of(
        served,
        weights=parameters.weights,
        adapters=parameters.adapters,
        variant=parameters.variant,
        full_digest=parameters.full_digest,
    )
    watch = FileWatch("an adapter", settings.adapters)  # from before their digest
    layers, rope = _attention(settings, config)
    return (
        Model(
            name=settings.name,
            weights=settings.weights_digest(),
            settings=settings_digest(settings.folder, settings.variant),
            adapter=adapters_digest(settings.adapters),
            layers=layers,
            rope=rope,
        ),
        watch,
    )


def _attention(settings: Settings, config: Callable[[Any], Any]) -> tuple[int | None, Rope | None]:
    """Return layers and RoPE; with a `variant` the configuration is not relied on: it may be overridden."""
    if settings.variant:
        return None, None
    try:
        text = config(settings.folder).get_text_config(decoder=True)
        return int(text.num_hidden_layers), rope_of(text)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, UnsupportedRope, KvtcdError):
        return None, None


def identity_of(name: str, kind: Kind, ranks: Ranks, model: Model, *, variant: str) -> Identity:
    """Return the identity of the blocks of one pool, which is called `name`.

    Raises:
        BadRequest: the pool does not say which encoding its cache has, nor does `variant`.
        BadIdentity: a value out of range.
    """
    if kind.dtype not in tuple(Dtype) and not variant:
        raise BadRequest(
            "variant",
            f"the pool {name} says {kind.dtype} of its cache and no more; name its --kv-cache-dtype",
        )
    layout, rope = _rotated(kind, model)
    return Identity(
        engine=f"{ENGINE} {model.settings}",
        hash_scheme=HASH_SCHEME,
        model=model.name,
        weights=model.weights,
        adapter=model.adapter,
        layout=layout,
        rope=rope,
        scales=kind.scales,
        block_tokens=kind.tokens,
        page_format=kind.page_format if name == "kv" else f"{kind.page_format}-of-{name}"[:256],
        parallel=ranks.parallel(replicated=ranks.replicated and name not in SHARDED),
    )


def _rotated(kind: Kind, model: Model) -> tuple[Layout, Rope | None]:
    """Return the layout, with what is known of rotation: nothing unless the pool has the model's layers."""
    rope, streams = model.rope, kind.layout.streams
    rotated = [stream for stream in streams if stream.name in ROTATED]
    if rope is None or kind.layout.layers != model.layers or not rotated:
        return kind.layout, None
    if rope.rotary_dim > rotated[0].head_dim:
        return kind.layout, None
    marked = tuple(replace(stream, rope=stream.name in ROTATED) for stream in streams)
    return replace(kind.layout, streams=marked), rope


def engine_key(key: str) -> EngineKey | None:
    """Return a page's key, None for one that is no whole SHA-256."""
    return EngineKey(bytes.fromhex(key)) if _KEY.fullmatch(key) else None
