"""How much a model minds errors in its cached keys and values, as its attention alone tells: no gradients.

An error of a cached token reaches the rest of the model through the output of its own layer's attention. With
``a_ts`` the weight that query ``t`` gives to cached token ``s``, ``o_t`` the output of a head and ``W`` its
part of the output projection, the residual stream moves by

    dy_t = sum over heads   a_ts W dv_s   +   a_ts W (v_s - o_t) q_t.dk_s / sqrt(D)

to first order. What the layers behind make of ``dy`` is not looked at: each of them reads the residual
stream ``r_t`` through a normalisation, so what counts is taken to be ``|dy_t|^2 / |r_t|^2``, alike in all
directions, summed over the queries that follow. That is ``d^T M d`` with ``M = E[g g^T]`` for

    g = gradient, by the cached keys and values, of   sum over t  n_t.y_t / |r_t|,   n_t ~ N(0, 1),

which has a closed form: the backward pass of one layer's attention, fed with noise. So this is the Fisher
information of `lab.sensitivity` with everything behind the attention replaced by noise of the size that a
normalisation leaves, and is used in its place: query heads that share a KV head add up, tokens that attention
looks at have large ``g``.

``M`` is in no unit (shares of the residual stream, not nats), the same for all layers. What it lacks is what
differs between layers behind the normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import linear
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from kvtcd.core.errors import UnsupportedModel
from kvtcd.core.identity import Identity
from kvtcd.integrations.transformers_blocks import require_full_attention
from kvtcd.lab.sensitivity import before_rope

_NAME = "kvtcd"
"""Of the attention function, among those of transformers."""
_HARMLESS = frozenset({"cache_position", "is_causal", "output_attentions", "position_ids", "use_cache"})
"""What a model may tell its attention function without changing what is computed here."""
_ELSE = "use --sensitivity fisher, which knows no modules, or none"


def local_gradients(
    model: PreTrainedModel,
    cache: DynamicCache,
    continuation: Sequence[int],
    identity: Identity,
    draw: torch.Generator,
) -> tuple[DynamicCache, dict[str, Tensor]]:
    """Read tokens behind a cache and feed noise back from each layer's attention output to what is cached.

    Args:
        model: as transformers loads it.
        cache: of one sequence from position 0; not changed.
        continuation: the tokens that follow, ``C``.
        identity: of the cache: layout, and the RoPE to undo.
        draw: of the noise, on the CPU.

    Returns:
        The cache of all tokens, and by stream the gradients of the cached ones, float32 ``[L, T, H, D]``, of
        keys as they are before RoPE; as `sensitivity.gradients` does.

    Raises:
        UnsupportedCache: a layer does not keep its whole past.
        UnsupportedModel: its attention is not of the standard kind.
    """
    require_full_attention(cache)
    longer = DynamicCache([(keys, values) for keys, values, *_ in cache])
    recorder = _Recorder(cache.get_seq_length(), draw)
    with recorder.attached(model), torch.no_grad():
        model(torch.tensor([continuation], device=model.device), cache=longer, logits_to_keep=1)
    if sorted(recorder.found) != list(range(len(cache.layers))):
        raise UnsupportedModel(
            f"{type(model).__name__} attends by a function that can be replaced in {len(recorder.found)} of "
            f"{len(cache.layers)} layers; {_ELSE}"
        )
    layers = [recorder.found[index] for index in range(len(cache.layers))]
    names = [stream.name for stream in identity.layout.streams]
    found = {name: torch.stack([layer[which] for layer in layers]) for which, name in enumerate(names)}
    return longer, before_rope(found, identity)


def feed_back(
    back: Tensor, weights: Tensor, attended: Tensor, queries: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``sum of back * attended`` by keys and by values: attention's backward pass.

    Args:
        back: what the outputs are multiplied with, ``[H, G, C, D]``: KV heads, query heads of each, queries.
        weights: of attention, ``[H, G, C, S]``.
        attended: the outputs, ``[H, G, C, D]``.
        queries: times the scale of the logits, ``[H, G, C, D]``.
        values: ``[H, S, D]``.

    Returns:
        By keys and by values, ``[S, H, D]``, summed over the query heads of a KV head.
    """
    by_values = torch.einsum("hgts,hgtd->shd", weights, back)
    to_weights = torch.einsum("hgtd,hsd->hgts", back, values)
    to_logits = weights * (to_weights - (back * attended).sum(dim=-1, keepdim=True))
    return torch.einsum("hgts,hgtd->shd", to_logits, queries), by_values


@contextmanager
def attending(model: PreTrainedModel, attend: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Let a model attend by a function of ours, and as before in the end."""
    before = model.config._attn_implementation  # noqa: SLF001 - it has no other name
    AttentionInterface.register(_NAME, attend)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(before)


class _Recorder:
    """The attention function of a model while it is looked at.

    Args:
        cached: tokens whose gradients are kept.
        draw: of the noise.

    Attributes:
        found: by layer, gradients of its cached keys and values, ``[T, H, D]``.
    """

    def __init__(self, cached: int, draw: torch.Generator) -> None:
        self.found: dict[int, tuple[Tensor, Tensor]] = {}
        self._cached = cached
        self._draw = draw
        self._entering: dict[int, Tensor] = {}

    @contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[None]:
        """Let the model attend by this, and show it the residual stream at the entry of each layer."""
        hooks = [
            layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
            for index, layer in _layers(model).items()
        ]
        try:
            with attending(model, self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __call__(
        self,
        module: Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        **others: object,
    ) -> tuple[Tensor, None]:
        """Attend as the model would: queries ``[1, Hq, C, D]`` are the last of keys ``[1, H, S, D]``."""
        del attention_mask, dropout  # one sequence, whole and causal; nothing is trained
        if strange := sorted(
            name for name, given in others.items() if given is not None and name not in _HARMLESS
        ):
            raise UnsupportedModel(f"{type(module).__name__} is not plain: {', '.join(strange)}; {_ELSE}")
        keys, values = key[0].float(), value[0].float()
        heads, tokens, dim = values.shape
        queries = query[0].float().view(heads, -1, *query.shape[2:]) * (scaling or query.shape[-1] ** -0.5)
        behind = queries.shape[2]
        logits = torch.einsum("hgtd,hsd->hgts", queries, keys)
        past = torch.ones(behind, tokens, dtype=torch.bool, device=keys.device).tril(tokens - behind)
        weights = logits.masked_fill(~past, -math.inf).softmax(dim=-1)
        attended = torch.einsum("hgts,hsd->hgtd", weights, values)
        out = attended.flatten(0, 1).transpose(0, 1)[None].to(query.dtype)  # [1, C, Hq, D]

        index, project = int(cast("int", module.layer_idx)), cast("Linear", module.o_proj)
        moved = linear(out[0].flatten(1), project.weight, project.bias).float()
        residual = self._entering.pop(index) + moved
        noise = torch.randn(residual.shape, generator=self._draw).to(residual.device)
        noise /= residual.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        back = (noise @ project.weight.float()).view(behind, heads, -1, dim).permute(1, 2, 0, 3)
        by_keys, by_values = feed_back(back, weights, attended, queries, values)
        self.found[index] = (by_keys[: self._cached], by_values[: self._cached])
        return out, None

    def _enter(self, index: int, layer: Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        del layer
        entering = given[0] if given else named["hidden_states"]
        self._entering[index] = entering[0].float()


def _layers(model: PreTrainedModel) -> dict[int, Module]:
    """Return the modules that hold an attention, by the index of their layer.

    Raises:
        UnsupportedModel: an attention has no output projection, or there is none at all.
    """
    found: dict[int, Module] = {}
    for name, module in model.named_modules():
        if hasattr(module, "layer_idx") and hasattr(module, "scaling"):
            if not isinstance(getattr(module, "o_proj", None), Linear):
                raise UnsupportedModel(
                    f"{type(module).__name__} has no linear output projection o_proj; {_ELSE}"
                )
            found[module.layer_idx] = model.get_submodule(name.rpartition(".")[0])
    return found
