"""A chat server says with a daemon what it says without one, and has less to read."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING

import pytest
from aiohttp.test_utils import TestClient, TestServer
from support.chatting import WINDOW, chatting_model
from support.models import real_model
from support.patience import PATIENCE_S
from support.prefixes import BLOCK_TOKENS, lossless_daemon

from kvtcd.client import Client
from kvtcd.core.layout import Dtype
from kvtcd.lab import models
from kvtcd.lab.chat_model import Answered, Speaker
from kvtcd.lab.chat_protocol import Usage
from kvtcd.lab.chat_server import ChatServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from kvtcd.lab.daemon import Daemon
    from kvtcd.lab.models import LoadedModel

COMPLETIONS = "/v1/chat/completions"
FIRST = [{"role": "user", "content": "How long is the coast of Norway? Tell me more."}]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with lossless_daemon() as daemon:
        yield daemon


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    """A daemon that a test may kill."""
    with lossless_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    return chatting_model(tmp_path_factory.mktemp("chat") / "tiny")


@asynccontextmanager
async def serving(loaded: LoadedModel, address: object, *, waiting: int = 4) -> AsyncIterator[TestClient]:
    identity = await asyncio.to_thread(models.identity, loaded, Dtype.F32, BLOCK_TOKENS)
    speaker = await asyncio.to_thread(Speaker, loaded, identity, Client(address), step=32, most=24)
    server = TestServer(ChatServer("tiny", speaker, waiting=waiting).app())
    async with TestClient(server) as client:
        yield client


async def ask(client: TestClient, messages: list[dict[str, str]], **fields: object) -> dict[str, object]:
    body = {"model": "tiny", "messages": messages, "temperature": 0} | fields
    async with client.post(COMPLETIONS, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def said(answer) -> str:
    return answer["choices"][0]["message"]["content"]


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def then(messages, answer, question: str) -> list[dict[str, str]]:
    """The conversation, one turn later."""
    return [
        *messages,
        {"role": "assistant", "content": said(answer)},
        {"role": "user", "content": question},
    ]


@pytest.mark.asyncio
async def test_a_second_turn_reuses_the_first_and_says_the_same_as_without_a_daemon(loaded, daemon, tmp_path):
    async with serving(loaded, daemon.socket) as client, serving(loaded, tmp_path / "no.sock") as bare:
        one, alone = await ask(client, FIRST), await ask(bare, FIRST)
        assert said(one) == said(alone) != ""
        assert cached(one) == cached(alone) == 0
        again = await ask(client, FIRST)
        assert cached(again) == one["usage"]["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
        second = then(FIRST, one, "Why?")
        two, alone = await ask(client, second), await ask(bare, second)

    assert said(two) == said(alone)
    assert cached(alone) == 0
    assert cached(two) == one["usage"]["total_tokens"] - 1, "all of the first turn but its last token"
    assert two["choices"][0]["finish_reason"] == "length"
    assert two["usage"]["completion_tokens"] == 24


@pytest.mark.asyncio
async def test_a_stream_brings_the_same_words_and_the_usage(loaded, daemon):
    async with serving(loaded, daemon.socket) as client:
        whole = await ask(client, FIRST, cache_salt="stream")
        body = {"model": "tiny", "messages": FIRST, "temperature": 0, "stream": True, "cache_salt": "stream"}
        lines = []
        async with client.post(
            COMPLETIONS, json=body | {"stream_options": {"include_usage": True}}
        ) as response:
            assert response.content_type == "text/event-stream"
            lines = [line for line in (await response.text()).split("\n\n") if line]

    assert lines[-1] == "data: [DONE]"
    *pieces, usage = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces) == said(whole)
    assert [p["choices"][0]["finish_reason"] for p in pieces[-2:]] == [None, "length"]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.asyncio
async def test_salts_part_conversations(loaded, daemon):
    async with serving(loaded, daemon.socket) as client:
        for salt, again in (("ann", False), ("bob", False), ("ann", True), ("bob", True)):
            assert (cached(await ask(client, FIRST, cache_salt=salt)) > 0) == again


@pytest.mark.asyncio
async def test_without_a_daemon_it_answers_and_uses_one_that_comes(loaded, own_daemon):
    async with serving(loaded, own_daemon.socket) as client:
        await asyncio.to_thread(own_daemon.kill)
        first = await ask(client, FIRST)
        assert cached(first) == 0
        await asyncio.to_thread(own_daemon.start)
        assert said(await ask(client, FIRST)) == said(first)
        assert cached(await ask(client, FIRST)) > 0
        await asyncio.to_thread(own_daemon.kill)
        assert said(await ask(client, FIRST)) == said(first)


@pytest.mark.asyncio
async def test_answers_end_where_they_are_to(loaded, tmp_path):
    async with serving(loaded, tmp_path / "no.sock") as client:
        text = said(await ask(client, FIRST))
        short = await ask(client, FIRST, max_tokens=3)
        stopped = await ask(client, FIRST, stop=[text[5:8]])
        before = loaded.model.generation_config.eos_token_id
        loaded.model.generation_config.eos_token_id = loaded.tokenizer(text[4]).input_ids
        try:
            ended = await ask(client, FIRST)
        finally:
            loaded.model.generation_config.eos_token_id = before
        drawn = [said(await ask(client, FIRST, temperature=2, seed=seed)) for seed in (1, 1, 2)]
        narrow = said(await ask(client, FIRST, temperature=2, top_p=0))

    assert (said(short), short["usage"]["completion_tokens"]) == (text[:3], 3)
    assert said(stopped) == text[: text.index(text[5:8])]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert said(ended) == text[: text.index(text[4])]
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert drawn[0] == drawn[1] != drawn[2]
    assert narrow == text, "of the likeliest alone, the likeliest is drawn"


@pytest.mark.asyncio
async def test_errors_have_the_form_that_clients_read(loaded, tmp_path):
    fine = {"model": "tiny", "messages": FIRST}
    too_long = [{"role": "user", "content": "x" * WINDOW}]
    async with serving(loaded, tmp_path / "no.sock") as client:

        async def refused(path: str = COMPLETIONS, method: str = "POST", **how: object) -> tuple[int, dict]:
            async with client.request(method, path, **how) as response:
                return response.status, (await response.json())["error"]

        for status, param, code, answer in (
            (400, "messages", None, await refused(json=fine | {"messages": []})),
            (400, "messages", None, await refused(json=fine | {"messages": too_long})),
            (400, "messages", None, await refused(json=fine | {"messages": too_long, "stream": True})),
            (400, "body", None, await refused(data=b"{", headers={"Content-Type": "application/json"})),
            (400, "Content-Type", None, await refused(data=json.dumps(fine))),
            (404, "model", "model_not_found", await refused(json=fine | {"model": "other"})),
            (404, "model", "model_not_found", await refused("/v1/models/other", "GET")),
            (404, None, None, await refused("/v1/completions")),
            (405, None, None, await refused(COMPLETIONS, "GET")),
        ):
            assert (answer[0], answer[1]["param"], answer[1]["code"]) == (status, param, code)
            assert answer[1]["type"] == "invalid_request_error"
            assert answer[1]["message"]
        async with client.get("/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
        async with client.get("/v1/models/tiny") as response:
            assert (await response.json())["object"] == "model"


class Slow(Speaker):
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.go, self.abandoned = threading.Event(), list[threading.Event]()

    def answer(self, ask, tell, abandoned) -> None:
        self.abandoned.append(abandoned)
        self.go.wait(PATIENCE_S)
        if ask.seed:
            raise RuntimeError("out of luck")
        tell("Yes")
        tell(Answered("stop", Usage(1, 0, 1)))


@pytest.mark.asyncio
async def test_more_than_may_wait_are_refused_and_failures_are_answered():
    speaker = Slow()
    server = ChatServer("tiny", speaker, waiting=2)
    async with TestClient(TestServer(server.app())) as client:
        waiting = [asyncio.create_task(ask(client, FIRST)) for _ in range(2)]
        while len(server._here) < 2:  # noqa: ASYNC110 - a set tells nobody
            await asyncio.sleep(0.01)
        async with client.post(COMPLETIONS, json={"model": "tiny", "messages": FIRST}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "5"
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        speaker.go.set()
        assert [said(answer) for answer in await asyncio.gather(*waiting)] == ["Yes", "Yes"]
        async with client.post(COMPLETIONS, json={"model": "tiny", "messages": FIRST, "seed": 1}) as response:
            assert response.status == 500
            error = (await response.json())["error"]
            assert (error["type"], "luck" in error["message"]) == ("server_error", False)


@pytest.mark.asyncio
async def test_who_goes_away_is_not_answered():
    speaker = Slow()
    async with TestClient(TestServer(ChatServer("tiny", speaker, waiting=1).app())) as client:
        for stream in (False, True):
            waiting = asyncio.create_task(ask(client, FIRST, stream=stream))
            count = len(speaker.abandoned)
            while len(speaker.abandoned) == count:  # noqa: ASYNC110 - a thread
                await asyncio.sleep(0.01)
            waiting.cancel()
            while not speaker.abandoned[-1].is_set():  # noqa: ASYNC110 - a thread
                await asyncio.sleep(0.01)
            speaker.go.set()
            speaker.go = threading.Event()
        speaker.go.set()
        assert said(await ask(client, FIRST)) == "Yes", "the place is free again"


@pytest.mark.slow
def test_the_command_says_that_there_is_no_daemon_and_serves_without(loaded, tmp_path):
    loaded.tokenizer.save_pretrained(loaded.folder)
    wrong = tmp_path / "no.sock"
    arguments = ["--port", "0", "--model", str(loaded.folder), "--daemon", str(wrong)]
    server = subprocess.Popen(
        [sys.executable, "-m", "kvtcd", "chat", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        said_first, address = islice(filter(str.strip, server.stdout), 2)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE_S)
        server.stdout.close()
    assert said_first.startswith("answering without the daemon, and with it once it is there: ")
    assert str(wrong) in said_first
    assert address.startswith("http://127.0.0.1:")


@pytest.mark.model
@pytest.mark.slow
def test_the_command_serves_a_real_model_and_its_second_turn_is_cheaper():
    real_model("smollm2")
    with lossless_daemon() as daemon:
        server = subprocess.Popen(
            [sys.executable, "-m", "kvtcd", "chat", "--port", "0", "--daemon", str(daemon.socket)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            url = next(line.strip() for line in server.stdout if line.startswith("http"))

            def answer(messages):
                body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 12}
                request = urllib.request.Request(  # noqa: S310 - our own server
                    url + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=250) as response:  # noqa: S310 - our own server
                    return json.load(response)

            messages = [{"role": "user", "content": "What is the capital of France?"}]
            one = answer(messages)
            two = answer(then(messages, one, "And of Italy?"))
        finally:
            server.send_signal(signal.SIGTERM)
            ended = server.wait(PATIENCE_S)
            server.stdout.close()
    assert ended == 0
    assert "Paris" in said(one)
    assert cached(one) == 0
    assert cached(two) == one["usage"]["total_tokens"] - 1
