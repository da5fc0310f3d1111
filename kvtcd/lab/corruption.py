"""Caches that are not what the model made: what a fault in weights, kernels or memory may leave in one.

Each corruption changes keys and values ``[H, T, D]`` of the layer in the middle, or of all layers, in place,
for all tokens but those that are stored exactly anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, of the tokens that are to be changed."""


def scaled_keys(layers: Layers, draw: torch.Generator) -> None:
    """Keys of a layer four times as large."""
    del draw
    layers[len(layers) // 2][0].mul_(4)


def permuted_head(layers: Layers, draw: torch.Generator) -> None:
    """Features of a head in another order, of keys and values alike."""
    for tensor in layers[len(layers) // 2]:
        order = torch.randperm(tensor.shape[-1], generator=draw).to(tensor.device)
        tensor[0] = tensor[0][:, order]


def noisy_layer(layers: Layers, draw: torch.Generator) -> None:
    """Noise of three standard deviations on a layer."""
    for tensor in layers[len(layers) // 2]:
        tensor.add_(_noise(tensor, draw), alpha=3)


def noise(layers: Layers, draw: torch.Generator) -> None:
    """Noise of half a standard deviation on all layers."""
    for layer in layers:
        for tensor in layer:
            tensor.add_(_noise(tensor, draw), alpha=0.5)


def zeroed_layer(layers: Layers, draw: torch.Generator) -> None:
    """A layer of zeros."""
    del draw
    for tensor in layers[len(layers) // 2]:
        tensor.zero_()


def not_a_number(layers: Layers, draw: torch.Generator) -> None:
    """One key feature of one token NaN."""
    keys = layers[len(layers) // 2][0]
    keys[0, int(torch.randint(keys.shape[1], (), generator=draw)), 0] = torch.nan


def _noise(tensor: Tensor, draw: torch.Generator) -> Tensor:
    """Noise of the standard deviation of each feature over tokens."""
    drawn = torch.randn(tensor.shape, generator=draw).to(tensor.device)
    return (drawn * tensor.float().std(dim=1, keepdim=True)).to(tensor.dtype)


CORRUPTIONS: dict[str, Callable[[Layers, torch.Generator], None]] = {
    "keys x 4": scaled_keys,
    "head permuted": permuted_head,
    "layer + 3 sigma": noisy_layer,
    "all + 0.5 sigma": noise,
    "layer zeroed": zeroed_layer,
    "one NaN": not_a_number,
}
"""By the name that tables give them."""
