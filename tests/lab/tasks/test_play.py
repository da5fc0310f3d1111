"""A tiny model takes on items: what it says is what it says in one pass, and stores are a daemon's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.calibration import Tokenizer, run, tiny_model

from kvtcd.codec.choose import Decoder, NamespaceCodec
from kvtcd.codec.kvtc import Kvtc
from kvtcd.codec.lossless import Lossless
from kvtcd.codec.ports import Encoded
from kvtcd.core.layout import Dtype
from kvtcd.lab import evaluate, models
from kvtcd.lab.capture import prefill
from kvtcd.lab.tasks.item import Item, Turn
from kvtcd.lab.tasks.play import Store, play

BLOCK = 32


class Letters(Tokenizer):
    """A token a character, and back."""

    eos_token_id = 63

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(64 + token) for token in tokens)


@pytest.fixture(scope="module", params=[(), (1,)], ids=["no BOS", "BOS"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "checkpoints").mkdir()
    loaded = tiny_model(folder / "model")
    loaded = dataclasses.replace(loaded, tokenizer=Letters(request.param))
    named = models.identity(loaded, Dtype.F32, block_tokens=BLOCK)
    return loaded, named, run(loaded, folder / "checkpoints").profile


def text(length: int, seed: int) -> str:
    return "".join(chr(64 + (seed + 7 * n * n + n) % 61) for n in range(length))


def lossless(named) -> NamespaceCodec:
    return NamespaceCodec(
        Lossless(named.layout), Decoder(named.layout, named.rope, lambda _: None), "lossless"
    )


def coarse(named, profile, window: int = 16) -> NamespaceCodec:
    encoder = Kvtc(named.layout, named.rope, profile, 32, window=window)
    return NamespaceCodec(encoder, Decoder(named.layout, named.rope, lambda _: profile), "kvtc 32")


def one_pass(loaded, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return loaded.model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)


CHAT = Item((Turn(text(50, 1), text(20, 2)), Turn(text(9, 3), text(12, 4)), Turn(text(5, 5), text(30, 6))))
QUESTION = Item(
    (Turn(text(90, 1)), Turn(text(6, 2), text(3, 3))),
    choices=("A", "B", "C"),
    answers=("B",),
    tokens=10,
    stop="",
)


def test_what_is_said_has_the_likelihood_of_one_pass(world) -> None:
    loaded, named, _ = world
    reply, _ = play(loaded, named, CHAT, {}, 16)
    tokens = list(loaded.tokenizer.start)
    want = []
    for turn in CHAT.turns:
        tokens += [ord(letter) % 64 for letter in turn.read]
        want.append((len(tokens), turn.said))
        tokens += [ord(letter) % 64 for letter in turn.said]
    logprobs = one_pass(loaded, tokens)
    expected = [
        float(logprobs[start + n - 1, tokens[start + n]])
        for start, said in want[1:]
        for n in range(len(said))
    ]
    assert len(reply.logprobs) == 42
    assert reply.logprobs == pytest.approx(expected, rel=1e-4)
    assert not reply.greedy


def test_what_is_generated_is_the_likeliest_of_one_pass(world) -> None:
    loaded, named, _ = world
    reply, _ = play(loaded, named, QUESTION, {}, 16)
    tokens = [*loaded.tokenizer.start, *(ord(c) % 64 for turn in QUESTION.turns for c in turn.read)]
    logits = one_pass(loaded, tokens)[-1]
    assert reply.choice == max("ABC", key=lambda letter: float(logits[ord(letter) % 64]))
    said: list[int] = []
    while len(said) < 10:
        said.append(int(one_pass(loaded, tokens + said)[-1].argmax()))
    end = said.index(63) if 63 in said else 10
    assert reply.text == loaded.tokenizer.decode(said[:end])
    greedy = dataclasses.replace(
        QUESTION, turns=(QUESTION.turns[0], Turn(QUESTION.turns[1].read, reply.text[:3])), tokens=0
    )
    assert play(loaded, named, greedy, {}, 16)[0].greedy


def test_generation_ends_at_its_stop(world) -> None:
    loaded, named, _ = world
    whole = play(loaded, named, QUESTION, {}, 16)[0].text
    stopped = dataclasses.replace(QUESTION, stop=whole[4])
    assert play(loaded, named, stopped, {}, 16)[0].text == whole[: whole.index(whole[4])]


@pytest.mark.parametrize("item", [CHAT, QUESTION])
def test_a_codec_that_loses_nothing_changes_nothing(world, item: Item) -> None:
    loaded, named, _ = world
    raw, packed = play(loaded, named, item, {"one": lossless(named), "other": lossless(named)}, 16)
    assert packed["one"] == packed["other"]
    assert packed["one"][0] == raw


def test_a_coarse_codec_shows(world) -> None:
    loaded, named, profile = world
    raw, packed = play(loaded, named, CHAT, {"coarse": coarse(named, profile)}, 16)
    reply, size = packed["coarse"]
    difference = torch.tensor(reply.logprobs) - torch.tensor(raw.logprobs)
    assert 1e-4 < difference.abs().mean() < 1
    assert size.ratio > 3


class Spy(Kvtc):
    """Writes down which blocks it packs."""

    def encode(self, raw, *, tokens: int, first_token: int | None, after: int) -> Encoded:
        self.packed.append((first_token, tokens, after))
        return super().encode(raw, tokens=tokens, first_token=first_token, after=after)


def test_full_blocks_are_packed_once_and_the_last_one_as_long_as_it_grows(world) -> None:
    loaded, named, profile = world
    spy = Spy(named.layout, named.rope, profile, 32, window=16)
    spy.packed = []
    codec = NamespaceCodec(spy, Decoder(named.layout, named.rope, lambda _: profile), "spy")
    store = Store(named, codec, 16)
    came_back = store(prefill(loaded, [n % 60 for n in range(70)]))
    assert spy.packed == [(0, 32, 38), (32, 32, 6), (64, 6, 0)]
    before = [layer.keys.clone() for layer in came_back.layers]
    evaluate.read_on(loaded, came_back, [n % 50 for n in range(40)])
    grown = [layer.keys.clone() for layer in came_back.layers]
    again = store(came_back)
    assert spy.packed[3:] == [(64, 32, 14), (96, 14, 0)]
    for early, late, grew in zip(before, again.layers, grown, strict=True):
        assert torch.equal(late.keys[:, :, :64], early[:, :, :64])
        assert not torch.equal(late.keys[:, :, 64:], grew[:, :, 64:])  # packed again, from what came back
    assert again.get_seq_length() == 110


def test_a_store_takes_what_its_last_blocks_take(world) -> None:
    loaded, named, profile = world
    store = Store(named, coarse(named, profile), 16)
    cache = prefill(loaded, [n % 60 for n in range(70)])
    store(cache)
    blocks = evaluate.cut(cache, named)
    encoded = evaluate.encode(coarse(named, profile).encoder, blocks)
    assert store.size == evaluate.size(named.layout, blocks, encoded, 16)
    assert store.size.all == 8 * sum(len(packed.blob) for packed in encoded)
    assert store.size.coded_raw == 16 * named.layout.token_elements * (70 - 4 - 16)
