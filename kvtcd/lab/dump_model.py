"""`kvtcd eval dump`: a model reads documents, and its caches are written as `lab.dump` has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache, PreTrainedModel

from kvtcd.lab import held_out, models, texts
from kvtcd.lab.attention import attending
from kvtcd.lab.capture import prefill
from kvtcd.lab.dump import Document, Dump, write
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.opened import opened
from kvtcd.lab.phases import Phases
from kvtcd.lab.rd import cut


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
    sources = texts.read(files)
    documents = cut(loaded, sources, context, queries, per_file)
    caches = []
    with phases.bar(f"{loaded.folder.name} reads {len(documents)} documents", len(documents)) as advance:
        for number, document in enumerate(documents):
            caches.append(read(loaded, document.tokens, context))
            advance(number + 1)
    identity = models.identity(loaded)
    return Dump(
        model=identity.model,
        rope=identity.rope,
        documents=tuple(caches),
        weights=identity.weights,
        adapter=identity.adapter,
        texts=tuple(held_out.source(text) for text in sources),
    )


def read(loaded: LoadedModel, tokens: Sequence[int], context: int) -> Document:
    """Return the cache of the first tokens, and the queries of those behind them."""
    cache = prefill(loaded, tokens[:context])
    keys, values = (
        torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers], dim=1)
        for name in ("keys", "values")
    )
    return Document(keys, values, _queries(loaded.model, cache, tokens[context:]))


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
