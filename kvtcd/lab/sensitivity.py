"""How much a model minds errors in its cached keys and values: second moments of gradients.

What the codec is to keep small is the Kullback-Leibler divergence of what the model says behind the cache. To
second order that is ``1/2 d^T M d`` for an error ``d``, where ``M = E[g g^T]`` and ``g`` is the gradient of
the log likelihood of labels **drawn from the model's own distribution** (the Fisher information; labels of
the text itself, or a loss averaged over positions, give another matrix without any warning).

A window is read in two parts. Its first part becomes a cache, as it would be stored. Its end is read behind
that cache, a label is drawn for every position at temperature 1 and not fed back, and the *summed* log
likelihood is differentiated by the cached keys and values. So the gradient is that of what a codec touches:
keys are taken where they are cached, behind any normalisation of the model, and turned back to position zero;
query heads that share a KV head add up; and errors of a token are judged by what far later tokens make of
them. The most recent cached tokens are left out: neighbours look at each other in another way, and the codec
keeps them finer anyway.

Nothing here knows the model's modules: any decoder whose cache keeps its whole past will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvtcd.codec.rope import Rotation, inverse_frequencies
from kvtcd.core.identity import Identity
from kvtcd.integrations.transformers_blocks import require_full_attention

Differentiate = Callable[
    [PreTrainedModel, DynamicCache, Sequence[int], Identity, torch.Generator],
    tuple[DynamicCache, dict[str, Tensor]],
]
"""What gives gradients: `gradients`, or `attention.local_gradients` in its place."""

PART = 8
"""One part in so many of a window, its end, is what is read behind the cache; as many tokens before are left
out."""


@dataclass(slots=True)
class Sensitivity:
    """Sum of ``g g^T`` over tokens, by layer and head of one stream.

    Attributes:
        count: tokens, times the positions whose likelihood was differentiated: int64 scalar.
        outer: ``[L, H, D, D]`` float32.
    """

    count: Tensor
    outer: Tensor

    @classmethod
    def empty(cls, layers: int, heads: int, dim: int, device: torch.device) -> Sensitivity:
        """Start from nothing."""
        return cls(
            count=torch.zeros((), dtype=torch.int64, device=device),
            outer=torch.zeros((layers, heads, dim, dim), device=device),
        )

    def add(self, gradients: Tensor, positions: int, weights: Tensor | None = None) -> None:
        """Take in float32 gradients ``[L, T, H, D]`` of the log likelihood of so many positions.

        Args:
            gradients: of the tokens.
            positions: whose likelihoods were summed up.
            weights: of the tokens, ``[T]``; all one without.
        """
        by_head = gradients.transpose(1, 2)
        weighted = by_head if weights is None else by_head * weights[:, None]
        self.outer += weighted.mT @ by_head
        self.count += gradients.shape[1] * positions

    @property
    def moment(self) -> Tensor:
        """``M``, ``[L, H, D, D]`` float32: nats per position of the continuation and token of the cache."""
        return self.outer / self.count


def gradients(
    model: PreTrainedModel,
    cache: DynamicCache,
    continuation: Sequence[int],
    identity: Identity,
    draw: torch.Generator,
) -> tuple[DynamicCache, dict[str, Tensor]]:
    """Read tokens behind a cache and differentiate the likelihood of sampled labels by what is cached.

    Args:
        model: its parameters are left alone.
        cache: of one sequence from position 0; not changed.
        continuation: the tokens that follow, ``C``.
        identity: of the cache: layout, and the RoPE to undo.
        draw: of the labels, on the CPU.

    Returns:
        The cache of all tokens, and by stream the gradients of the cached ones, float32 ``[L, T, H, D]``, of
        keys as they are before RoPE.

    Raises:
        UnsupportedCache: a layer does not keep its whole past.
    """
    require_full_attention(cache)
    leaves = [tuple(part.detach().requires_grad_() for part in layer[:2]) for layer in cache]
    longer = DynamicCache(leaves)
    with _frozen(model), torch.enable_grad():
        ids = torch.tensor([continuation], device=model.device)
        likelihood = model(ids, cache=longer).logits[0].to(torch.float32).log_softmax(dim=-1)
        labels = torch.multinomial(likelihood.detach().exp().cpu(), 1, generator=draw)
        summed = likelihood.gather(1, labels.to(likelihood.device)).sum()
        flat = torch.autograd.grad(summed, [part for layer in leaves for part in layer])
    found = {
        stream.name: torch.stack([g[0].transpose(0, 1) for g in flat[index :: len(leaves[0])]]).float()
        for index, stream in enumerate(identity.layout.streams)
    }
    whole = DynamicCache([(keys.detach(), values.detach()) for keys, values, *_ in longer])
    return whole, before_rope(found, identity)


def before_rope(found: Mapping[str, Tensor], identity: Identity) -> dict[str, Tensor]:
    """Turn gradients ``[L, T, H, D]`` by cached keys into those by keys as they are before RoPE."""
    turned = dict(found)
    for stream in identity.layout.streams:
        if stream.rope and identity.rope:
            # With k' = f R k the gradient by k is f R^T g', and the inverse rotation is R^T / f.
            own = found[stream.name]
            undo = Rotation(identity.rope, 0, own.shape[1], inverse=True, device=own.device)
            turned[stream.name] = undo(own) * inverse_frequencies(identity.rope)[1] ** 2
    return turned


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """Keep what is only needed for gradients of parameters out of memory."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)  # noqa: FBT003 - torch's own signature
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)  # noqa: FBT003 - the same
