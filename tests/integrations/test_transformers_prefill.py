"""A prompt read in passes: the same cache, blocks there as soon as a pass ends, and no daemon no loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.models import random_model, tiny_llama_config
from support.prefixes import BLOCK_TOKENS, identity_for, lossless_daemon, read, sequence

from kvtcd.core.errors import BadRequest, BlockMismatch, Unavailable
from kvtcd.integrations.transformers_cache import PrefixCache
from kvtcd.integrations.transformers_prefill import prefill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from kvtcd.lab.daemon import Daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with lossless_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model(tiny_llama_config())


@pytest.fixture
def prefixes(daemon, model, request) -> Iterator[PrefixCache]:
    with daemon.client() as client:
        yield PrefixCache(client, identity_for(model, request.node.nodeid))


def close(cache, model, tokens) -> None:
    for (keys, values, *_), (own_keys, own_values, *_) in zip(cache, read(model, tokens), strict=True):
        torch.testing.assert_close(keys, own_keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, own_values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", [-5, 0, 1.5, True, None])
def test_passes_without_tokens_are_refused(prefixes, model, step):
    with pytest.raises(BadRequest, match=r"step: is .* not a number of tokens"):
        prefill(prefixes, model, sequence(70), step=step)


@pytest.mark.parametrize("step", [1, 7, 16, 40, 1000])
def test_passes_of_any_length_make_the_same_cache_and_blocks(prefixes, model, step):
    tokens = sequence(70)

    report = prefill(prefixes, model, tokens, step=step)

    close(report.cache, model, tokens[:-1])
    assert (report.tokens, report.failure) == (0, None)
    assert prefixes.load(tokens).tokens == 69, "all but the last token is stored, the partial block too"
    again = prefill(prefixes, model, tokens, step=step)
    assert (again.tokens, again.results) == (69, ())
    close(again.cache, model, tokens[:-1])


def test_the_blocks_of_a_pass_are_there_when_it_ends(prefixes, model):
    tokens, seen = sequence(70), []

    def forward(*args, **more):
        seen.append(prefixes.load([*tokens, 7]).tokens)
        return model(*args, **more)

    forward.device = model.device
    prefill(prefixes, forward, tokens, step=20)

    assert seen == [0, 16, 32, 48]


def test_it_goes_on_from_what_is_stored(prefixes, model):
    tokens = sequence(70)
    prefixes.save(read(model, tokens[:33]), tokens[:33])

    report = prefill(prefixes, model, tokens, step=20)

    assert report.tokens == 33
    assert len(report.results) == 70 // BLOCK_TOKENS - 2 + 1
    close(report.cache, model, tokens[:-1])


def test_nothing_to_read_is_nothing(prefixes, model):
    for tokens in ([], [5]):
        report = prefill(prefixes, model, tokens)
        assert (report.cache.get_seq_length(), report.results, report.failure) == (0, (), None)


def test_salts_part_prompts(prefixes, model):
    tokens = sequence(40)
    prefill(prefixes, model, tokens, salt="ann")

    assert prefill(prefixes, model, tokens, salt="bob").tokens == 0
    assert prefill(prefixes, model, tokens, salt="ann").tokens == 39


def test_a_model_of_another_shape_is_refused(prefixes):
    other = random_model(tiny_llama_config(num_hidden_layers=2))
    with pytest.raises(BlockMismatch, match="layers"):
        prefill(prefixes, other, sequence(40))


def test_a_daemon_that_goes_away_costs_nothing_but_time(model, request):
    tokens, passes = sequence(70), []
    with lossless_daemon() as daemon, daemon.client() as client:
        prefixes = PrefixCache(client, identity_for(model, request.node.nodeid))

        def forward(*args, **more):
            passes.append(1)
            if len(passes) == 2:
                daemon.kill()
            return model(*args, **more)

        forward.device = model.device
        report = prefill(prefixes, forward, tokens, step=20)
        assert len(report.results) == 1
        assert isinstance(report.failure, Unavailable)
        close(report.cache, model, tokens[:-1])

        without = prefill(prefixes, model, tokens)
        assert isinstance(without.failure, Unavailable)
        close(without.cache, model, tokens[:-1])
