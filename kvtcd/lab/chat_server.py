"""A small OpenAI-style chat server: one model, one answer at a time, the others wait."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from kvtcd.core.errors import BadField, BadRequest, Busy, NotFound
from kvtcd.core.fields import json_object
from kvtcd.lab.chat_model import Answered, Speaker
from kvtcd.lab.chat_protocol import Ask, Forms, failure

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOG = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Said = str | Answered | BaseException


class ChatServer:
    """The routes of one model.

    Args:
        name: of the model.
        speaker: answers.
        waiting: requests that may wait or be answered at once; more are refused.
    """

    def __init__(self, name: str, speaker: Speaker, *, waiting: int) -> None:
        self._name, self._speaker, self._most = name, speaker, waiting
        self._here: set[threading.Event] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvtcd-chat")

    def app(self) -> web.Application:
        """Return the application. Run it with ``handler_cancellation``: who goes away is not answered."""
        app = web.Application(middlewares=[_errors])
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model:.+}", self.models)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.on_shutdown.append(self._abandon)
        app.on_cleanup.append(self._end)
        return app

    async def models(self, request: web.Request) -> web.Response:
        """List the model, or describe it."""
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "kvtcd"}
        if (asked := request.match_info.get("model")) is None:
            return web.json_response({"object": "list", "data": [model]})
        self._require(asked)
        return web.json_response(model)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        if request.content_type != "application/json":  # a form of a web page can send no JSON unasked
            raise BadRequest("Content-Type", f"is {request.content_type}; send application/json")
        try:
            ask = Ask.from_json(json_object(await request.read()))
        except BadField as error:
            raise BadRequest("body", error.why) from None
        self._require(ask.model)
        with self._admitted() as abandoned:
            forms, pieces = Forms(self._name), self._pieces(ask, abandoned)
            return await (_streamed(request, ask, forms, pieces) if ask.stream else _whole(forms, pieces))

    def _require(self, model: str) -> None:
        if model != self._name:
            raise NotFound(f"model {model!r}; this server has {self._name!r}")

    @contextmanager
    def _admitted(self) -> Iterator[threading.Event]:
        """Count a request; at the end of the block nobody listens to its answer any more."""
        if len(self._here) >= self._most:
            raise Busy("the number of requests that wait", retry_after=5)
        abandoned = threading.Event()
        self._here.add(abandoned)
        try:
            yield abandoned
        finally:
            abandoned.set()
            self._here.discard(abandoned)

    async def _pieces(self, ask: Ask, abandoned: threading.Event) -> AsyncIterator[str | Answered]:
        """Yield the answer as it comes from the model's thread, and how it ended."""
        loop, said = asyncio.get_running_loop(), asyncio.Queue[Said]()

        def tell(piece: Said) -> None:
            if not abandoned.is_set():
                loop.call_soon_threadsafe(said.put_nowait, piece)

        def work() -> None:
            try:
                self._speaker.answer(ask, tell, abandoned)
            except Exception as error:  # noqa: BLE001 - raised again where the request is answered
                tell(error)

        self._thread.submit(work)
        while True:
            piece = await said.get()
            if isinstance(piece, BaseException):
                raise piece
            yield piece
            if isinstance(piece, Answered):
                return

    async def _abandon(self, _: web.Application) -> None:
        for abandoned in self._here:
            abandoned.set()

    async def _end(self, _: web.Application) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)


async def _whole(forms: Forms, pieces: AsyncIterator[str | Answered]) -> web.Response:
    text: list[str] = []
    async for piece in pieces:
        if isinstance(piece, Answered):
            return web.json_response(forms.whole("".join(text), piece.finish, piece.usage))
        text.append(piece)
    raise AssertionError("an answer has an end")


async def _streamed(
    request: web.Request, ask: Ask, forms: Forms, pieces: AsyncIterator[str | Answered]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    async def send(body: object) -> None:
        await response.write(f"data: {json.dumps(body)}\n\n".encode())

    try:
        async for piece in pieces:
            if not response.prepared:
                await response.prepare(request)
                await send(forms.piece(None))
            if not isinstance(piece, Answered):
                await send(forms.piece(piece))
                continue
            await send(forms.piece(None, piece.finish))
            if ask.include_usage:
                await send(forms.used(piece.usage))
            await response.write(b"data: [DONE]\n\n")
    except ConnectionError:  # who asked has gone
        return response
    except Exception as error:
        if not response.prepared:  # then it can still be answered with a status
            raise
        _LOG.exception("an answer broke off")
        await send(failure(str(error), "server_error"))
    await response.write_eof()
    return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error in OpenAI's form."""
    try:
        return await handler(request)
    except BadRequest as error:
        return _refused(400, failure(str(error), "invalid_request_error", error.field))
    except NotFound as error:
        return _refused(404, failure(str(error), "invalid_request_error", "model", "model_not_found"))
    except Busy as error:
        after = {"Retry-After": f"{error.retry_after:.0f}"}
        return _refused(429, failure(str(error), "rate_limit_error", None, "rate_limit_exceeded"), after)
    except web.HTTPException as error:
        return _refused(error.status, failure(error.reason, "invalid_request_error"))
    except Exception:  # noqa: BLE001 - logged, and answered in the form that clients read
        _LOG.exception("a request failed")
        return _refused(500, failure("the server failed; its log says why", "server_error"))


def _refused(status: int, body: dict[str, object], headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(body, status=status, headers=headers)
