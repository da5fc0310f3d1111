"""Gradients of attention alone, against autograd through the real model, layer by layer."""

import pytest
import torch
from support.calibration import run, tiny_model
from support.codec_world import rotated
from torch import nn
from transformers import DynamicCache

from kvtcd.codec.rope import inverse_frequencies
from kvtcd.core.errors import UnsupportedModel
from kvtcd.core.layout import Dtype
from kvtcd.lab import models
from kvtcd.lab.attention import local_gradients
from kvtcd.lab.capture import prefill

TOKENS = [(7 * i) % 61 for i in range(24)]
CACHED = 16


@pytest.fixture
def tiny(tmp_path):
    return tiny_model(tmp_path)


def streams_behind(model, layers, tokens):
    """What enters each layer, and what its attention adds to that, float ``[C, hidden]``."""
    entering, added, hooks = [], [], []
    for layer in model.model.layers:
        hooks.append(layer.register_forward_pre_hook(lambda _, given: entering.append(given[0][0])))
        hooks.append(layer.self_attn.register_forward_hook(lambda *given: added.append(given[-1][0][0])))
    model(torch.tensor([tokens]), cache=DynamicCache(layers))
    for hook in hooks:
        hook.remove()
    return entering, added


def test_noise_fed_back_by_hand_is_what_autograd_feeds_back(tiny) -> None:
    """Autograd sees the model as it is: grouped heads, RoPE, scale, mask. Keys are turned back by hand."""
    named = models.identity(tiny, Dtype.F32)
    cache = prefill(tiny, TOKENS[:CACHED])
    whole, found = local_gradients(
        tiny.model, cache, TOKENS[CACHED:], named, torch.Generator().manual_seed(5)
    )
    assert whole.get_seq_length() == 24
    assert cache.get_seq_length() == CACHED
    leaves = [(layer.keys.requires_grad_(), layer.values.requires_grad_()) for layer in cache.layers]
    entering, added = streams_behind(tiny.model, leaves, TOKENS[CACHED:])
    frequencies, _ = inverse_frequencies(named.rope)
    draw = torch.Generator().manual_seed(5)
    for index, (keys_and_values, before, own) in enumerate(zip(leaves, entering, added, strict=True)):
        noise = torch.randn(own.shape, generator=draw)
        size = (before + own).norm(dim=-1, keepdim=True).detach()
        by_keys, by_values = torch.autograd.grad(
            (noise * own / size).sum(), keys_and_values, retain_graph=True
        )
        turned = rotated(by_keys.transpose(1, 2), named.rope, -frequencies, 1.0, 0)[0]  # [T, H, D]
        assert torch.allclose(found["k"][index].double(), turned, atol=1e-5)
        assert torch.allclose(found["v"][index], by_values[0].transpose(0, 1), atol=1e-5)
        assert found["v"][index].abs().max() > 1e-3


def test_the_model_attends_as_before_and_is_left_as_it_was(tiny) -> None:
    named = models.identity(tiny, Dtype.F32)
    before = tiny.model.config._attn_implementation
    cache = prefill(tiny, TOKENS[:CACHED])
    whole, _ = local_gradients(tiny.model, cache, TOKENS[CACHED:], named, torch.Generator())
    assert tiny.model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in tiny.model.modules())
    for got, want in zip(whole.layers, prefill(tiny, TOKENS).layers, strict=True):
        assert torch.allclose(got.keys, want.keys, atol=1e-5)
        assert torch.allclose(got.values, want.values, atol=1e-5)


def test_calibration_by_attention_says_so_and_knows_tokens_apart(tiny, tmp_path) -> None:
    (tmp_path / "checkpoints").mkdir()
    made = run(tiny, tmp_path / "checkpoints", sensitivity="attention")
    assert made.profile.origin.sensitivity == "attention"
    assert all(own.tokens.any() for own in made.profile.weighted.values())
    assert made.data == run(tiny, tmp_path / "checkpoints", sensitivity="attention").data
    assert made.data != run(tiny, tmp_path / "checkpoints").data


def test_what_is_not_plain_attention_is_refused_with_what_to_do(tiny, monkeypatch) -> None:
    named = models.identity(tiny, Dtype.F32)
    cache = prefill(tiny, TOKENS[:CACHED])
    attention = type(tiny.model.model.layers[0].self_attn)
    forward = attention.forward
    with monkeypatch.context() as patch:
        patch.setattr(attention, "forward", lambda *a, **k: forward(*a, **k, softcap=30.0))
        with pytest.raises(UnsupportedModel, match=r"not plain: softcap; use --sensitivity fisher"):
            local_gradients(tiny.model, cache, TOKENS[CACHED:], named, torch.Generator())
    own = tiny.model.model.layers[0].self_attn
    with monkeypatch.context() as patch:
        patch.setattr(own, "forward", lambda *_, **__: (torch.zeros(1, 8, 32), None))
        with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .* in 3 of 4 layers"):
            local_gradients(tiny.model, cache, TOKENS[CACHED:], named, torch.Generator())
    own.o_proj = nn.Sequential(own.o_proj)
    with pytest.raises(UnsupportedModel, match=r"LlamaAttention has no linear output projection o_proj"):
        local_gradients(tiny.model, cache, TOKENS[CACHED:], named, torch.Generator())
    assert not any(module._forward_pre_hooks for module in tiny.model.modules())
