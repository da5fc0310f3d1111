"""What a batch says is what each of its sequences says alone, whatever is known of it and however padded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.models import random_model, real_model, tiny_llama_config
from support.prefixes import BLOCK_TOKENS, identity_for, lossless_daemon, read, sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvtcd.core.errors import BadRequest, BlockMismatch, UnsupportedCache
from kvtcd.integrations.transformers_cache import PrefixCache
from kvtcd.lab import models

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from kvtcd.client import Client
    from kvtcd.integrations.transformers_reports import LoadBatchReport

PAD = 0
STEPS = 12


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with lossless_daemon() as daemon, daemon.client() as client:
        yield client


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model(tiny_llama_config())


@pytest.fixture
def prefixes(client, model, request) -> PrefixCache:
    return PrefixCache(client, identity_for(model, request.node.nodeid))


def generate(model: PreTrainedModel, batch: LoadBatchReport, steps: int = STEPS) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(
            batch.input_ids, attention_mask=batch.attention_mask, cache=batch.cache,
            max_new_tokens=steps, do_sample=False, pad_token_id=PAD,
        )  # fmt: skip


def alone(model: PreTrainedModel, tokens: list[int], steps: int = STEPS) -> list[int]:
    """What the model says behind one sequence, without cache, padding or batch."""
    said = list(tokens)
    with torch.no_grad():
        for _ in range(steps):
            said.append(int(model(torch.tensor([said])).logits[0, -1].argmax()))
    return said[len(tokens) :]


@pytest.mark.parametrize("known", [(0, 0, 0), (5, 32, 0), (40, 40, 40), (16, 16, 3)])
def test_a_batch_goes_on_as_its_sequences_do_alone(prefixes, model, known):
    sequences = [sequence(length, seed) for seed, length in enumerate((41, 60, 43))]
    for tokens, count in zip(sequences, known, strict=True):
        if count:
            prefixes.save(read(model, tokens[:count]), tokens[:count])

    batch = prefixes.load_batch(sequences, pad=PAD)
    computed = batch.input_ids.shape[1] - batch.cache.get_seq_length()
    output = generate(model, batch)

    assert batch.tokens == known
    assert computed == max(len(ids) - count for ids, count in zip(sequences, known, strict=True))
    for tokens, said in zip(sequences, output[:, batch.input_ids.shape[1] :].tolist(), strict=True):
        assert said == alone(model, tokens)


def test_what_a_batch_read_and_said_is_found_again_by_each_sequence(prefixes, model):
    sequences = [sequence(length, seed) for seed, length in enumerate((9, 30, 17))]
    prefixes.save(read(model, sequences[1][:20]), sequences[1][:20])
    batch = prefixes.load_batch(sequences, pad=PAD)
    output = generate(model, batch)

    saved = prefixes.save_batch(batch.cache, output, batch.attention_mask)

    said = output[:, batch.input_ids.shape[1] :].tolist()
    assert [report.tokens for report in saved] == [len(tokens) + STEPS - 1 for tokens in sequences]
    assert [report.found for report in saved] == [0, 16, 0], "the full block that was there is not sent"
    for tokens, more in zip(sequences, said, strict=True):
        known = prefixes.load([*tokens, *more])
        assert known.tokens == len(tokens) + STEPS - 1
        own = read(model, [*tokens, *more][: known.tokens])
        for (keys, values, *_), (own_keys, own_values, *_) in zip(known.cache, own, strict=True):
            torch.testing.assert_close(keys, own_keys, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(values, own_values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_that_was_padded_elsewhere_is_stored_by_its_mask(prefixes, model, side):
    sequences = [sequence(length, seed) for seed, length in enumerate((9, 24))]
    width = max(map(len, sequences))
    pads = [[PAD] * (width - len(tokens)) for tokens in sequences]
    both = list(zip(pads, sequences, strict=True))
    ids = torch.tensor([[*p, *t] if side == "left" else [*t, *p] for p, t in both])
    mask = torch.tensor(
        [[0] * len(p) + [1] * len(t) if side == "left" else [1] * len(t) + [0] * len(p) for p, t in both]
    )
    cache = DynamicCache()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, cache=cache)

    prefixes.save_batch(cache, ids, mask)

    for tokens in sequences:
        known = prefixes.load([*tokens, 7])
        assert known.tokens == len(tokens)
        for (keys, values, *_), (own_keys, own_values, *_) in zip(
            known.cache, read(model, tokens), strict=True
        ):
            torch.testing.assert_close(keys, own_keys, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(values, own_values, rtol=1e-4, atol=1e-5)


def test_each_sequence_has_the_salt_of_its_user(prefixes, model):
    tokens = sequence(BLOCK_TOKENS + 1)
    batch = prefixes.load_batch([tokens, tokens], pad=PAD)
    output = generate(model, batch, steps=2)
    prefixes.save_batch(batch.cache, output, batch.attention_mask, salts=["a", "b"])

    assert prefixes.load(tokens).tokens == 0
    assert prefixes.load_batch([tokens] * 3, pad=PAD, salts=["a", "c", "b"]).tokens == (16, 0, 16)


def test_what_is_no_batch_is_refused(prefixes, model):
    tokens = torch.tensor([sequence(8), sequence(8, 1)])
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens, cache=cache)
    ones = torch.ones_like(tokens)
    with pytest.raises(BlockMismatch, match="token_ids"):
        prefixes.save_batch(cache, tokens[:, :7], ones)
    with pytest.raises(BlockMismatch, match="token_ids"):
        prefixes.save_batch(cache, tokens[0], ones)
    with pytest.raises(BlockMismatch, match="attention_mask"):
        prefixes.save_batch(cache, tokens, ones[:1])
    with pytest.raises(BadRequest, match="salts: are 1; there are 2"):
        prefixes.save_batch(cache, tokens, ones, salts=[b"a"])
    with pytest.raises(BadRequest, match="salts"):
        prefixes.load_batch([[1, 2]], pad=PAD, salts=[])
    with pytest.raises(BadRequest, match="pad: is None, not a token id"):
        prefixes.load_batch([[1, 2]], pad=None)
    with pytest.raises(BadRequest, match="none"):
        prefixes.load_batch([], pad=PAD)
    cache.layers[1] = DynamicSlidingWindowLayer(sliding_window=4)
    with pytest.raises(UnsupportedCache, match="layer 1"):
        prefixes.save_batch(cache, tokens, ones)


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_answers_two_conversations_at_once_as_one_after_the_other(client):
    loaded = real_model("smollm2")
    prefixes = PrefixCache(client, loaded.model)
    trunk = (
        "The lighthouse keeper wrote down the weather every evening, and nothing else, for thirty years. "
        * 20
    )
    asked = [
        models.tokenize(loaded, trunk + end) for end in ("What did he write? He", "It was a quiet life, and")
    ]
    prefixes.save(read(loaded.model, asked[0][:-1]), asked[0][:-1])
    batch = prefixes.load_batch(asked, pad=loaded.tokenizer.eos_token_id)

    assert batch.tokens == (len(asked[0]) - 1, 256)
    said = generate(loaded.model, batch, steps=8)[:, batch.input_ids.shape[1] :].tolist()
    # In bfloat16 a batch rounds otherwise than a sequence alone: the first tokens are clear all the same.
    for tokens, more in zip(asked, said, strict=True):
        assert more[:3] == alone(loaded.model, tokens, steps=3)
