"""Requests and answers in OpenAI's form."""

from __future__ import annotations

import pytest

from kvtcd.core.errors import BadRequest
from kvtcd.lab.chat_protocol import Ask, Forms, Usage

MESSAGES = [{"role": "user", "content": "Hi"}]


def ask(**fields: object) -> Ask:
    return Ask.from_json({"model": "m", "messages": MESSAGES} | fields)


def test_a_request_is_read_with_defaults_and_unknown_fields_are_ignored():
    assert ask(user="ann", store=False, tools=[], n=1, stop=None) == Ask(
        "m", ({"role": "user", "content": "Hi"},)
    )


def test_everything_that_is_understood_is_read():
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    got = ask(
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}],
        max_tokens=5, max_completion_tokens=7, temperature=0, top_p=0.5, seed=-3, stop="\n", stream=True,
        stream_options={"include_usage": True}, cache_salt="ann", response_format={"type": "text"},
    )  # fmt: skip
    assert got == Ask(
        "m", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}),
        7, 0.0, 0.5, -3, ("\n",), stream=True, include_usage=True, salt="ann",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"seed": "x"}, "seed"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"cache_salt": "x" * 256}, "cache_salt"),
        ({"n": 2}, "n"),
        ({"tools": [{}]}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_is_wrong_or_not_to_be_had_is_refused_by_name(fields, field):
    with pytest.raises(BadRequest) as refused:
        ask(**fields)
    assert refused.value.field == field


def test_answers_have_the_fields_that_clients_read():
    forms, usage = Forms("m", "chatcmpl-1", 17), Usage(prompt=10, cached=8, completion=3)
    used = {
        "prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 8},
    }  # fmt: skip
    head = {"id": "chatcmpl-1", "created": 17, "model": "m"}
    assert forms.whole("Yes", "stop", usage) == head | {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0, "logprobs": None, "finish_reason": "stop",
                "message": {"role": "assistant", "content": "Yes", "refusal": None},
            }
        ],
        "usage": used,
    }  # fmt: skip

    def chunk(delta: dict[str, str], finish: str | None = None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return head | {"object": "chat.completion.chunk", "choices": [choice]}

    assert forms.piece(None) == chunk({"role": "assistant", "content": ""})
    assert forms.piece("Yes") == chunk({"content": "Yes"})
    assert forms.piece(None, "length") == chunk({}, "length")
    assert forms.used(usage) == head | {"object": "chat.completion.chunk", "choices": [], "usage": used}
