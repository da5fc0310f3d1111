"""A model takes on an item: behind its own cache, and behind one that a codec had after every turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from kvtcd.codec.choose import NamespaceCodec
from kvtcd.core.identity import Identity
from kvtcd.integrations.transformers_blocks import cache_from_raw
from kvtcd.lab import evaluate, models
from kvtcd.lab.capture import prefill
from kvtcd.lab.evaluate import Size
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.tasks.item import Item, Reply

Key = TypeVar("Key")


class Store:
    """The blocks of one sequence as a daemon keeps them.

    Each is packed when it is first stored. Full ones stay as they are when the sequence grows; the partial
    one at the end is packed anew, from what the cache then holds.

    Args:
        identity: of the cache.
        codec: that packs.
        window: tokens at the end that do not count as coded, see `evaluate.size`.
    """

    def __init__(self, identity: Identity, codec: NamespaceCodec, window: int) -> None:
        self._identity, self._codec, self._window = identity, codec, window
        self._blocks: list[Tensor] = []
        self._sizes: list[Size] = []

    def __call__(self, cache: DynamicCache) -> DynamicCache:
        """Store a cache that continues the one that came back; return what comes back now."""
        layout, block_tokens = self._identity.layout, self._identity.block_tokens
        full = sum(block.numel() == layout.nbytes(block_tokens) for block in self._blocks)
        fresh = evaluate.cut(cache, self._identity, full * block_tokens)
        encoded = evaluate.encode(self._codec.encoder, fresh)
        self._blocks[full:] = evaluate.decode(self._codec.decoder, fresh, encoded)
        self._sizes[full:] = [
            evaluate.size(layout, [block], [packed], self._window)
            for block, packed in zip(fresh, encoded, strict=True)
        ]
        return cache_from_raw(self._blocks, layout)

    @property
    def size(self) -> Size:
        """What all blocks take."""
        return reduce(add, self._sizes, Size())


def play(
    loaded: LoadedModel, identity: Identity, item: Item, codecs: Mapping[Key, NamespaceCodec], window: int
) -> tuple[Reply, dict[Key, tuple[Reply, Size]]]:
    """Let the model take on an item; return its reply, and for each codec its reply and what was stored.

    Raises:
        UnsupportedCache: a layer of the model does not keep its whole past.
    """
    first = item.turns[0]
    cache = prefill(loaded, [*models.tokenize(loaded, first.read), *_tokens(loaded, first.said)])
    packed = {}
    for key, codec in codecs.items():
        store = Store(identity, codec, window)
        packed[key] = _reply(loaded, item, store(cache), store), store.size
    return _reply(loaded, item, cache, lambda untouched: untouched), packed


def _reply(
    loaded: LoadedModel, item: Item, cache: DynamicCache, store: Callable[[DynamicCache], DynamicCache]
) -> Reply:
    """Go through the turns behind the first, whose cache is given; it grows."""
    logprobs: list[float] = []
    greedy, choice, text = True, "", ""
    for turn in item.turns[1:]:
        held, read, said = cache.get_seq_length(), _tokens(loaded, turn.read), _tokens(loaded, turn.said)
        assert read, "what a turn says follows from what it reads"
        last = turn is item.turns[-1]
        if said or (last and item.choices):
            logits = evaluate.read_on(loaded, cache, [*read, *said])[len(read) - 1 :]
            spoken = torch.tensor(said, device=logits.device, dtype=torch.int64)
            of_said = logits[: len(said)].log_softmax(dim=-1).gather(1, spoken[:, None])
            logprobs += of_said[:, 0].tolist()
            greedy &= bool((logits[: len(said)].argmax(dim=-1) == spoken).all())
            if last and item.choices:
                choice = max(item.choices, key=lambda one: float(logits[0, _tokens(loaded, one)[0]]))
        if last and item.tokens:
            if read_since := cache.get_seq_length() - held:
                cache.crop(-read_since)
            text = _generate(loaded, cache, read, item)
        if not last:
            cache = store(cache)
    return Reply(tuple(logprobs), greedy and bool(logprobs), choice, text)


def _generate(loaded: LoadedModel, cache: DynamicCache, read: list[int], item: Item) -> str:
    """Generate greedily, up to the stop, the model's own end or the most tokens there may be."""
    said: list[int] = []
    text = ""
    while len(said) < item.tokens:
        with torch.no_grad():
            ids = torch.tensor([said[-1:] or read], device=loaded.model.device)
            token = int(loaded.model(ids, cache=cache, logits_to_keep=1).logits[0, -1].argmax())
        if token == loaded.tokenizer.eos_token_id:
            break
        said.append(token)
        text = str(loaded.tokenizer.decode(said))
        indent = len(text) - len(text.lstrip())
        if item.stop and (end := text.find(item.stop, indent)) >= 0:
            return text[:end]
    return text


def _tokens(loaded: LoadedModel, text: str) -> list[int]:
    """Tokens of a text that continues another."""
    return models.tokenize(loaded, text)[len(models.tokenize(loaded, "")) :]
