"""What a chat server says and is told, in OpenAI's words (`POST /v1/chat/completions`), without I/O.

Fields that change nothing here are ignored, as other servers do; those that would change the answer are
refused by name.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvtcd.core.errors import BadRequest
from kvtcd.core.fields import Fields, string
from kvtcd.core.keys import MAX_SALT

Finish = Literal["stop", "length"]
_MAX_TOKENS = 1 << 20
_NOT_HERE = ("tools", "functions", "logprobs", "audio", "prediction")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for an answer.

    Attributes:
        model: which it is meant for.
        messages: `role` and `content` of each, in order.
        max_tokens: of the answer; None: the server says.
        temperature: 0 takes the likeliest token.
        top_p: share of likelihood that is sampled from.
        seed: of sampling.
        stop: texts that end the answer, and are not part of it.
        stream: whether the answer is sent as it comes.
        include_usage: whether a stream ends with the usage.
        salt: parts what is stored of this conversation from that of others.
    """

    model: str
    messages: tuple[Mapping[str, str], ...]
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    salt: str = ""

    @classmethod
    def from_json(cls, body: object) -> Ask:
        """Read a request.

        Raises:
            BadRequest: a field is missing, of the wrong type, out of range, or not to be had here.
        """
        given = Fields(body, "body")
        for name in _NOT_HERE:
            if name in given and given.value(name):
                raise BadRequest(name, "is not to be had here")
        if "n" in given and given.value("n") != 1:
            raise BadRequest("n", "is not 1; this server gives one answer to a request")
        if "response_format" in given and given.value("response_format") != {"type": "text"}:
            raise BadRequest("response_format", "is not text, the only one here")
        limit = next((name for name in ("max_completion_tokens", "max_tokens") if name in given), None)
        options = (
            Fields(given.value("stream_options"), "stream_options") if "stream_options" in given else None
        )
        salt = given.optional_text("cache_salt") or ""
        if (size := len(salt.encode())) > MAX_SALT:
            raise BadRequest("cache_salt", f"has {size} bytes; at most {MAX_SALT}")
        return cls(
            model=given.text("model"),
            messages=_messages(given.items("messages")),
            max_tokens=given.integer(limit, 1, _MAX_TOKENS) if limit else None,
            temperature=given.number("temperature", 0, 2) if "temperature" in given else 1.0,
            top_p=given.number("top_p", 0, 1) if "top_p" in given else 1.0,
            seed=given.integer("seed", -(1 << 63), (1 << 63) - 1) if "seed" in given else None,
            stop=_stops(given),
            stream=_flag(given, "stream"),
            include_usage=options is not None and _flag(options, "include_usage"),
            salt=salt,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of prompt and answer, and how many of the prompt were fetched instead of computed."""

    prompt: int
    cached: int
    completion: int

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True, slots=True)
class Forms:
    """The objects that answer one request."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish: Finish, usage: Usage) -> dict[str, object]:
        """Return an answer in one piece."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self._object("chat.completion", [choice]) | {"usage": usage.to_json()}

    def piece(self, text: str | None, finish: Finish | None = None) -> dict[str, object]:
        """Return a piece of a stream; the first, without a text, says who speaks, the last why it ends."""
        delta = (
            {"content": text} if text is not None else {} if finish else {"role": "assistant", "content": ""}
        )
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._object("chat.completion.chunk", [choice])

    def used(self, usage: Usage) -> dict[str, object]:
        """Return the piece of a stream that says what it took."""
        return self._object("chat.completion.chunk", []) | {"usage": usage.to_json()}

    def _object(self, kind: str, choices: Sequence[object]) -> dict[str, object]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices
        }  # fmt: skip


def failure(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """Return an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _messages(items: Sequence[object]) -> tuple[Mapping[str, str], ...]:
    if not items:
        raise BadRequest("messages", "are none")
    messages = []
    for number, item in enumerate(items):
        where = f"messages[{number}]"
        given = Fields(item, where)
        role = given.choice("role", ("system", "developer", "user", "assistant"))
        content = given.value("content")
        if isinstance(content, list):
            content = "".join(_text_part(part, where) for part in content)
        messages.append(
            {
                "role": "system" if role == "developer" else role,
                "content": string(f"{where}.content", content),
            }
        )
    return tuple(messages)


def _text_part(part: object, where: str) -> str:
    given = Fields(part, f"{where}.content")
    if given.text("type") != "text":
        raise BadRequest(f"{where}.content", f"has a part of type {given.text('type')!r}; only text is read")
    return given.text("text")


def _stops(given: Fields) -> tuple[str, ...]:
    if "stop" not in given:
        return ()
    value = given.value("stop")
    stops = [string("stop", text) for text in (value if isinstance(value, list) else [value])]
    if len(stops) > 4 or not all(stops):
        raise BadRequest("stop", "is not one to four texts, none of them empty")
    return tuple(stops)


def _flag(given: Fields, name: str) -> bool:
    value = given.value(name) if name in given else False
    if not isinstance(value, bool):
        raise BadRequest(name, "is neither true nor false")
    return value
