"""Caches of documents in a file, for tests of codecs without a model: what a model has made, or an engine.

A safetensors file. For the n-th document, from 0, ``n.k`` and ``n.v`` are ``[T, L, H, D]`` of any float type,
keys as in the cache, after RoPE at positions from 0; ``n.q``, which `ablate` needs, are queries of later
tokens, after RoPE too, ``[Q, L, G H, D]`` with the G query heads of a KV head side by side. Metadata have one
key, ``kvtcd``: JSON with ``model``, a name, and ``rope``, as profiles have it, null where keys are not
rotated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache, PreTrainedModel

from kvtcd import outputs
from kvtcd.codec.rope import Rotation
from kvtcd.core.errors import BadField, BadIdentity, ConfigError
from kvtcd.core.identity import Rope
from kvtcd.core.layout import canonical_json
from kvtcd.lab import models, texts
from kvtcd.lab.attention import attending
from kvtcd.lab.capture import prefill
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.opened import opened
from kvtcd.lab.phases import Phases
from kvtcd.lab.rd import cut

_METADATA = "kvtcd"


@dataclass(frozen=True, eq=False)
class Document:
    """The cache of one document; shapes as in the module. Without queries `queries` is None."""

    keys: Tensor
    values: Tensor
    queries: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Dump:
    """Caches of documents of one model."""

    model: str
    rope: Rope | None
    documents: tuple[Document, ...]

    def unrotated(self, document: Document) -> Tensor:
        """Return the keys of a document with RoPE undone, float32 ``[T, L, H, D]``."""
        keys = document.keys.to(torch.float32).transpose(0, 1).contiguous()
        if self.rope:
            keys = Rotation(self.rope, 0, keys.shape[1], inverse=True)(keys)
        return keys.transpose(0, 1)


def command(
    *, model: str, files: Sequence[Path], context: int, queries: int, per_file: int, threads: int, out: Path
) -> None:
    """Let a model read documents and write their caches, and the queries behind them.

    Raises:
        ConfigError: a text is too short, or the file cannot be written.
        Unavailable: the model cannot be had.
        UnsupportedCache, UnsupportedModel: its cache cannot be stored by prefix.
    """
    with opened(model, threads) as (loaded, _, phases, console):
        found = gather(loaded, files, context, queries, per_file, phases=phases)
    write(out, found)
    size = out.stat().st_size / 1e6
    console.print(f"{out}: {len(found.documents)} documents of {context:,} tokens, {size:.0f} MB")


def gather(
    loaded: LoadedModel, files: Sequence[Path], context: int, queries: int, per_file: int, *, phases: Phases
) -> Dump:
    """Let a model read documents of texts.

    Raises:
        ConfigError: a text is too short.
        UnsupportedCache, UnsupportedModel: its cache cannot be stored by prefix.
    """
    documents = cut(loaded, texts.read(files), context, queries, per_file)
    caches = []
    with phases.bar(f"{loaded.folder.name} reads {len(documents)} documents", len(documents)) as advance:
        for number, document in enumerate(documents):
            caches.append(read(loaded, document.tokens, context))
            advance(number + 1)
    return Dump(loaded.folder.name, models.identity(loaded).rope, tuple(caches))


def read(loaded: LoadedModel, tokens: Sequence[int], context: int) -> Document:
    """Return the cache of the first tokens, and the queries of those behind them."""
    cache = prefill(loaded, tokens[:context])
    keys, values = (
        torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers], dim=1)
        for name in ("keys", "values")
    )
    return Document(keys, values, _queries(loaded.model, cache, tokens[context:]))


def write(path: Path, dump: Dump) -> None:
    """Write a file.

    Raises:
        ConfigError: it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for number, document in enumerate(dump.documents):
        parts = {"k": document.keys, "v": document.values, "q": document.queries}
        tensors |= {f"{number}.{name}": part.contiguous() for name, part in parts.items() if part is not None}
    about = {"model": dump.model, "rope": dump.rope.to_json() if dump.rope else None}
    try:
        with outputs.replacing(path) as part:
            save_file(tensors, part, {_METADATA: canonical_json(about).decode()})
    except SafetensorError as error:
        raise ConfigError(path, "", f"cannot be written: {error}") from None


def load(path: Path) -> Dump:
    """Read a file.

    Raises:
        ConfigError: it cannot be read, or is no dump.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[_METADATA])
            names = set(file.keys())
            documents: list[Document] = []
            while f"{len(documents)}.k" in names:
                parts = [f"{len(documents)}.{part}" for part in "kvq"]
                documents.append(Document(*(file.get_tensor(name) for name in parts if name in names)))
        rope = None if about["rope"] is None else Rope.from_json(about["rope"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, BadField, BadIdentity) as fault:
        raise ConfigError(path, "", f"is no dump of caches: {fault}") from None
    for number, document in enumerate(documents):
        if document.keys.dim() != 4 or document.keys.shape != document.values.shape:
            raise ConfigError(
                path, f"{number}.k", f"{tuple(document.keys.shape)} and {tuple(document.values.shape)} differ"
            )
    if not documents:
        raise ConfigError(path, "", "has no documents: tensors are named 0.k, 0.v, 0.q, 1.k and so on")
    return Dump(str(about.get("model", "")), rope, tuple(documents))


def _queries(model: PreTrainedModel, cache: DynamicCache, continuation: Sequence[int]) -> Tensor:
    """Return the queries of tokens behind a cache, ``[Q, L, Hq, D]``."""
    seen = _Seen()
    longer = DynamicCache([(keys, values) for keys, values, *_ in cache])
    with attending(model, seen), torch.no_grad():
        model(torch.tensor([continuation], device=model.device), cache=longer, logits_to_keep=1)
    return torch.stack([seen.found[layer] for layer in sorted(seen.found)], dim=1)


@dataclass(slots=True)
class _Seen:
    """The attention function of a model while queries are looked at.

    Attributes:
        found: by layer, queries ``[Q, Hq, D]``.
    """

    found: dict[int, Tensor] = field(default_factory=dict)

    def __call__(
        self, module: Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **told: object
    ) -> tuple[Tensor, None]:
        """Attend as the model would: queries ``[1, Hq, Q, D]`` are the last of keys ``[1, H, S, D]``."""
        del mask  # one sequence, whole and causal
        self.found[int(module.layer_idx)] = query[0].transpose(0, 1)  # type: ignore[arg-type]  # modules of attention have a number
        _, heads, tokens, dim = key.shape
        scaling = told.get("scaling")
        queries = query[0].float().view(heads, -1, *query.shape[2:])
        queries = queries * (scaling if isinstance(scaling, float) else dim**-0.5)
        logits = torch.einsum("hgtd,hsd->hgts", queries, key[0].float())
        behind = queries.shape[2]
        past = torch.ones(behind, tokens, dtype=torch.bool, device=key.device).tril(tokens - behind)
        weights = logits.masked_fill(~past, -math.inf).softmax(dim=-1)
        attended = torch.einsum("hgts,hsd->hgtd", weights, value[0].float())
        return attended.flatten(0, 1).transpose(0, 1)[None].to(query.dtype), None
