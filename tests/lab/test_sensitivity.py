"""Second moments of gradients, against finite differences, and against the divergence that errors cause."""

import copy

import pytest
import torch
from support.calibration import tiny_model
from support.codec_world import rotated
from support.models import real_model
from transformers import DynamicCache

from kvtcd.codec.rope import Rotation, inverse_frequencies
from kvtcd.core.layout import Dtype
from kvtcd.lab import models
from kvtcd.lab.capture import prefill, windows
from kvtcd.lab.gather import Gathered, Taker, gather
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.parts import Part
from kvtcd.lab.phases import Phases
from kvtcd.lab.reading import SINKS, plan_reading
from kvtcd.lab.sensitivity import Sensitivity, gradients
from kvtcd.lab.texts import recipe

CPU = torch.device("cpu")


def continued(loaded, layers, tokens):
    """Log likelihoods behind a cache of (keys, values) per layer."""
    with torch.no_grad():
        ids = torch.tensor([tokens])
        logits = loaded.model(ids, cache=DynamicCache([(k.clone(), v.clone()) for k, v in layers])).logits[0]
    return logits.double().log_softmax(-1)


@pytest.fixture
def tiny(tmp_path):
    return tiny_model(tmp_path)


def test_gradients_are_those_of_the_summed_likelihood_of_the_drawn_labels(tiny) -> None:
    """Against central differences, with keys moved *before* RoPE, rotated here in complex numbers."""
    named = models.identity(tiny, Dtype.F32)
    tokens = [(7 * i) % 61 for i in range(24)]
    cache = prefill(tiny, tokens[:16])
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    before = continued(tiny, layers, tokens[16:])
    labels = torch.multinomial(before.exp().float(), 1, generator=torch.Generator().manual_seed(3))
    whole, found = gradients(tiny.model, cache, tokens[16:], named, torch.Generator().manual_seed(3))
    assert whole.get_seq_length() == 24
    assert cache.get_seq_length() == 16
    frequencies, factor = inverse_frequencies(named.rope)
    draw = torch.Generator().manual_seed(0)
    for name, which in (("k", 0), ("v", 1)):
        shape = found[name].shape  # [L, T, H, D]
        direction = torch.randn(shape, generator=draw)
        moved = direction.double()
        if name == "k":
            moved = rotated(moved, named.rope, frequencies, factor, 0)
        plus, minus = (
            [
                tuple(
                    part + sign * 2e-3 * moved[i].transpose(0, 1)[None].float() if w == which else part
                    for w, part in enumerate(layer)
                )
                for i, layer in enumerate(layers)
            ]
            for sign in (1, -1)
        )
        after = (continued(tiny, plus, tokens[16:]) - continued(tiny, minus, tokens[16:])).gather(1, labels)
        slope = float(after.sum()) / 4e-3
        assert float((found[name] * direction).sum()) == pytest.approx(slope, rel=0.02, abs=1e-3)


def test_the_model_is_left_as_it_was(tiny) -> None:
    named = models.identity(tiny, Dtype.F32)
    gradients(tiny.model, prefill(tiny, list(range(8))), [1, 2], named, torch.Generator())
    assert all(p.requires_grad and p.grad is None for p in tiny.model.parameters())


def test_moments_add_up_over_tokens_and_calls() -> None:
    one, two = torch.randn(2, 5, 3, 4), torch.randn(2, 7, 3, 4)
    parts, whole = (Sensitivity.empty(2, 3, 4, CPU) for _ in range(2))
    parts.add(one, 6)
    parts.add(two, 6)
    whole.add(torch.cat((one, two), dim=1), 6)
    assert torch.allclose(parts.moment, whole.moment)
    g = torch.cat((one, two), dim=1)[1, :, 2]
    assert torch.allclose(whole.moment[1, 2], g.t() @ g / 12 / 6, atol=1e-6)


def test_gathering_takes_fitted_windows_without_sinks_and_recent_tokens(tiny) -> None:
    named = models.identity(tiny, Dtype.F32)
    reading = plan_reading([range(96), range(5, 70)], 96, seed=0, window=32)
    gathered = Gathered()

    def into(gathered: Gathered) -> list[Taker]:
        return [Taker(Part.whole(named), gathered, lambda _: None)]

    gather(tiny, named, reading, into(gathered), phases=Phases(), differentiate=gradients)
    fitted = len(reading.windows) - reading.held_out
    assert {int(s.count) for s in gathered.sensitivities.values()} == {fitted * (32 - 4 - 4 - SINKS) * 4}
    plain = Gathered()
    gather(tiny, named, reading, into(plain), phases=Phases())
    for name, moments in plain.moments.items():
        # The end of a window was read behind a cache: the same keys but for rounding.
        assert torch.allclose(gathered.moments[name].mean, moments.mean, atol=1e-5)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_half_the_quadratic_form_predicts_the_divergence_of_small_random_errors() -> None:
    """SmolLM2 in float32: rounding to bfloat16 alone is a larger error than these."""
    loaded = real_model("smollm2")
    named = models.identity(loaded)
    loaded = LoadedModel(copy.deepcopy(loaded.model).float(), loaded.tokenizer, loaded.folder)
    context, behind = 256, 64
    tokens = [models.tokenize(loaded, text.text) for text in recipe()]
    chosen = [window for _, window in windows(tokens, context + behind, 1)]
    caches = [prefill(loaded, window[:context]) for window in chosen]
    draw = torch.Generator().manual_seed(0)
    moments: dict[str, Sensitivity] = {}
    for cache, window in zip(caches, chosen, strict=True):
        for _ in range(6):
            _, found = gradients(loaded.model, cache, window[context:], named, draw)
            for name, g in found.items():
                layers, _, heads, dim = g.shape
                moments.setdefault(name, Sensitivity.empty(layers, heads, dim, CPU)).add(g[:, SINKS:], behind)
    turn = Rotation(named.rope, SINKS, context - SINKS, inverse=False)
    for name, which in (("k", 0), ("v", 1)):
        moment = moments[name].moment
        # Alike in all directions of a head: a shape taken from the moment would be drawn to its own gaps.
        scale = moment.diagonal(dim1=-2, dim2=-1).mean(dim=-1).rsqrt()
        predicted = measured = 0.0
        for cache, window in zip(caches, chosen, strict=True):
            noise = torch.randn((moment.shape[0], context - SINKS, *moment.shape[1:3]), generator=draw)
            error = 5e-5 * noise * scale[:, None, :, None]
            predicted += 0.5 * float(torch.einsum("lthd,lhde,lthe->", error, moment, error))
            cached = turn(error) if name == "k" else error
            layers = [[layer.keys.clone(), layer.values.clone()] for layer in cache.layers]
            before = continued(loaded, layers, window[context:])
            for layer, change in zip(layers, cached, strict=True):
                layer[which][0, :, SINKS:] += change.transpose(0, 1)
            after = continued(loaded, layers, window[context:])
            measured += float((before.exp() * (before - after)).sum(-1).mean())
        assert predicted == pytest.approx(measured, rel=0.2), name
