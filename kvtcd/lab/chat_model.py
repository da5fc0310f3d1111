"""A model that answers conversations, and keeps what it has read and said in a daemon."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvtcd.client import Client
from kvtcd.core.errors import BadRequest
from kvtcd.core.identity import Identity
from kvtcd.integrations.transformers_cache import PrefixCache
from kvtcd.integrations.transformers_prefill import prefill
from kvtcd.lab.chat_protocol import Ask, Finish, Usage
from kvtcd.lab.chat_text import UntilStop, Words
from kvtcd.lab.models import LoadedModel

_DEADLINE = 30.0


@dataclass(frozen=True, slots=True)
class Answered:
    """How an answer ended."""

    finish: Finish
    usage: Usage


class Speaker:
    """Answers one request at a time; call it in one thread.

    Args:
        loaded: the model.
        identity: of its caches.
        client: of the daemon, which may be away.
        step: tokens that are read in one pass.
        most: tokens of an answer, for requests that say nothing.

    Attributes:
        prefixes: what it has in the daemon.
    """

    def __init__(
        self, loaded: LoadedModel, identity: Identity, client: Client, *, step: int, most: int
    ) -> None:
        self._loaded = loaded
        self._step, self._most = step, most
        self.prefixes = PrefixCache(client, identity)

    def answer(self, ask: Ask, tell: Callable[[str | Answered], None], abandoned: threading.Event) -> None:
        """Answer a request; what was read and said is stored once it is answered.

        Args:
            ask: the request.
            tell: told each piece of the answer, and how it ended before anything more is stored.
            abandoned: set when nobody listens any more.

        Raises:
            BadRequest: the conversation is longer than the model can read, or not as its template needs it.
        """
        if abandoned.is_set():
            return
        prompt, window = self._prompt(ask), self._loaded.model.config.max_position_embeddings
        if len(prompt) >= window:
            raise BadRequest("messages", f"have {len(prompt)} tokens; this model reads {window - 1}")
        read = prefill(
            self.prefixes, self._loaded.model, prompt, step=self._step, salt=ask.salt, deadline=_DEADLINE
        )  # fmt: skip
        ask = replace(ask, max_tokens=min(ask.max_tokens or self._most, window - len(prompt)))
        said, finish = self._speak(ask, read.cache, prompt[-1], tell, abandoned)
        tell(Answered(finish, Usage(len(prompt), read.tokens, len(said))))
        if read.failure is None:
            self.prefixes.save(read.cache, [*prompt, *said], salt=ask.salt, deadline=_DEADLINE)

    def _prompt(self, ask: Ask) -> list[int]:
        template: Any = self._loaded.tokenizer.apply_chat_template
        try:
            text = template([dict(m) for m in ask.messages], tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes, and it is the model's, not ours
            raise BadRequest("messages", f"do not fit the chat template of the model: {error}") from error
        tokens: list[int] = self._loaded.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return tokens

    def _speak(
        self,
        ask: Ask,
        cache: DynamicCache,
        token: int,
        tell: Callable[[str], None],
        abandoned: threading.Event,
    ) -> tuple[list[int], Finish]:
        """Go on from the prompt's last token. The cache of those before it grows by all but the last said."""
        tokenizer: Any = self._loaded.tokenizer
        words = Words(lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)))
        text, draw, said = UntilStop(ask.stop), torch.Generator(), list[int]()
        draw.manual_seed(ask.seed) if ask.seed is not None else draw.seed()
        while len(said) < (ask.max_tokens or self._most) and not abandoned.is_set():
            with torch.no_grad():
                out = self._loaded.model(torch.tensor([[token]]), cache=cache, logits_to_keep=1)
            token = _next(out.logits[0, -1].float(), ask, draw)
            said.append(token)
            if token not in self._ends and (shown := text.add(words.add(token))):
                tell(shown)
            if token in self._ends or text.stopped:
                break
        if not text.stopped and (shown := text.add(words.rest()) + text.rest()):
            tell(shown)
        return said, "stop" if text.stopped or token in self._ends else "length"

    @property
    def _ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        told = self._loaded.model.generation_config.eos_token_id
        ends = told if isinstance(told, list) else [told, self._loaded.tokenizer.eos_token_id]
        return frozenset(token for token in ends if isinstance(token, int))


def _next(logits: Tensor, ask: Ask, draw: torch.Generator) -> int:
    """Choose a token: the likeliest at temperature 0, else one of the likeliest with `top_p` together."""
    if ask.temperature == 0:
        return int(logits.argmax())
    shares, order = torch.softmax(logits / ask.temperature, 0).sort(descending=True)
    shares[1:][shares.cumsum(0)[:-1] >= ask.top_p] = 0
    return int(order[torch.multinomial(shares, 1, generator=draw)])
