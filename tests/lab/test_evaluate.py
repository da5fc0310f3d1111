"""The measures, against sums by hand and a codec that changes nothing."""

import math

import numpy as np
import pytest
import torch
from support.calibration import run, tiny_model
from support.codec_world import rotated

from kvtcd.codec.choose import Decoder
from kvtcd.codec.kvtc import Kvtc
from kvtcd.codec.lossless import Lossless
from kvtcd.codec.ports import Encoded
from kvtcd.codec.rope import inverse_frequencies
from kvtcd.core.blob import CodecId, Kind, parse
from kvtcd.core.layout import Dtype
from kvtcd.lab import evaluate, models
from kvtcd.lab.capture import prefill

TOKENS = [(7 * n * n + n) % 64 for n in range(210)]
CONTEXT = 200
BLOCK = 64


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "checkpoints").mkdir()
    loaded = tiny_model(folder / "model")
    named = models.identity(loaded, Dtype.F32, block_tokens=BLOCK)
    return loaded, named, run(loaded, folder / "checkpoints").profile


@pytest.fixture(scope="module")
def document(world):
    loaded, named, _ = world
    return evaluate.read(loaded, named, TOKENS, CONTEXT)


def lossless(named) -> tuple[Lossless, Decoder]:
    return Lossless(named.layout), Decoder(named.layout, named.rope, lambda _: None)


def kvtc(named, profile, ratio, **policy: int) -> tuple[Kvtc, Decoder]:
    return Kvtc(named.layout, named.rope, profile, ratio, **policy), Decoder(
        named.layout, named.rope, lambda _: profile
    )


def test_blocks_are_cut_where_they_stand(document) -> None:
    assert [(b.first_token, b.tokens, b.after) for b in document.blocks] == [
        (0, 64, 136),
        (64, 64, 72),
        (128, 64, 8),
        (192, 8, 0),
    ]
    assert document.continuation == tuple(TOKENS[CONTEXT:])
    assert document.logits.shape == (10, 64)


def test_the_reference_is_the_models_own_run(world, document) -> None:
    loaded = world[0]
    with torch.no_grad():
        own = loaded.model(torch.tensor([TOKENS[CONTEXT:]]), cache=prefill(loaded, TOKENS[:CONTEXT])).logits
    assert torch.equal(document.logits, own[0])


def test_a_document_read_in_other_steps_is_the_same_but_for_rounding(world, document) -> None:
    loaded, named, _ = world
    found = evaluate.noise(loaded, named, document)
    with torch.no_grad():
        whole = loaded.model(torch.tensor([TOKENS])).logits[0, CONTEXT:]
    assert 0 <= found.kl < 1e-6
    assert found.top1 == 1
    assert found.dnll == pytest.approx(0, abs=1e-5)
    assert torch.allclose(whole, document.logits, atol=1e-3)


def test_blocks_that_are_stored_otherwise_than_asked_are_counted(world, document) -> None:
    loaded, named, profile = world
    encoder, decoder = kvtc(named, profile, 8)
    assert evaluate.measure(loaded, named, document, encoder, decoder).refused == 0

    class Refuses(Kvtc):
        def analyze(self, raw, *, first_token, **rest):
            return super().analyze(raw, first_token=None if first_token == 64 else first_token, **rest)

    refusing = Refuses(named.layout, named.rope, profile, 8)
    measured = evaluate.measure(loaded, named, document, refusing, decoder)
    assert (measured.finer, measured.refused) == (0, 1)


def test_a_codec_that_loses_nothing_has_no_divergence_and_no_error(world, document) -> None:
    loaded, named, _ = world
    measured = evaluate.measure(loaded, named, document, *lossless(named))
    assert measured.quality == evaluate.Quality(kl=0.0, top1=1.0, dnll=0.0)
    assert measured.error == {"k": 0.0, "v": 0.0}


def test_a_coarser_plan_is_smaller_and_worse(world, document) -> None:
    loaded, named, profile = world
    fine, coarse = (
        evaluate.measure(loaded, named, document, *kvtc(named, profile, ratio)) for ratio in (8, 32)
    )
    assert fine.size.ratio < coarse.size.ratio
    assert 0 < fine.quality.kl < coarse.quality.kl
    for stream in ("k", "v"):
        assert 0 < fine.error[stream] < coarse.error[stream] <= 1.1


def test_quality_is_the_textbooks() -> None:
    generator = torch.Generator().manual_seed(0)
    reference, logits = torch.randn((2, 5, 7), generator=generator) * 3
    tokens = [0, 3, 1, 6, 2]
    found = evaluate.quality(reference, logits, tokens)

    def softmax(row: torch.Tensor) -> list[float]:
        powers = [math.exp(value) for value in row.tolist()]
        return [power / sum(powers) for power in powers]

    p, q = [softmax(row) for row in reference], [softmax(row) for row in logits]
    kl = [sum(a * math.log(a / b) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)]
    agree = [x.index(max(x)) == y.index(max(y)) for x, y in zip(p, q, strict=True)]
    dnll = [math.log(p[n][tokens[n + 1]]) - math.log(q[n][tokens[n + 1]]) for n in range(4)]
    assert found.kl == pytest.approx(np.mean(kl), rel=1e-5)
    assert found.top1 == np.mean(agree)
    assert found.dnll == pytest.approx(np.mean(dnll), rel=1e-5)
    assert evaluate.quality(logits, reference, tokens).kl != pytest.approx(found.kl, rel=1e-3)


def test_coded_tokens_are_charged_all_but_the_exact_sections_of_others(world, document) -> None:
    """200 tokens: 4 sinks, 68 to be coded in the first two blocks, 128 exact."""
    _, named, profile = world
    encoder, _ = kvtc(named, profile, 8)
    encoded = evaluate.encode(encoder, document.blocks)
    sizes = [evaluate.size(named.layout, [b], [e]) for b, e in zip(document.blocks, encoded, strict=True)]
    values = named.layout.token_elements
    assert [size.coded_raw for size in sizes] == [16 * values * n for n in (60, 8, 0, 0)]
    assert [size.all_raw for size in sizes] == [16 * values * n for n in (64, 64, 64, 8)]
    assert [size.all for size in sizes] == [8 * len(e.blob) for e in encoded]
    for size, packed in zip(sizes[:2], encoded[:2], strict=True):
        blob = parse(memoryview(packed.blob))
        exact = sum(section.nbytes for section in blob.sections if section.kind is Kind.PLANE)
        assert exact > 0
        assert size.coded == 8 * (len(packed.blob) - exact)
    assert [size.coded for size in sizes[2:]] == [0, 0]
    total = evaluate.size(named.layout, document.blocks, encoded)
    assert total == sizes[0] + sizes[1] + sizes[2] + sizes[3]
    assert total.ratio == pytest.approx(16 * values * 68 / sum(size.coded for size in sizes))
    assert total.ratio_all == 16 * values * 200 / sum(8 * len(e.blob) for e in encoded)


def test_a_section_of_both_kinds_of_tokens_is_shared_by_their_number(world, document) -> None:
    _, named, _ = world
    block = document.blocks[1]  # its first 8 tokens count, its last 56 are in the window
    packed = Lossless(named.layout).encode(block.raw, tokens=64, first_token=64, after=72)
    blob = parse(memoryview(packed.blob))
    sections = sum(section.nbytes for section in blob.sections)
    size = evaluate.size(named.layout, [block], [packed])
    assert size.coded == pytest.approx(8 * (len(packed.blob) - sections + sections * 8 / 64))
    assert packed == Encoded(packed.blob, CodecId.LOSSLESS)


def test_the_same_tokens_are_judged_whatever_a_policy_keeps_exact(world, document) -> None:
    loaded, named, profile = world
    encoder, decoder = kvtc(named, profile, 8, sinks=0, window=0)
    measured = evaluate.measure(loaded, named, document, encoder, decoder)
    assert measured.size.coded_raw == 16 * named.layout.token_elements * 68
    default = evaluate.measure(loaded, named, document, *kvtc(named, profile, 8))
    assert measured.error == pytest.approx(default.error, rel=1e-3)
    assert measured.quality.kl > default.quality.kl


def test_errors_are_relative_to_the_energy_about_the_mean_before_rope(world, document) -> None:
    loaded, named, _ = world
    noise = torch.Generator().manual_seed(1)
    decoded = [block.raw.clone() for block in document.blocks]
    squared = {"k": 0.0, "v": 0.0}
    for block, raw in zip(document.blocks, decoded, strict=True):
        for stream, offset, nbytes in named.layout.spans(block.tokens):
            values = raw[offset : offset + nbytes].view(torch.float32).view(4, block.tokens, -1)
            before = values.clone()
            values += 0.01 * torch.randn(values.shape, generator=noise)
            first, last = max(4, block.first_token), min(72, block.first_token + block.tokens)
            coded = slice(first - block.first_token, max(last - block.first_token, 0))
            squared[stream.name] += float((values - before)[:, coded].double().square().sum())
    found = evaluate.errors(named, document.blocks, decoded)
    frequencies, _ = inverse_frequencies(named.rope)
    cache = prefill(loaded, TOKENS[:CONTEXT])
    for name, field in (("k", "keys"), ("v", "values")):
        x = torch.stack([getattr(layer, field)[0].transpose(0, 1) for layer in cache.layers]).double()
        x = rotated(x, named.rope, -frequencies, 1.0, 0) if name == "k" else x
        coded = x[:, 4:72]
        energy = (coded - coded.mean(dim=1, keepdim=True)).square().sum()
        assert found[name] == pytest.approx(squared[name] / float(energy), rel=1e-5)


def test_continuing_leaves_the_blocks_as_they_were(world, document) -> None:
    loaded, named, _ = world
    raw = [block.raw for block in document.blocks]
    before = [block.clone() for block in raw]
    first = evaluate.continue_behind(loaded, raw, named.layout, TOKENS[CONTEXT:])
    assert torch.equal(first, evaluate.continue_behind(loaded, raw, named.layout, TOKENS[CONTEXT:]))
    assert all(torch.equal(a, b) for a, b in zip(raw, before, strict=True))


def test_a_context_of_sinks_and_window_alone_has_no_ratio_of_coded_tokens(world) -> None:
    loaded, named, profile = world
    document = evaluate.read(loaded, named, TOKENS[:140], 132)
    measured = evaluate.measure(loaded, named, document, *kvtc(named, profile, 8))
    assert math.isnan(measured.size.ratio)
    assert 0.3 < measured.size.ratio_all < 1.2
    assert measured.error == {}
    assert measured.quality.kl == 0.0
