"""What a model says with a fetched cache is what it says with its own; the daemon is a real process."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from support.models import random_model, tiny_llama_config
from support.patience import PATIENCE_S
from support.prefixes import BLOCK_TOKENS, assert_equal, identity_for, lossless_daemon, read, sequence
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvtcd.client import Client
from kvtcd.core.errors import BadIdentity, BadRequest, BlockMismatch, Unavailable, UnsupportedCache
from kvtcd.core.place import Tier
from kvtcd.integrations.transformers_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with lossless_daemon() as daemon, daemon.client() as client:
        yield client


@pytest.fixture(scope="module")
def model():
    return random_model(tiny_llama_config())


@pytest.fixture
def prefixes(client, model, request) -> PrefixCache:
    """A prefix cache whose namespace no other test uses."""
    return PrefixCache(client, identity_for(model, request.node.nodeid))


def go_on(model, tokens: list[int], cache: DynamicCache, steps: int = 12) -> list[int]:
    """Continue greedily from a cache of all but the last tokens."""
    with torch.no_grad():
        output = model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            cache=cache,
            max_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
        )
    return output[0, len(tokens) :].tolist()


def first(cache: DynamicCache, tokens: int) -> DynamicCache:
    """The model's own cache, cut to its first tokens."""
    return DynamicCache([(keys[:, :, :tokens], values[:, :, :tokens]) for keys, values, *_ in cache])


def tiers(prefixes: PrefixCache, tokens: list[int]) -> set[Tier | None]:
    found = prefixes._daemon.client.match_tokens(prefixes.namespace, tokens)
    return {block.tier for block in found.blocks}


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 53])
def test_a_model_goes_on_from_a_fetched_cache_as_from_its_own(prefixes, model, length, tier):
    tokens = sequence(length)
    own = read(model, tokens)
    report = prefixes.save(own, tokens, durable=True)
    assert (report.tokens, report.found, report.complete) == (length, 0, True)
    assert len(report.results) == -(-length // BLOCK_TOKENS)
    if tier is Tier.DISK:
        prefixes._daemon.client.demote(prefixes.namespace, [result.key for result in report.results])
    assert tiers(prefixes, tokens) == {tier}

    asked = [*tokens, 7]
    fetched = prefixes.load(asked)

    assert fetched.tokens == fetched.cache.get_seq_length() == length
    assert_equal(fetched.cache, own)
    assert go_on(model, asked, fetched.cache) == go_on(model, asked, first(own, length))


def test_one_token_at_least_is_left_to_compute(prefixes, model):
    tokens = sequence(2 * BLOCK_TOKENS)
    own = read(model, tokens)
    prefixes.save(own, tokens)

    fetched = prefixes.load(tokens)

    assert fetched.tokens == len(tokens) - 1
    assert_equal(fetched.cache, first(own, len(tokens) - 1))
    assert go_on(model, tokens, fetched.cache) == go_on(model, tokens, first(own, len(tokens) - 1))
    assert prefixes.load(tokens[:1]).tokens == 0
    assert prefixes.load([]).tokens == 0


def test_only_what_is_missing_is_sent_and_a_longer_block_supersedes_the_shorter(prefixes, model):
    tokens = sequence(70)
    own = read(model, tokens)
    before = prefixes._daemon.client.stats()["blocks"]
    stored: list[tuple[int, int]] = []
    for length in (20, 20, 25, 40, 70):
        report = prefixes.save(first(own, length), tokens[:length], durable=True)
        stored.append((report.found, len(report.results)))
        assert prefixes.load([*tokens[:length], 7]).tokens == length
    assert stored == [(0, 2), (20, 0), (16, 1), (16, 2), (32, 3)]
    deadline = time.monotonic() + PATIENCE_S
    while prefixes._daemon.client.stats()["blocks"] - before > 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert prefixes._daemon.client.stats()["blocks"] - before == 5, "4 full blocks and the last partial one"


def test_branches_share_their_prefix(prefixes, model):
    trunk = sequence(2 * BLOCK_TOKENS)
    for seed in (1, 2):
        tokens = trunk + sequence(20, seed)
        own = read(model, tokens)
        report = prefixes.save(own, tokens)
        assert report.found == (0 if seed == 1 else len(trunk))
        assert_equal(prefixes.load([*tokens, 7]).cache, own)
    assert prefixes.load(trunk + sequence(20, 3)).tokens == len(trunk)
    assert prefixes.load(sequence(40, 4)).tokens == 0


def test_what_generate_returns_can_be_saved_as_it_is(prefixes, model):
    tokens = sequence(20)
    fetched = prefixes.load(tokens)
    assert (fetched.tokens, fetched.cache.get_seq_length()) == (0, 0)
    with torch.no_grad():
        output = model.generate(
            torch.tensor([tokens]),
            cache=fetched.cache,
            max_new_tokens=15,
            do_sample=False,
            pad_token_id=0,
        )

    report = prefixes.save(fetched.cache, output)

    assert report.tokens == output.shape[1] - 1
    assert prefixes.load(output[0]).tokens == output.shape[1] - 1


def test_salts_and_weights_part_caches(client, model, prefixes):
    tokens = sequence(20)
    prefixes.save(read(model, tokens), tokens)
    salted = PrefixCache(client, prefixes.identity, salt="salt")
    tuned = PrefixCache(client, replace(prefixes.identity, weights="f" * 64))

    assert salted.namespace == prefixes.namespace
    assert tuned.namespace != prefixes.namespace
    assert salted.load(tokens).tokens == tuned.load(tokens).tokens == 0
    assert prefixes.load(tokens).tokens == 19


def test_a_namespace_registered_under_another_name_is_used(client, prefixes):
    identity = replace(prefixes.identity, weights="e" * 64)
    client.register("mine", identity)

    assert PrefixCache(client, identity).namespace == "mine"


def test_caches_that_forget_their_past_are_refused(prefixes):
    cache = read(random_model(tiny_llama_config()), sequence(8))
    cache.layers[1] = DynamicSlidingWindowLayer(sliding_window=4)
    with pytest.raises(UnsupportedCache, match="layer 1"):
        prefixes.save(cache, sequence(8))
    with pytest.raises(UnsupportedCache):
        prefixes.save(StaticCache(tiny_llama_config(), max_cache_len=8), sequence(8))


def test_a_cache_of_another_model_is_refused_and_nothing_is_stored(prefixes, model):
    tokens = sequence(20)
    with pytest.raises(BlockMismatch, match="float32"):
        prefixes.save(read(model.to(torch.bfloat16), tokens), tokens)
    model.to(torch.float32)
    with pytest.raises(BlockMismatch, match="layers"):
        prefixes.save(read(random_model(tiny_llama_config(num_hidden_layers=2)), tokens), tokens)
    with pytest.raises(BlockMismatch, match="tokens"):
        prefixes.save(read(model, tokens), tokens[:-1])
    with pytest.raises(BadRequest, match="batch of 2"):
        prefixes.save(read(model, tokens), torch.tensor([tokens, tokens]))
    assert prefixes.load(tokens).tokens == 0


def test_a_model_from_a_folder_needs_no_identity(client, tmp_path):
    random_model(tiny_llama_config()).save_pretrained(tmp_path / "Tiny Model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "Tiny Model", dtype=torch.float32)
    prefixes = PrefixCache(client, loaded, block_tokens=BLOCK_TOKENS)
    tokens = sequence(20)
    own = read(loaded, tokens)

    prefixes.save(own, tokens)

    assert prefixes.namespace.startswith("tiny-model-")
    assert_equal(prefixes.load([*tokens, 7]).cache, own)


def test_a_salt_of_one_call_stands_in_for_that_of_the_instance(prefixes, model):
    tokens = sequence(20)
    prefixes.save(read(model, tokens), tokens, salt="ann")

    assert prefixes.load(tokens).tokens == prefixes.load(tokens, salt="bob").tokens == 0
    assert prefixes.load(tokens, salt="ann").tokens == 19
    of_ann = PrefixCache(prefixes._daemon.client, prefixes.identity, salt="ann")
    assert of_ann.load(tokens).tokens == 19
    assert of_ann.load(tokens, salt="").tokens == 0, "no salt is one too"


def test_a_partial_block_can_be_left_out(prefixes, model):
    tokens = sequence(20)
    report = prefixes.save(read(model, tokens), tokens, partial=False)

    assert (report.tokens, len(report.results)) == (16, 1)
    assert prefixes.load([*tokens, 7]).tokens == 16


def test_what_would_be_mistaken_for_something_else_is_refused(client, model, prefixes):
    with pytest.raises(BadIdentity, match="not loaded from a folder"):
        PrefixCache(client, model)
    for field in ("hash_scheme", "page_format", "parallel", "scales"):
        with pytest.raises(BadIdentity, match=field):
            PrefixCache(client, replace(prefixes.identity, **{field: "other"}))


def test_the_registration_takes_a_deadline_of_its_own(client, model, request) -> None:
    identity = identity_for(model, request.node.nodeid)
    with pytest.raises(BadRequest, match="deadline"):
        PrefixCache(client, identity, deadline=0)
    assert PrefixCache(client, identity, deadline=60).namespace == PrefixCache(client, identity).namespace


def test_a_daemon_that_is_away_is_done_without_and_found_again(model, request, caplog) -> None:
    """Dead when the cache is made, dead in between, and with none of its state when it comes back."""
    tokens, identity = sequence(40), identity_for(model, request.node.nodeid)
    own = read(model, tokens)
    with lossless_daemon() as daemon, Client(daemon.socket) as client:
        daemon.kill()
        prefixes = PrefixCache(client, identity)
        assert isinstance(prefixes.failure, Unavailable)
        with pytest.raises(Unavailable):
            _ = prefixes.namespace
        for _ in range(3):
            missed = prefixes.load(tokens)
            assert (missed.tokens, missed.cache.get_seq_length()) == (0, 0)
            assert isinstance(missed.failure, Unavailable)
        saved = prefixes.save(own, tokens)
        assert (saved.complete, saved.results, type(saved.failure)) == (False, (), Unavailable)
        batch = prefixes.load_batch([tokens, tokens], pad=0)
        assert (batch.tokens, type(batch.failure)) == ((0, 0), Unavailable)
        assert prefixes.failures == 7
        assert len([line for line in caplog.messages if "until the daemon answers" in line]) == 1

        daemon.start()
        comes_back(prefixes, own, tokens)
        assert prefixes.load([*tokens, 7]).tokens == 40
        assert (prefixes.failure, prefixes.failures >= 7) == (None, True)

        daemon.stop()
        shutil.rmtree(daemon.socket.parent / "state")
        daemon.start()
        comes_back(prefixes, own, tokens)
        assert prefixes.load([*tokens, 7]).tokens == 40


def test_a_namespace_that_was_purged_begins_anew_in_the_same_call(client, prefixes, model) -> None:
    tokens = sequence(40)
    own = read(model, tokens)
    prefixes.save(own, tokens)
    client.purge(prefixes.namespace)
    assert (prefixes.load(tokens).tokens, prefixes.failures) == (0, 0)
    client.purge(prefixes.namespace)
    assert prefixes.save(own, tokens).complete
    assert (prefixes.load([*tokens, 7]).tokens, prefixes.failures) == (40, 0)


def comes_back(prefixes: PrefixCache, own: DynamicCache, tokens: list[int]) -> None:
    """Store once the daemon takes it."""
    deadline = time.monotonic() + PATIENCE_S
    while not prefixes.save(own, tokens).complete:
        assert time.monotonic() < deadline, prefixes.failure
        time.sleep(0.05)
